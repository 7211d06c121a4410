"""Weights in fp8 and int4 on a card. "step": first token, tokens and prompts of an engine with random weights of a
config.json, and the kernels of a few steps. "products": each product of a layer at 1, 64 and 8,192 rows, beside packed
bf16: the fastest tile, what the table or the rule takes, and the error beside float64 over the weights as held.

    PYTHONPATH=src:. python -m bench.cuda.low_bit FOLDER [--parts step,products]"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from bench.cuda.clock import say
from bench.cuda.low_bit_products import ProductBench
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.events import TokenEvent
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.build import Assembly, build
from twostroke.models.loading import read_folder_spec

KINDS = ("fp8", "int4")
SHOWN_KERNELS = 7


@dataclass(frozen=True, slots=True)
class Played:
    began_s: float
    arrivals_s: list[float]
    """When each token came."""

    @property
    def first_ms(self) -> float:
        return 1e3 * (self.arrivals_s[0] - self.began_s)

    @property
    def all_ms(self) -> float:
        return 1e3 * (self.arrivals_s[-1] - self.began_s)


def play(assembly: Assembly, label: str, count: int, prompt_len: int, out_len: int) -> Played:
    """All at once, with prompts that no other label has."""
    engine, vocab_size = assembly.engine, assembly.checkpoint.spec.vocab_size
    draw, sampling = random.Random(label), SamplingParams(max_tokens=out_len, ignore_eos=True, temperature=0.0)
    for index in range(count):
        prompt = tuple(draw.choices(range(vocab_size), k=prompt_len))
        engine.add(Request(f"{label} {index}", prompt, sampling))
    played = Played(time.perf_counter(), [])
    while engine.busy:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                played.arrivals_s.append(time.perf_counter())
    return played


def step(folder: str, kind: str) -> None:
    config = EngineConfig(
        backend="cuda",
        load="random",
        quantise=kind,
        max_context=1024,
        max_running=64,
        max_tokens_per_step=2048,
        kv=KVConfig(memory_bytes=4 << 30),
        speculate="off",
    )
    assembly = build(folder, config)
    say(*assembly.notes, sep="\n    ")
    play(assembly, "warm", 1, 512, 200)
    one = play(assembly, "one", 1, 512, 200)
    gaps_s = [after - before for before, after in pairwise(one.arrivals_s)]
    tpot = f"TPOT {1e3 * sum(gaps_s) / len(gaps_s):.3f} ms (median gap {1e3 * median(gaps_s):.3f})"
    print(f"{kind}: one stream, 512 in: TTFT {one.first_ms:.1f} ms, {tpot}", flush=True)
    for count in (8, 64):
        several = play(assembly, f"{count} streams", count, 128, 100)
        rate = 1e3 * len(several.arrivals_s) / several.all_ms
        print(f"{kind}: {count} streams, 128 in, 100 out: {rate:,.0f} tok/s", flush=True)
    play(assembly, "warm prompt", 1, 900, 1)
    print(f"{kind}: 2 prompts of 1,000: {play(assembly, 'prompts', 2, 1000, 1).all_ms:.1f} ms", flush=True)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        play(assembly, "profiled", 1, 64, 6)
        torch.cuda.synchronize()
    times_us: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in seen.events():
        if event.device_time_total > 0:
            times_us[event.name[:60]] += event.device_time_total
            counts[event.name[:60]] += 1
    for name, took_us in times_us.most_common(SHOWN_KERNELS):
        print(f"    {took_us:9.0f} us {counts[name]:5d} x {name}")
    assembly.engine.close()


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--parts", default="step,products")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    parts = options.parts.split(",")
    for kind in KINDS if "step" in parts else ():
        step(options.folder, kind)
        gc.collect()
        torch.cuda.empty_cache()
    if "products" in parts:
        bench = ProductBench(read_folder_spec(Path(options.folder))[1])
        for product in bench.products:
            bench.measure(product)
            torch.cuda.empty_cache()
    say("done")


if __name__ == "__main__":
    main()
