"""A plan as a person reads it, and as a program does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twostroke.cli import units
from twostroke.core.formats import find_weight_format
from twostroke.cost.classify import RequestLengths
from twostroke.cost.model_shape import DecodeWeights
from twostroke.cost.roofline import matmul_points
from twostroke.planner.deployment import Deployment
from twostroke.planner.estimate import Estimate, Phase, Seconds
from twostroke.planner.live import Calibrated
from twostroke.planner.not_run import not_run
from twostroke.planner.search import Found, Rejected

if TYPE_CHECKING:
    from twostroke.cli.plan_tail import Tail
    from twostroke.planner.asked.model import PlannedModel

Row = tuple[str, str]
SHOWN_FOUND = 8
SHOWN_REJECTED = 3
SIDES = {"memory": "mem", "arithmetic": "ALU"}
"""For columns that have little room."""


def show(console: Console, result: Estimate) -> None:
    _grid(console, [*_model_rows(result), *_memory_rows(result)])
    console.print()
    _seconds_table(console, result)
    console.print()
    _grid(console, [*_company_rows(result), *_why_rows(result), *_source_rows(result)])


def _grid(console: Console, rows: Sequence[Row]) -> None:
    table = Table.grid(padding=(0, 2))
    for label, value in rows:
        table.add_row(Text(label, style="dim"), Text(value))
    console.print(table, highlight=False)


def hardware(deployment: Deployment) -> str:
    name = deployment.device.name
    text = name if deployment.num_devices == 1 else f"{deployment.num_devices} x {name}"
    if deployment.devices_per_copy > 1:
        text += f", {deployment.devices_per_copy} to a copy of the model"
    if deployment.lanes > 1:
        cuts = (("tensor", deployment.tensor_parallel), ("stages", deployment.pipeline_parallel))
        named = [f"{name} {size}" for name, size in (*cuts, ("experts", deployment.expert_parallel)) if size > 1]
        text += f" ({' x '.join(named)})"
    return text


def _model_rows(result: Estimate) -> list[Row]:
    deployment, shape = result.deployment, result.deployment.shape
    active = ""
    if shape.experts is not None:
        active = f", {shape.active_parameters / 1e9:,.1f}B of them for a token"
    kept = "as its file has them" if deployment.own_shape is not None else deployment.formats.weights
    if deployment.own_kv_space_bytes is not None:
        kept = "as this engine holds them"
    price = deployment.price_per_hour_usd
    peak = f"{2 * deployment.ceilings.multiply_adds_per_s / 1e12:,.0f} TFLOP/s {deployment.arithmetic}"
    if deployment.device.vendor == "":
        peak = f"{2 * deployment.ceilings.multiply_adds_per_s / 1e9:,.0f} GFLOP/s"
    each = "copy" if deployment.lanes == 1 else "stage" if deployment.expert_parallel == 1 else "group"
    return [
        ("model", f"{deployment.model}: {shape.num_parameters / 1e9:,.2f}B parameters{active}; weights {kept}"),
        (
            "hardware",
            f"{hardware(deployment)}: {peak} and {units.size(deployment.ceilings.read_bytes_per_s)}/s a {each}"
            + (f", {price:,.2f} USD/h" if price is not None else ", no public price"),
        ),
        ("load", _load(result.lengths)),
    ]


def _load(lengths: RequestLengths) -> str:
    cached = f", {lengths.cached_tokens:,} of them cached" if lengths.cached_tokens else ""
    return f"{lengths.input_tokens:,} tokens in{cached}, {lengths.output_tokens:,} out"


def _memory_rows(result: Estimate) -> list[Row]:
    memory = result.memory
    tokens = result.lengths.input_tokens + result.lengths.output_tokens
    copies = f" and {units.size(memory.decode_copies_bytes)} of copies" if memory.decode_copies_bytes else ""
    text = f"{units.size(memory.weight_bytes)} of weights{copies} in {units.size(memory.total_bytes)}"
    if memory.max_users:
        text = f"yes: {text}, {units.size(memory.kv_space_bytes)} for KV"
    else:
        needed = memory.devices_needed
        hint = f"it takes --tensor-parallel {needed}" if needed else "nor do 64 of these devices hold it"
        text = f"NO: {text}; {hint}. The times below are its bandwidth's and its arithmetic's all the same"
    if result.deployment.devices_per_copy > 1:
        text += f"; the fullest device has {units.size(memory.device_weight_bytes)} of weights in "
        text += units.size(memory.device_bytes)
    return [
        ("fits", text),
        *_copies_rows(result.deployment.shape.decode_weights),
        (
            "KV",
            f"{units.size(memory.kv_bytes_per_token)} a token, {units.size(memory.kv_bytes_per_user)} a user of "
            f"{tokens:,} tokens: {memory.max_users:,} users a copy",
        ),
    ]


def _copies_rows(copies: DecodeWeights | None) -> list[Row]:
    if copies is None:
        return []
    named = [(name, one) for name, one in (("", copies.dense), ("experts ", copies.experts)) if one is not None]
    replaced = units.size(sum(one.replaced_bytes for _, one in named))
    limits = ", ".join(f"{name}up to {one.max_tokens}" for name, one in named)
    text = f"{replaced} of the weights are held twice: in 16 bits for long prompts, and {units.size(copies.num_bytes)}"
    return [("copies", f"{text} more in 12 bits for decode and other steps of few tokens ({limits})")]


def weights_of(deployment: Deployment) -> str:
    weights = deployment.formats.weights
    return f"{weights}, 12 bits" if deployment.shape.decode_weights is not None else weights


def _seconds_table(console: Console, result: Estimate) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("", "floor", "expected", "what it is"):
        table.add_column(Text(heading, style="dim"), justify="left" if heading in ("", "what it is") else "right")

    def add(label: str, seconds: Seconds, meaning: str) -> None:
        table.add_row(label, units.seconds(seconds.floor_s), units.seconds(seconds.expected_s), Text(meaning, "dim"))

    alone, computed = result.alone, result.lengths.input_tokens - result.lengths.cached_tokens
    read = units.size(result.deployment.lane_shape(alone=True).weight_bytes_read(1))
    unit = "token" if result.deployment.speculating is None else "step"
    add("alone: TTFT", alone.ttft, f"{computed:,} tokens read, no queue; {result.prefill.side}-bound")
    add("alone: TPOT", alone.tpot, f"{read} of weights and the context, a {unit}; {result.decode_alone.side}-bound")
    add("alone: answer", alone.request, f"all {result.lengths.output_tokens:,} tokens")
    least = units.seconds(alone.minimum_decode_s)
    table.add_row("least TPOT", least, "-", Text("the weights alone: no stream is ever faster", "dim"))
    if (company := result.company) is not None:
        floor, real = company.floor, company.expected
        label = f"{real.users:,} users"
        add(f"{label}: TTFT", Seconds(floor.ttft_s, real.ttft_s), "mean, others' prompts waited for")
        add(f"{label}: TPOT", Seconds(floor.tpot_s, real.tpot_s), "mean, others' prompts in between")
    console.print(table, highlight=False)


def _company_rows(result: Estimate) -> list[Row]:
    company = result.company
    if company is None:
        return []
    real, copies = company.expected, company.replicas
    of_copies = f" on each of {copies} copies" if copies > 1 else ""
    rows = [
        ("users", f"{real.users:,} at once{of_copies}, each asking again when answered"),
        (
            "throughput",
            f"{copies * real.output_tokens_per_s:,.0f} output tokens/s, {copies * real.total_tokens_per_s:,.0f} with "
            f"prompts, {copies * real.requests_per_s:,.2f} requests/s "
            f"(floor: {copies * company.floor.output_tokens_per_s:,.0f} output tokens/s)",
        ),
    ]
    if company.usd_per_million_output_tokens is not None and company.usd_per_million_tokens is not None:
        rows.append(
            (
                "cost",
                f"{company.usd_per_million_output_tokens:,.2f} USD a million output tokens, "
                f"{company.usd_per_million_tokens:,.3f} a million with prompts, while this busy",
            )
        )
    return rows


def _why_rows(result: Estimate) -> list[Row]:
    rows: list[Row] = []
    if (load := result.load) is not None:
        rows.append(("bound by", f"{'both' if load.bound == 'balanced' else load.bound}: {load.reason}"))
        rows.extend(("" if index else "so", one) for index, one in enumerate(load.advice))

    def phase(name: str, one: Phase) -> str:
        return f"{name} {one.intensity:,.1f} ({one.side})"

    parts = [phase("prefill", result.prefill), phase("decode alone", result.decode_alone)]
    if result.decode_in_company is not None:
        parts.append(phase("decode of all users", result.decode_in_company))
    rows.append(("roofline", f"ridge {result.ridge:,.0f} FLOP/byte; {', '.join(parts)}"))
    return rows


def _source_rows(result: Estimate) -> list[Row]:
    alone, company = result.alone, result.company
    used = f"{alone.ttft.share:.0%} of the floor in prefill and {alone.tpot.share:.0%} in decode, alone"
    if company is not None:
        users, step = company.expected.users, Seconds(company.floor.decode_step_s, company.expected.decode_step_s)
        used += f"; {step.share:.0%} in decode of {users:,} users"
    rows = [("efficiency", used), ("from", result.efficiency_source), ("error", result.efficiency_error)]
    rows.append(("hardware", "; ".join(result.deployment.device.sources)))
    return [*rows, *(("note", note) for note in result.notes)]


def show_matrices(console: Console, result: Estimate) -> None:
    deployment = result.deployment
    computed = result.lengths.input_tokens - result.lengths.cached_tokens
    users = result.company.expected.users if result.company is not None else 1
    bits = find_weight_format(deployment.formats.weights).weight_bits
    steps = {"prefill": (computed, 1), "decode": (users, users)}
    found = {
        name: matmul_points(deployment.dimensions, tokens, sampled, deployment.ceilings, weight_bits=bits)
        for name, (tokens, sampled) in steps.items()
    }
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("matrix", "N x K", "of them", "prefill M", "FLOP/B", "", "decode M", "FLOP/B", ""):
        is_text = heading in ("matrix", "")
        table.add_column(Text(heading, style="dim"), justify="left" if is_text else "right", no_wrap=True)
    for prefill, decode in zip(found["prefill"], found["decode"], strict=True):
        matrix = prefill.matrix
        cells = [matrix.name, f"{matrix.outputs}x{matrix.inputs}", f"{matrix.count:,}"]
        for point in (prefill, decode):
            cells += [f"{point.rows:,.4g}", f"{point.intensity:,.4g}", SIDES[point.side]]
        table.add_row(*cells)
    console.print()
    console.print(table, highlight=False)
    if deployment.shape.decode_weights is not None:
        text = "of weights in 16 bits: where decode reads copies in 12, its FLOP/B is up to a third more"
        console.print(text, style="dim", highlight=False)


def show_calibration(console: Console, calibrated: Calibrated) -> None:
    metrics, shares = calibrated.metrics, calibrated.shares
    decode = metrics.steps["decode"]
    rows = [
        (
            "server",
            f"{metrics.requests:,.0f} requests: {metrics.mean_input:,} tokens in ({metrics.mean_cached:,} cached), "
            f"{metrics.mean_output:,} out; {metrics.mean_batch:.1f} streams a step of {units.seconds(decode.mean_s)}",
        ),
        ("of the floor", f"prefill {shares.prefill:.0%}, decode {shares.decode:.0%}"),
    ]
    for name, measured, predicted in calibrated.checks:
        rows.append((f"its {name}", f"measured {units.seconds(measured)}, predicted {units.seconds(predicted)}"))
    rows.append(("its queue", f"{units.seconds(metrics.queue_s)} of a TTFT of {units.seconds(metrics.ttft_s)}"))
    _grid(console, rows)
    console.print()


def kinds_to_try(planned: PlannedModel) -> list[str | None]:
    """What a search looks at when nothing was asked for: weights as published, and what is commonly made of floats."""
    return [None, "fp8", "int4"] if planned.is_in_bf16 else [None]


def show_search(
    console: Console,
    found: Sequence[Found],
    rejected: Sequence[Rejected],
    lengths: RequestLengths,
    tail: Tail | None = None,
    is_met: bool = True,
) -> None:
    if not found:
        nearest = "; nearest are" if len(rejected) > SHOWN_REJECTED else ""
        console.print(f"nothing meets it, of {len(rejected)} that were tried{nearest}:", highlight=False)
        for failed in rejected[:SHOWN_REJECTED]:
            text = f"  {hardware(failed.deployment)}, {failed.deployment.formats.weights}: {failed.reason}"
            console.print(text, highlight=False, markup=False)
        return
    if not is_met:
        text = "nothing that was simulated meets it for nine requests of ten; nearest, with more copies or without, is:"
        console.print(text, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("USD/h", "hardware", "weights", "users a copy", "TTFT", "TPOT", "USD/M out", "has run"):
        table.add_column(Text(heading, style="dim"), justify="left" if heading in ("hardware", "weights") else "right")
    for one in found[:SHOWN_FOUND]:
        million = one.usd_per_million_output_tokens
        table.add_row(
            "-" if one.usd_per_hour is None else f"{one.usd_per_hour:,.2f}",
            Text(hardware(one.deployment)),
            weights_of(one.deployment),
            f"{one.loaded.users:,}",
            units.seconds(one.loaded.ttft_s),
            units.seconds(one.loaded.tpot_s),
            "-" if million is None else f"{million:,.2f}",
            "no" if not_run(one.deployment) else "yes",
        )
    console.print(table, highlight=False)
    if tail is not None:
        console.print(
            f"the first one simulated, {tail.num_requests:,} arrivals at random, {tail.requests_per_s:.2f}/s a copy: "
            f"TTFT p50 {units.seconds(tail.ttft_s['p50'])}, p99 {units.seconds(tail.ttft_s['p99'])}; "
            f"ITL p50 {units.seconds(tail.itl_s.get('p50'))}, p99 {units.seconds(tail.itl_s.get('p99'))}; "
            f"{tail.met_share:.1%} of requests meet the level",
            highlight=False,
            markup=False,
        )
    console.print()
    rows = [("load", f"{_load(lengths)}; means in steady state"), ("efficiency from", found[0].efficiency.source)]
    rows += [("error of the first", found[0].efficiency.error), ("prices", "public ones of a day")]
    if reasons := not_run(found[0].deployment):
        rows += [("first has not run", reason) for reason in reasons]
        runs = next((one for one in found if not not_run(one.deployment)), None)
        cheapest = "none of those found"
        if runs is not None:
            price = "no public price" if runs.usd_per_hour is None else f"{runs.usd_per_hour:,.2f} USD/h"
            cheapest = f"{hardware(runs.deployment)}, {weights_of(runs.deployment)}: {price}"
        rows.append(("cheapest that has", cheapest))
    _grid(console, [*rows, ("more", "`plan --on DEVICE` of each, `simulate` of percentiles")])
