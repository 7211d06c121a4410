"""Every form of weights and kind of layer on one card, through the workloads that vLLM was measured with: a case after
another, each in a process of its own with a limit, and last a table of figures, goals and what vLLM reached.

    PYTHONPATH=src:. python -m bench.cuda.forms [--cases 8b-int4,gpt-oss-20b] [--kernels] [--out FOLDER]"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.cuda.first_run.runner import Command, run
from bench.cuda.stored_random import StoredAs, stored_checkpoint
from bench.peers.gpu.drive import MARK, MAX_CONTEXT, MAX_RUNNING, MAX_TOKENS_PER_STEP, AbandonableEngine, play
from bench.peers.gpu.workloads import TEMPERATURE

ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "bench" / "shapes"
CASE_LIMIT_S = 150.0
SHOWN_KERNELS = 16
PROFILED_STREAMS = (1, 64)
PROFILED_TOKENS = 9


@dataclass(frozen=True, slots=True)
class Case:
    shape: str
    workloads: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of `EngineConfig`, beside those of every engine that is measured."""
    stored_as: StoredAs | None = None
    """None: bf16 at random, perhaps quantised on load."""


FP8: Mapping[str, Any] = {"quantise": "fp8"}
A8: Mapping[str, Any] = {"dtype": "fp8"}
"""Prompts in float8, where no table says that it is slower."""
A16: Mapping[str, Any] = {"dtype": "bf16"}
CASES: dict[str, Case] = {
    "8b": Case("llama-3.1-8b", ("single", "noisy", "online", "few")),
    "8b-20ms": Case("llama-3.1-8b", ("noisy", "online"), {"itl_target_ms": 20.0}),
    "8b-fp8": Case("llama-3.1-8b", ("single", "nano", "documents"), FP8),
    "8b-fp8-kv8": Case("llama-3.1-8b", ("nano", "answers"), {**FP8, "kv_kind": "fp8"}),
    "8b-int4": Case("llama-3.1-8b", ("single", "nano"), {"quantise": "int4"}),
    "8b-q4_k_m": Case("llama-3.1-8b", ("single", "prefill"), {"quantise": "none"}, "q4_k_m"),
    "30b-fp8": Case("qwen3-30b-a3b", ("single", "nano"), FP8),
    "deepseek-v2-lite": Case("deepseek-v2-lite", ("single", "nano", "answers")),
    "gpt-oss-20b": Case("gpt-oss-20b", ("single", "nano", "documents"), {"quantise": "none"}, "mxfp4"),
    "qwen3.5-9b": Case("qwen3.5-9b", ("single", "nano")),
    "8b-fp8-blocks": Case("llama-3.1-8b", ("single", "prefill"), {"quantise": "none"}, "fp8_block"),
    "8b-fp8-blocks-a16": Case("llama-3.1-8b", ("single", "prefill"), {"quantise": "none", **A16}, "fp8_block"),
    "8b-fp8-blocks-a8": Case("llama-3.1-8b", ("single", "prefill"), {"quantise": "none", **A8}, "fp8_block"),
    "8b-w4a8": Case("llama-3.1-8b", ("single", "prefill"), {"quantise": "int4", **A8}),
    "30b-fp8-a8": Case("qwen3-30b-a3b", ("single", "nano"), {**FP8, **A8}),
}

