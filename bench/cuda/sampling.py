"""Sampling on the card: does it choose what the host's sampler chooses, and how long does it take inside a graph?

    PYTHONPATH=src python bench/cuda/sampling.py [--vocab 151936] [--batches 1,64,256] [--rows 64] [--no-agreement]

A difference from the host is rounding: the draw lies so close to a border that the last digits of the weights decide.
Then the two tokens are neighbours among those that the filters keep, or nearly so: the farthest is given."""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from twostroke.backends.cuda.kernels.sampling_search import SearchShape
from twostroke.backends.cuda.logprobs import token_logprobs
from twostroke.backends.cuda.sampling import BLOCK, SamplingRows
from twostroke.backends.host.sampler import RowSampler, candidates
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import RowJoin

PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "k50 p0.9": {"top_k": 50, "top_p": 0.9},
    "k1000": {"top_k": 1000},
    "p0.9": {"top_p": 0.9},
    "p0.95 t2": {"top_p": 0.95, "temperature": 2.0},
    "min-p 0.05": {"min_p": 0.05},
    "k20000 p0.9": {"top_k": 20_000, "top_p": 0.9},
    "k50 p0.9 min-p": {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 0.7},
    "penalties greedy": {"temperature": 0.0, **PENALTIES},
    "penalties k50 p0.9": {"top_k": 50, "top_p": 0.9, **PENALTIES},
    "bias and min tokens": {"logit_bias": {5: 2.0, 900: -3.0}, "min_tokens": 100, "stop_token_ids": (1, 2)},
}
SLOW_KINDS = {"k20000 p0.9"}
"""Searched whole, by one program a row: left out of the largest batches' repeats."""


def joins_of(parameters: dict[str, Any], count: int, vocab: int, seed: int) -> list[RowJoin]:
    random = np.random.default_rng(seed)
    joins = []
    for index in range(count):
        prompt = tuple(int(i) for i in random.integers(0, vocab, 100))
        request = Request(str(index), prompt, SamplingParams(**parameters), seed=int(random.integers(0, 2**63)))
        joins.append(RowJoin(index, request))
    return joins


class Batch:
    """Rows of one kind on the card, and their logits."""

    def __init__(self, joins: list[RowJoin], vocab: int, block: int, search: SearchShape) -> None:
        count = len(joins)
        self.rows = SamplingRows(count, vocab, "cuda", block=block, search=search)
        for row, join in enumerate(joins):
            self.rows.open(row, join)
        self.rows.flush()
        self.features = self.rows.features(range(count))
        self.row_ids = torch.arange(count, dtype=torch.int32, device="cuda")
        self.last = torch.zeros(count + 1, dtype=torch.int32, device="cuda")
        self.out = torch.zeros(count, dtype=torch.int32, device="cuda")

    def step(self, logits: torch.Tensor) -> torch.Tensor:
        self.rows.sample(logits, self.row_ids, self.last, self.out, self.features)
        return self.out


def random_logits(count: int, vocab: int, spread: float, seed: int, rounded: bool) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(count, vocab, generator=generator, device="cuda") * spread
    return logits.bfloat16().float() if rounded else logits


def agreement(name: str, options: argparse.Namespace) -> str:
    """One line: how many tokens are the host's, over fresh logits, some with many equal scores."""
    joins = joins_of(KINDS[name], options.rows, options.vocab, seed=1)
    batch = Batch(joins, options.vocab, options.block, options.search)
    samplers = [RowSampler(join.request, 0, (), options.vocab) for join in joins]
    total = equal = farthest = 0
    for step, (spread, rounded) in enumerate(((3.0, False), (1.0, True))):
        logits = random_logits(options.rows, options.vocab, spread, step, rounded)
        tokens = batch.step(logits).tolist()
        for index, (sampler, row) in enumerate(zip(samplers, logits.cpu().numpy(), strict=True)):
            scores = sampler.scores(row)
            expected = sampler.sample(row).token_id
            total += 1
            equal += tokens[index] == expected
            if tokens[index] != expected:
                kept, _ = candidates(scores, joins[index].request.sampling)
                places = np.searchsorted(kept, [tokens[index], expected])
                farthest = max(farthest, abs(int(places[0] - places[1])))
    return f"{name:20s} {equal:5d} of {total:5d} equal, farthest difference {farthest} candidates"


