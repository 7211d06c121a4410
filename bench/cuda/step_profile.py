"""Where a step's time goes on the card: streams of one length decode, and each kernel's share of a step is printed,
beside what the host takes. Random weights of a config.json.

    PYTHONPATH=src python bench/cuda/step_profile.py FOLDER [--rows 256,64,1] [--context 800] [--steps 5]"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

from twostroke.config import EngineConfig
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.build import Assembly, build

SHOWN = 14


def run(assembly: Assembly, rows: int, context: int, steps: int) -> None:
    engine, vocab = assembly.engine, assembly.checkpoint.spec.vocab_size
    sampling = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.6)
    for index in range(rows):
        prompt = tuple((index * 7919 + place * 31) % vocab for place in range(context))
        engine.add(Request(f"{rows}-{index}", prompt, sampling))
    while engine.scheduler.counts().running_decode < rows:
        engine.step()
    for _ in range(20):
        engine.step()
    started_s = time.perf_counter()
    for _ in range(50):
        engine.step()
    step_s = (time.perf_counter() - started_s) / 50
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in seen.events():
        if event.device_time_total > 0:
            times[event.name[:70]] += event.device_time_total
            counts[event.name[:70]] += 1
    busy_us = sum(times.values()) / steps
    print(f"\n{rows} rows at context {context}: {step_s * 1e3:.2f} ms a step, kernels {busy_us / 1e3:.2f} ms")
    for name, total_us in times.most_common(SHOWN):
        print(f"  {total_us / steps:9.1f} us  {counts[name] / steps:6.1f} x  {name}")
    for index in range(rows):
        engine.abort(f"{rows}-{index}")
    while engine.busy:
        engine.step()


def host_share(assembly: Assembly, rows: int) -> None:
    """What the host does for a step, by its parts."""
    engine = assembly.engine
    spent: Counter[str] = Counter()

    def timed(owner: object, name: str) -> None:
        inner = getattr(owner, name)

        def outer(*arguments: object, **options: object) -> object:
            started_s = time.perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                spent[name] += time.perf_counter() - started_s  # type: ignore[assignment]

        setattr(owner, name, outer)

    timed(engine.scheduler, "schedule")
    timed(engine.scheduler, "apply")
    timed(engine.backend, "launch")
    sampling = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.6)
    for index in range(rows):
        engine.add(Request(f"h{index}", tuple(range(1, 100)), sampling))
    for _ in range(30):
        engine.step()
    spent.clear()
    started_s = time.perf_counter()
    for _ in range(100):
        engine.step()
    whole_s = time.perf_counter() - started_s
    parts = ", ".join(f"{name} {seconds * 1e4:.0f} us" for name, seconds in spent.most_common())
    print(f"host, {rows} rows at context 100: {whole_s * 1e4:.0f} us a step, of it {parts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--rows", default="256,64,1")
    parser.add_argument("--context", type=int, default=800)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    config = EngineConfig(backend="cuda", load="random", max_context=8192, max_running=256)
    assembly = build(options.folder, config)
    print(*assembly.notes, sep="\n")
    for rows in map(int, options.rows.split(",")):
        run(assembly, rows, options.context, options.steps)
    host_share(assembly, 1)


if __name__ == "__main__":
    main()