VLLM: dict[tuple[str, str, str], float] = {
    ("8b", "single", "ttft_ms"): 16.0,
    ("8b", "single", "tpot_ms"): 4.9,
    ("8b", "noisy", "itl_p99_during_ms"): 385.0,
    ("8b", "noisy", "long_ttft_ms"): 1240.0,
    ("8b", "online", "ttft_p50_ms"): 93.0,
    ("8b", "online", "ttft_p99_ms"): 227.0,
    ("8b", "online", "itl_p50_ms"): 8.0,
    ("8b", "online", "itl_p99_ms"): 62.9,
    ("8b-20ms", "noisy", "itl_p99_during_ms"): 385.0,
    ("8b-20ms", "noisy", "long_ttft_ms"): 1240.0,
    ("8b-20ms", "online", "ttft_p50_ms"): 93.0,
    ("8b-20ms", "online", "ttft_p99_ms"): 227.0,
    ("8b-20ms", "online", "itl_p50_ms"): 8.0,
    ("8b-20ms", "online", "itl_p99_ms"): 62.9,
    ("8b-fp8", "single", "ttft_ms"): 15.8,
    ("8b-fp8", "single", "tpot_ms"): 3.47,
    ("8b-fp8", "nano", "out_tok_s"): 11874.0,
    ("8b-fp8", "documents", "out_tok_s"): 1070.0,
    ("8b-fp8-kv8", "nano", "out_tok_s"): 12227.0,
    ("8b-fp8-kv8", "answers", "out_tok_s"): 7184.0,
    ("8b-int4", "single", "tpot_ms"): 3.75,
    ("8b-int4", "nano", "out_tok_s"): 9348.0,
    ("30b-fp8", "single", "ttft_ms"): 13.4,
    ("30b-fp8", "single", "tpot_ms"): 4.35,
    ("30b-fp8", "nano", "out_tok_s"): 10402.0,
    ("deepseek-v2-lite", "single", "ttft_ms"): 17.1,
    ("deepseek-v2-lite", "single", "tpot_ms"): 3.32,
    ("deepseek-v2-lite", "nano", "out_tok_s"): 15221.0,
    ("deepseek-v2-lite", "answers", "out_tok_s"): 7585.0,
    ("gpt-oss-20b", "single", "ttft_ms"): 14.0,
    ("gpt-oss-20b", "single", "tpot_ms"): 3.01,
    ("gpt-oss-20b", "nano", "out_tok_s"): 10546.0,
    ("gpt-oss-20b", "documents", "out_tok_s"): 1296.0,
}
"""vLLM 0.26.0 with dummy weights, measured on 2026-11-15 and 16 on other machines of this kind."""
GOALS: dict[tuple[str, str, str], float] = {
    ("8b", "noisy", "itl_p99_during_ms"): 25.0,
    ("8b", "noisy", "long_ttft_ms"): 1.15 * 1240,
    ("8b", "online", "ttft_p99_ms"): 227.0,
    ("8b", "online", "itl_p99_ms"): 25.0,
    ("8b-20ms", "noisy", "itl_p99_during_ms"): 25.0,
    ("8b-20ms", "online", "ttft_p99_ms"): 227.0,
    ("8b-20ms", "online", "itl_p99_ms"): 25.0,
    ("8b-fp8", "single", "ttft_ms"): 10.0,
    ("8b-fp8", "single", "tpot_ms"): 2.3,
    ("8b-fp8", "nano", "out_tok_s"): 1.3 * 11874,
    ("8b-fp8", "documents", "out_tok_s"): 1.15 * 1070,
    ("8b-fp8-kv8", "nano", "out_tok_s"): 1.3 * 12227,
    ("8b-fp8-kv8", "answers", "out_tok_s"): 1.4 * 7184,
    ("8b-int4", "single", "tpot_ms"): 1.5,
    ("8b-int4", "nano", "out_tok_s"): 1.5 * 9348,
    ("8b-q4_k_m", "single", "tpot_ms"): 1.6,
    ("8b-q4_k_m", "prefill", "ttft_ms"): 520.0,
    ("30b-fp8", "single", "ttft_ms"): 11.0,
    ("30b-fp8", "single", "tpot_ms"): 2.0,
    ("30b-fp8", "nano", "out_tok_s"): 1.25 * 10402,
    ("deepseek-v2-lite", "single", "tpot_ms"): 3.32 / 2,
    ("deepseek-v2-lite", "nano", "out_tok_s"): 1.3 * 15221,
    ("deepseek-v2-lite", "answers", "out_tok_s"): 1.1 * 7585,
    ("gpt-oss-20b", "single", "tpot_ms"): 3.01 / 2,
    ("gpt-oss-20b", "nano", "out_tok_s"): 1.3 * 10546,
    ("gpt-oss-20b", "documents", "out_tok_s"): 1.1 * 1296,
}
HIGHER_IS_BETTER = "tok_s"

Figures = dict[str, dict[str, Any]]
"""By workload, then by figure."""


