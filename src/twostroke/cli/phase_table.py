"""The two phases of one finished answer, as a table: how long it read, how long it wrote, and against what floor."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from twostroke.cli import units
from twostroke.core.step_record import StepTotals
from twostroke.core.timing import SequenceTiming
from twostroke.cost.hardware import Ceilings
from twostroke.engine.floors import PhaseFloors
from twostroke.explain.verdict import WORTH_A_WORD

COLUMNS = ("phase", "tokens", "time", "rate", "felt as", "floor", "of floor")


def print_phases(
    console: Console, timing: SequenceTiming, floors: PhaseFloors | None, ceilings: Ceilings | None
) -> None:
    computed = timing.prompt_tokens - timing.cached_tokens
    written = len(timing.token_times_s)
    prefill = (
        "prefill (read)",
        str(computed),
        units.seconds(timing.prefill_s),
        units.rate(computed, timing.prefill_s),
        f"TTFT {units.seconds(timing.ttft_s)}",
        units.seconds(floors.prefill_s if floors else None),
        _share(floors.prefill_s if floors else None, timing.prefill_s),
    )
    decode = (
        "decode (write)",
        str(written),
        units.seconds(timing.decode_s),
        units.rate(written - 1, timing.decode_s),
        f"TPOT {units.seconds(timing.tpot_s)}",
        units.seconds(floors.decode_s if floors and written > 1 else None),
        _share(floors.decode_s if floors else None, timing.decode_s),
    )
    _print_table(console, [prefill, decode])
    if ceilings is not None:
        console.print(
            "The floor is the least time this machine allows: prefill at "
            f"{ceilings.multiply_adds_per_s / 1e9:,.0f} G multiply-adds/s, decode reading memory at "
            f"{ceilings.read_bytes_per_s / 1e9:.1f} GB/s ({ceilings.source}).",
            style="dim",
            highlight=False,
        )
    queue = timing.queue_s or 0.0
    chunks = timing.prefill_chunks
    details = [f"{timing.cached_tokens} more tokens cached{timing.tier_tokens.words}"] if timing.cached_tokens else []
    details += [f"queue {units.seconds(queue)}", f"{chunks} prefill chunk" + "s" * (chunks != 1)]
    if timing.draft_steps:
        details.append(speculation_line(timing))
    if timing.preemptions:
        details.append(f"{timing.preemptions} preemptions, {timing.recomputed_tokens} tokens computed again")
    if (share := _others_share(timing)) >= WORTH_A_WORD:
        details.append(f"other programs took {share:.0%} of the cores")
    console.print(" · ".join(details), style="dim", highlight=False)


def _others_share(timing: SequenceTiming) -> float:
    if timing.step_last is None:
        return 0.0
    before = StepTotals() if timing.step_before is None else timing.step_before.totals
    return timing.step_last.totals.since(before).others_share


def _print_table(console: Console, rows: list[tuple[str, ...]]) -> None:
    """Never cut: columns move together on a narrow terminal, and where that is not enough each phase is a sentence."""
    for padding in (2, 1, 0):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, padding, 0, 0))
        for name in COLUMNS:
            table.add_column(name, justify="left" if name in ("phase", "felt as") else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        if console.measure(table, options=console.options.update(max_width=1000)).maximum <= console.width:
            console.print(table)
            return
    for phase, tokens, time, rate, felt_as, floor, share in rows:
        line = f"{phase}: {tokens} tokens in {time} ({rate}), {felt_as}, floor {floor}, {share} of floor"
        console.print(line, highlight=False)


def speculation_line(timing: SequenceTiming) -> str:
    """`3.1 tokens a step (42 of 60 drafts held), 310 ms gained`."""
    gain_s = timing.speculation_gain_s
    return (
        f"{timing.tokens_per_step or 1.0:.1f} tokens a step ({timing.drafts_held} of {timing.drafts_computed} drafts "
        f"held), {units.seconds(abs(gain_s))} {'gained' if gain_s >= 0.0 else 'lost'}"
    )


def turn_line(timing: SequenceTiming) -> str:
    """One turn of a conversation in one line, the prefix-cache hit first."""
    computed = timing.prompt_tokens - timing.cached_tokens
    share = _others_share(timing)
    drafts = f" · {speculation_line(timing)}" if timing.draft_steps else ""
    others = f" · other programs took {share:.0%} of the cores" if share >= WORTH_A_WORD else ""
    return (
        f"read {computed} of {timing.prompt_tokens} tokens ({timing.cached_tokens} cached{timing.tier_tokens.words})"
        f" in {units.seconds(timing.prefill_s)}"
        f" · wrote {len(timing.token_times_s)} in {units.seconds(timing.decode_s)}"
        f" ({units.rate(len(timing.token_times_s) - 1, timing.decode_s)})"
        f"{drafts}{others}"
    )


def _share(floor_s: float | None, actual_s: float | None) -> str:
    return "-" if not floor_s or not actual_s else f"{floor_s / actual_s:.0%}"
