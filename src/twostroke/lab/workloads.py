"""The workloads: who asks for what, when, and which figures that gives. The default sizes are those that other engines
are measured with, and seeds fix every prompt."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from twostroke.core.errors import BadRequestError
from twostroke.lab.figures import Figure, Floors, gap_figures, milliseconds, percentile
from twostroke.lab.stage import Stage
from twostroke.lab.workload import Alike, Asked, AtOnce, OneByOne, Workload, random_ids

P50_P99 = {"p50": 0.5, "p99": 0.99}


@dataclass(frozen=True)
class Single(Alike, OneByOne):
    NAME = "single"
    MEASURES = "one stream alone: time to first token, time per output token"
    SEED = 1

    prompt_len: int = 512
    out_len: int = 256
    reps: int = 3

    @property
    def count(self) -> int:
        return self.reps

    def figures(self, stage: Stage, floors: Floors) -> list[Figure]:
        streams = stage.streams.values()
        ttft_s = statistics.median(stream.ttft_s for stream in streams)
        tpot_s = statistics.median(stream.tpot_s for stream in streams)
        return [
            milliseconds("ttft", ttft_s, floors.ttft_s(self.prompt_len)),
            milliseconds("tpot", tpot_s, floors.tpot_s(self.prompt_len, self.out_len)),
        ]

    def warm_up(self) -> Workload | None:
        return replace(self, reps=1)


@dataclass(frozen=True)
class Prefill(Single):
    NAME = "prefill"
    MEASURES = "one long prompt: time to first token"

    prompt_len: int = 16384
    out_len: int = 8

    def warm_up(self) -> Workload | None:
        return None


@dataclass(frozen=True)
class Batch(Alike, AtOnce):
    NAME = "batch"
    MEASURES = "many requests of one length at once: tokens a second, gaps between a stream's tokens (ITL)"
    SEED = 2

    n: int = 128
    prompt_len: int = 1024
    out_len: int = 256

    @property
    def count(self) -> int:
        return self.n

    def figures(self, stage: Stage, floors: Floors) -> list[Figure]:
        written = stage.num_tokens
        total = written + self.n * self.prompt_len
        return [
            Figure("out_tok_s", written / stage.duration_s, written / floors.run_s),
            Figure("total_tok_s", total / stage.duration_s, total / floors.run_s),
            *gap_figures("itl_{}", floors.gaps(stage.streams.values()), P50_P99),
        ]

    def warm_up(self) -> Workload | None:
        return replace(self, n=max(1, self.n // 8))


@dataclass(frozen=True)
class Prefix(OneByOne):
    NAME = "prefix"
    MEASURES = "one request after another behind the same long prefix: time to first token, cold and on a hit"
    LEAST: ClassVar[dict[str, float]] = {"n": 2}

    n: int = 32
    shared: int = 8192
    unique: int = 64
    out_len: int = 16

    @property
    def longest_tokens(self) -> int:
        return self.shared + self.unique + self.out_len

    def requests(self, vocab_size: int) -> Iterable[Asked]:
        draw = random.Random(3)
        head = random_ids(self.shared, vocab_size, draw)
        return ((head + random_ids(self.unique, vocab_size, draw), self.out_len) for _ in range(self.n))

    def figures(self, stage: Stage, floors: Floors) -> list[Figure]:
        cold, *hits = stage.streams.values()
        length = self.shared + self.unique
        hit_s = statistics.median(stream.ttft_s for stream in hits)
        return [
            milliseconds("ttft_cold", cold.ttft_s, floors.ttft_s(length)),
            milliseconds("ttft_hit", hit_s, floors.ttft_s(length, cached_tokens=self.shared)),
        ]


@dataclass(frozen=True)
class Noisy(Workload):
    NAME = "noisy"
    MEASURES = "streams decode, and a long prompt arrives: their ITL before and while it is read, and its TTFT"

    streams: int = 32
    prompt_len: int = 256
    out_len: int = 600
    long_prompt: int = 32768
    warm_steps: int = 150
    long_out: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warm_steps >= self.out_len:
            raise BadRequestError(
                f"noisy: the streams end after {self.out_len} tokens (out_len), and the long prompt comes after "
                f"{self.warm_steps} steps (warm_steps): it must come before"
            )

    @property
    def longest_tokens(self) -> int:
        return max(self.prompt_len + self.out_len, self.long_prompt + self.long_out)

    def play(self, stage: Stage, vocab_size: int) -> None:
        draw = random.Random(4)
        prompts = [random_ids(self.prompt_len, vocab_size, draw) for _ in range(self.streams)]
        long_prompt = random_ids(self.long_prompt, vocab_size, draw)
        stage.start()
        for prompt in prompts:
            stage.add(prompt, self.out_len)
        for _ in range(self.warm_steps):
            stage.step()
        stage.add(long_prompt, self.long_out)
        stage.drain()

    def figures(self, stage: Stage, floors: Floors) -> list[Figure]:
        *streams, long_one = stage.streams.values()
        gaps = floors.gaps(streams)
        before = [gap for gap in gaps if gap.last_step <= long_one.born_step]
        during = [gap for gap in gaps if long_one.born_step < gap.last_step <= long_one.steps[0]]
        return [
            *gap_figures("itl_{}_before", before, {"p50": 0.5}),
            *gap_figures("itl_{}_during", during, {"p99": 0.99, "max": 1.0}),
            milliseconds("long_ttft", long_one.ttft_s, floors.ttft_s(self.long_prompt)),
        ]


@dataclass(frozen=True)
class Online(Workload):
    NAME = "online"
    MEASURES = "requests that arrive at random (Poisson), as at a server: TTFT and ITL under load"
    LEAST: ClassVar[dict[str, float]] = {"rate": 0.001, "out_least": 2}

    n: int = 300
    rate: float = 20.0
    prompt_least: int = 200
    prompt_most: int = 2000
    out_least: int = 50
    out_most: int = 300

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range(self.prompt_least, self.prompt_most)
        self.check_range(self.out_least, self.out_most)

    @property
    def longest_tokens(self) -> int:
        return self.prompt_most + self.out_most

    def play(self, stage: Stage, vocab_size: int) -> None:
        draw = random.Random(5)
        arrivals, due_s = [], 0.0
        for _ in range(self.n):
            due_s += draw.expovariate(self.rate)
            prompt = random_ids(draw.randint(self.prompt_least, self.prompt_most), vocab_size, draw)
            arrivals.append((due_s, prompt, draw.randint(self.out_least, self.out_most)))
        arrivals.reverse()
        stage.start()
        while arrivals or stage.busy():
            now_s = stage.clock() - stage.started_s
            while arrivals and arrivals[-1][0] <= now_s:
                due_s, prompt, out_len = arrivals.pop()
                stage.add(prompt, out_len, born_s=stage.started_s + due_s)
            if stage.busy():
                stage.step()
            else:
                time.sleep(max(0.0, arrivals[-1][0] - now_s))

    def figures(self, stage: Stage, floors: Floors) -> list[Figure]:
        streams = list(stage.streams.values())
        ttft = [
            milliseconds(
                f"ttft_{name}",
                percentile((stream.ttft_s for stream in streams), fraction),
                percentile((floors.ttft_s(stream.prompt_len) for stream in streams), fraction),
            )
            for name, fraction in P50_P99.items()
        ]
        return [*ttft, *gap_figures("itl_{}", floors.gaps(streams), P50_P99), Figure("s", stage.duration_s)]


@dataclass(frozen=True)
class Nano(AtOnce):
    NAME = "nano"
    MEASURES = "many requests of mixed lengths at once (nano-vLLM's benchmark): tokens a second"

    n: int = 256
    least: int = 100
    most: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range(self.least, self.most)

    @property
    def longest_tokens(self) -> int:
        return 2 * self.most

    def requests(self, vocab_size: int) -> list[Asked]:
        """At full size, 133,966 tokens are written."""
        draw = random.Random(0)
        last_id = min(10_000, vocab_size - 1)
        prompts = [
            [draw.randint(0, last_id) for _ in range(draw.randint(self.least, self.most))] for _ in range(self.n)
        ]
        return [(prompt, draw.randint(self.least, self.most)) for prompt in prompts]

    def figures(self, stage: Stage, floors: Floors) -> list[Figure]:
        written = stage.num_tokens
        return [
            Figure("out_tok", written),
            Figure("s", stage.duration_s, floors.run_s),
            Figure("out_tok_s", written / stage.duration_s, written / floors.run_s),
        ]

    def warm_up(self) -> Workload | None:
        return replace(self, n=max(1, self.n // 16))