def cases_in(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in CASES]:
        raise argparse.ArgumentTypeError(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    return names


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=cases_in, default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--workloads", default="", help="these alone, where a case has them; default: all of a case")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="of the whole; a case that is not begun then is told"
    )
    parser.add_argument("--kernels", action="store_true", help="print what the kernels of some decode steps take")
    parser.add_argument("--out", type=Path, help="a folder for logs and figures.json; default: a new one")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def play_one(name: str, wanted: Sequence[str], *, shows_kernels: bool) -> None:
    from twostroke.config import EngineConfig
    from twostroke.core.kv_config import KVConfig
    from twostroke.engine.build import assemble, build
    from twostroke.lab.adapter import EngineAdapter

    case = CASES[name]
    settings = dict(case.settings)
    config = EngineConfig(
        backend="cuda",
        load="random",
        max_context=MAX_CONTEXT,
        max_tokens_per_step=MAX_TOKENS_PER_STEP,
        max_running=MAX_RUNNING,
        kv=KVConfig(kind=settings.pop("kv_kind", "auto")),
        **settings,
    )
    folder = SHAPES / case.shape
    with ExitStack() as closing:
        if case.stored_as is None:
            assembly = build(str(folder), config, text=False)
        else:
            assembly = assemble(stored_checkpoint(folder, case.stored_as), None, config)
        closing.callback(assembly.engine.close)
        print(*assembly.notes, sep="\n", flush=True)
        engine = EngineAdapter(assembly.engine, temperature=TEMPERATURE)
        vocab_size = assembly.checkpoint.spec.vocab_size
        for workload in wanted:
            print(MARK + json.dumps({workload: play(workload, engine, vocab_size)}), flush=True)
        for streams in PROFILED_STREAMS if shows_kernels else ():
            show_kernels(engine, streams)


def show_kernels(engine: AbandonableEngine, streams: int) -> None:
    """Of a prompt of 64 tokens a stream and the tokens behind it. Kernels that wait for the one ahead count their
    waiting."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(streams):
        engine.add(list(range(100, 164)), PROFILED_TOKENS)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        while engine.busy():
            engine.step()
        torch.cuda.synchronize()
    times_us: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in seen.events():
        if event.device_time_total > 0:
            times_us[event.name[:70]] += event.device_time_total
            counts[event.name[:70]] += 1
    print(f"kernels of {streams} streams, {PROFILED_TOKENS} steps, one of them of prompts")
    for kernel, took_us in times_us.most_common(SHOWN_KERNELS):
        print(f"    {took_us:9.0f} us {counts[kernel]:6d} x {kernel}", flush=True)


def figures_of(log: Path) -> Figures:
    found: Figures = {}
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(MARK):
            found |= json.loads(line[len(MARK) :])
    return found


def rows_of(case: str, figures: Figures) -> list[str]:
    """`lead`: times as good as vLLM."""
    rows = []
    for workload, values in figures.items():
        for name, value in values.items():
            key = (case, workload, name)
            vllm, goal = VLLM.get(key), GOALS.get(key)
            if isinstance(value, str):
                rows.append(f"| {case} | {workload} | {value} | | | | |")
                continue
            higher = name.endswith(HIGHER_IS_BETTER)
            lead = "" if vllm is None else f"{value / vllm if higher else vllm / value:.2f}"
            kept = "" if goal is None else "yes" if (value >= goal if higher else value <= goal) else "no"
            cells = ["" if one is None else f"{one:,.6g}" for one in (value, vllm, goal)]
            rows.append(f"| {case} | {workload} {name} | {cells[0]} | {cells[1]} | {lead} | {cells[2]} | {kept} |")
    return rows


def play_all(options: argparse.Namespace) -> int:
    out = options.out or Path(tempfile.mkdtemp(prefix="forms-"))
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    extra = (["--kernels"] if options.kernels else []) + ["--workloads", options.workloads]
    words = (sys.executable, "-m", "bench.cuda.forms", *extra, "--one")
    sections = {name: [Command("figures", (*words, name), CASE_LIMIT_S)] for name in options.cases}
    found: dict[str, Figures] = {}
    rows, all_passed = [], True
    for result in run(sections, out / "logs", minutes=options.minutes, environment=environment, folder=ROOT):
        figures = figures_of(Path(result.log)) if result.log else {}
        found[result.section] = figures
        all_passed &= result.state == "passed"
        print(f"{result.section:18} {result.state} in {result.seconds:.0f} s", json.dumps(figures), flush=True)
        if result.state != "passed":
            print(*result.tail[-12:], sep="\n", flush=True)
        rows += rows_of(result.section, figures)
        (out / "figures.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("| case | figure | Twostroke | vLLM 0.26 | lead | goal | kept |\n|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    return 0 if all_passed else 1


def main() -> int:
    options = options_of()
    if options.one:
        workloads = [name for name in options.workloads.split(",") if name]
        wanted = [name for name in CASES[options.one].workloads if not workloads or name in workloads]
        play_one(options.one, wanted, shows_kernels=options.kernels)
        return 0
    return play_all(options)


if __name__ == "__main__":
    sys.exit(main())