def graph_us(work: Callable[[], object], repeats: int) -> float:
    """Microseconds of one replay of the work, captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            work()
    for _ in range(2):
        graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / (4 * repeats)


def timing(name: str, count: int, spread: float, options: argparse.Namespace) -> str:
    logits = random_logits(count, options.vocab, spread, 0, rounded=False)
    batch = Batch(joins_of(KINDS[name], count, options.vocab, seed=2), options.vocab, options.block, options.search)
    repeats = 3 if name in SLOW_KINDS else 20
    took_us = graph_us(lambda: batch.step(logits), repeats)
    gigabytes = logits.numel() * 4 / 1e9
    return f"{name:20s} {count:5d} {spread:6.1f} {took_us:9.1f} {gigabytes / took_us * 1e6:9.0f}"


def host_side(options: argparse.Namespace) -> str:
    """What the host pays: opening rows, and launching eagerly."""
    batch = Batch(joins_of(KINDS["temperature"], 64, options.vocab, 3), options.vocab, options.block, options.search)
    joins = joins_of(KINDS["k50 p0.9"], 64, options.vocab, 4)
    logits = random_logits(64, options.vocab, 3.0, 0, rounded=False)
    batch.step(logits)
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    for row, join in enumerate(joins):
        batch.rows.open(row, join)
    batch.rows.flush()
    opened_s = time.perf_counter()
    for _ in range(20):
        batch.rows.features(range(64))
    chosen_s = time.perf_counter()
    for _ in range(20):
        batch.step(logits)
    launched_s = time.perf_counter()
    torch.cuda.synchronize()
    return (
        f"host: open and flush 64 rows {(opened_s - started_s) * 1e6:.0f} us, "
        f"features of 64 rows {(chosen_s - opened_s) / 20 * 1e6:.1f} us, "
        f"eager launch {(launched_s - chosen_s) / 20 * 1e6:.0f} us"
    )


def logprob_time(options: argparse.Namespace) -> str:
    logits = random_logits(64, options.vocab, 3.0, 0, rounded=False)
    tokens = torch.zeros(64, dtype=torch.int32, device="cuda")
    token_logprobs(logits, tokens, 5)
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    token_logprobs(logits, tokens, 5).to_host()
    torch.cuda.synchronize()
    return f"logprobs of 64 rows, top 5: {(time.perf_counter() - started_s) * 1e6:.0f} us"


def attempt(work: Callable[[], str]) -> None:
    """A part that fails says so in a line, and the rest goes on."""
    try:
        print(work(), flush=True)
    except Exception as error:  # a broken kernel raises anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(str(error).split())[:300]
        print(f"FAILED {type(error).__name__} at {place.filename}:{place.lineno}: {reason}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--rows", type=int, default=64, help="rows in the comparison with the host")
    parser.add_argument("--kinds", default=",".join(KINDS), help="which of: " + ", ".join(KINDS))
    parser.add_argument("--spreads", default="3.0", help="standard deviations of the logits that are timed")
    parser.add_argument("--block", type=int, default=BLOCK)
    parser.add_argument("--chunk", type=int, default=SearchShape().chunk)
    parser.add_argument("--fan", type=int, default=SearchShape().fan)
    parser.add_argument("--no-agreement", action="store_true")
    options = parser.parse_args()
    options.search = SearchShape(chunk=options.chunk, fan=options.fan)
    kinds = [name for name in KINDS if name in options.kinds.split(",")]
    started_s = time.perf_counter()
    print(torch.cuda.get_device_name(), torch.__version__)
    if not options.no_agreement:
        for name in kinds:
            attempt(lambda name=name: agreement(name, options))
    attempt(lambda: host_side(options))
    attempt(lambda: logprob_time(options))
    print(f"{'in a graph':20s} {'rows':>5s} {'spread':>6s} {'us':>9s} {'GB/s':>9s}")
    for spread in map(float, options.spreads.split(",")):
        for count in map(int, options.batches.split(",")):
            for name in kinds:
                attempt(lambda name=name, count=count, spread=spread: timing(name, count, spread, options))
    print(f"{time.perf_counter() - started_s:.0f} s")


if __name__ == "__main__":
    main()
