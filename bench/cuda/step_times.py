"""A workload of `twostroke bench`, step by step: what kinds of step it was made of, what each kind took on the card and
how far that was from its floor, and how long the card waited. With --kernels, the kernels of a few prompts read whole.

    PYTHONPATH=src python bench/cuda/step_times.py FOLDER [--workloads batch,nano] [--kernels 8192]"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter, defaultdict
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from twostroke.backends.cuda.results import Arrival
from twostroke.config import EngineConfig
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import Step, StepResult
from twostroke.cost.floor import step_floor_s, step_multiply_adds
from twostroke.engine.build import Assembly, build
from twostroke.lab.adapter import EngineAdapter, work_of
from twostroke.lab.sizes import choose
from twostroke.lab.stage import Stage
from twostroke.scheduling import pace

PROMPT_CLASSES = (0, 256, 512, 1024, 2048, 4096, 8192)
DECODE_CLASSES = (0, 8, 32, 64, 128, 192, 256, 512)


@dataclass
class Kind:
    steps: int = 0
    seconds: float = 0.0
    floor_s: float = 0.0
    prompt_tokens: int = 0
    decodes: int = 0
    multiply_adds: int = 0


def class_of(count: int, classes: tuple[int, ...]) -> int:
    return next(bound for bound in classes if count <= bound) if count <= classes[-1] else count


def watch(assembly: Assembly) -> list[tuple[Step, StepResult]]:
    """Every finished step from here on."""
    seen: list[tuple[Step, StepResult]] = []
    scheduler = assembly.engine.scheduler
    apply = scheduler.apply

    def noting(step: Step, result: StepResult, *rest: object, **named: object) -> object:
        seen.append((step, result))
        return apply(step, result, *rest, **named)

    scheduler.apply = noting  # type: ignore[method-assign,assignment]
    return seen


class KeepAll(list[object]):
    """Arrivals are not used again, so that all their events can be read afterwards."""

    def append(self, _: object) -> None: ...


def print_idle(seen: list[tuple[Step, StepResult]]) -> None:
    """Which steps the card waited for."""
    arrivals = ARRIVALS[-len(seen) :]
    gaps = []
    for before, after, (step, result) in zip(arrivals, arrivals[1:], seen[1:], strict=False):
        gap_ms = before.arrived.elapsed_time(after.started)
        gaps.append((gap_ms, step.num_prefill_tokens, len(step.prefills), len(step.decodes), result.compute_s * 1e3))
    print(f"\nidle between steps: {sum(gap[0] for gap in gaps) / 1e3:.3f} s; the longest:")
    for gap_ms, tokens, chunks, decodes, step_ms in sorted(gaps, reverse=True)[:8]:
        print(f"  {gap_ms:8.2f} ms before {tokens} tokens in {chunks} chunks, {decodes} decodes ({step_ms:.1f} ms)")
    mixed = [gap for gap in gaps if 0 < gap[1] <= 2048]
    print(
        "  mixed steps (tokens, chunks, decodes, ms): "
        + "; ".join(f"{t},{c},{d},{m:.1f}" for _, t, c, d, m in mixed[:30])
    )


ARRIVALS: list[Arrival] = []


def keep_arrivals(assembly: Assembly) -> None:
    results = assembly.engine.backend._results  # type: ignore[attr-defined]
    results._free = KeepAll()
    start = results.start

    def noting() -> Arrival:
        ARRIVALS.append(start())
        return ARRIVALS[-1]

    results.start = noting


def play(assembly: Assembly, name: str, adapter: EngineAdapter, seen: list[tuple[Step, StepResult]]) -> None:
    workload = choose(name, "full")[0]
    vocab = assembly.checkpoint.spec.vocab_size
    small = workload.warm_up()
    for each in (small, workload) if small is not None else (workload,):
        adapter.clear_prefix()
        seen.clear()
        stage = Stage(adapter)
        each.play(stage, vocab)
    adapter.take_log()
    print_idle(seen)
    ceilings = assembly.ceilings()
    kinds: dict[tuple[int, int], Kind] = defaultdict(Kind)
    for step, result in seen:
        work = work_of(step)
        key = class_of(step.num_prefill_tokens, PROMPT_CLASSES), class_of(len(step.decodes), DECODE_CLASSES)
        kind = kinds[key]
        kind.steps += 1
        kind.seconds += result.compute_s
        kind.floor_s += step_floor_s(assembly.shape, work, ceilings)
        kind.prompt_tokens += step.num_prefill_tokens
        kind.decodes += len(step.decodes)
        kind.multiply_adds += step_multiply_adds(assembly.shape, work)
    busy_s = sum(kind.seconds for kind in kinds.values())
    rate = stage.num_tokens / stage.duration_s
    print(f"\n{name}: {stage.num_tokens} tokens in {stage.duration_s:.2f} s, {rate:.0f} a second")
    print(f"  card busy {busy_s:.2f} s in {len(seen)} steps")
    print("  prompts<= decodes<=  steps    total s   each ms   floor ms  prompt tok   decodes   TFLOP/s")
    for (prompts, decodes), kind in sorted(kinds.items()):
        print(
            f"  {prompts:9d} {decodes:9d} {kind.steps:6d} {kind.seconds:10.3f} {kind.seconds / kind.steps * 1e3:9.2f}"
            f" {kind.floor_s / kind.steps * 1e3:10.2f} {kind.prompt_tokens / kind.steps:11.0f}"
            f" {kind.decodes / kind.steps:9.0f} {2 * kind.multiply_adds / kind.seconds / 1e12:9.0f}"
        )


def kernels(assembly: Assembly, num_tokens: int, prompt_len: int) -> None:
    """What one step of prompts is made of, each of `prompt_len` tokens."""
    engine, vocab = assembly.engine, assembly.checkpoint.spec.vocab_size
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.6)

    def read(label: str) -> None:
        for index in range(num_tokens // prompt_len):
            prompt = tuple((hash(label) + index * 7919 + place * 31) % vocab for place in range(prompt_len))
            engine.add(Request(f"{label}-{index}", prompt, sampling))
        while engine.busy:
            engine.step()

    read("warm")
    started_s = time.perf_counter()
    for turn in range(8):
        read(f"timed {turn}")
    each_s = (time.perf_counter() - started_s) / 8
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        read("profiled")
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in found.events():
        if event.device_time_total > 0:
            times[event.name[:70]] += event.device_time_total
    busy_ms = sum(times.values()) / 1e3
    print(f"\n{num_tokens} prompt tokens in prompts of {prompt_len}: {each_s * 1e3:.1f} ms, kernels {busy_ms:.1f}")
    for name, total_us in times.most_common(12):
        print(f"  {total_us:9.1f} us  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--workloads", default="batch,nano")
    parser.add_argument("--kernels", type=int, default=0)
    parser.add_argument("--itl-target-ms", type=float)
    parser.add_argument("--decode-weights", default="auto")
    parser.add_argument("--crowd", type=float, default=pace.CROWD)
    parser.add_argument("--burst", type=float, default=pace.BURST)
    parser.add_argument("--long-wait", type=float, default=pace.LONG_WAIT)
    options = parser.parse_args()
    config = EngineConfig(
        backend="cuda",
        load="random",
        max_context=8192,
        itl_target_ms=options.itl_target_ms,
        decode_weights=options.decode_weights,
    )
    assembly = build(options.folder, config)
    print(*assembly.notes, sep="\n")
    if options.kernels:
        kernels(assembly, options.kernels, 1024)
    gc.collect()
    gc.disable()  # what is kept of every step here would have it search ever longer
    pace.CROWD, pace.BURST, pace.LONG_WAIT = options.crowd, options.burst, options.long_wait
    keep_arrivals(assembly)
    seen = watch(assembly)
    adapter = EngineAdapter(assembly.engine)
    for name in options.workloads.split(","):
        play(assembly, name, adapter, seen)


if __name__ == "__main__":
    main()
