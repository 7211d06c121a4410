"""Where a workload is played: any engine that has four methods, and a clock on everything that comes out of it. Knows
no model and no floor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class DrivenEngine(Protocol):
    """All that a workload asks of an engine, ours or another."""

    def add(self, token_ids: Sequence[int], out_len: int) -> str:
        """Queue a prompt; exactly `out_len` tokens are written."""

    def step(self) -> Iterable[tuple[str, int, bool]]:
        """What one step brought: request, new tokens, whether it is finished."""

    def busy(self) -> bool: ...

    def clear_prefix(self) -> None:
        """Forget cached prefixes."""


@dataclass(slots=True)
class Stream:
    """One request: when it was added, and when each of its tokens came."""

    prompt_len: int
    out_len: int
    born_s: float
    born_step: int
    """Steps that were done before it was added."""
    times_s: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """The number of the step that brought each token, counted from 1."""

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.born_s

    @property
    def tpot_s(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)


class Stage:
    def __init__(self, engine: DrivenEngine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self.clock = clock
        self.streams: dict[str, Stream] = {}
        """By request, in the order they were added."""
        self.num_steps = 0
        self.started_s = clock()
        self.ended_s = self.started_s

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def num_tokens(self) -> int:
        """Written so far, by all."""
        return sum(len(stream.times_s) for stream in self.streams.values())

    def start(self) -> None:
        """The prompts are ready: from here on time counts."""
        self.started_s = self.clock()

    def busy(self) -> bool:
        return self._engine.busy()

    def add(self, token_ids: Sequence[int], out_len: int, born_s: float | None = None) -> Stream:
        """`born_s`: when it was due, where that was earlier than now."""
        born_s = self.clock() if born_s is None else born_s
        stream = Stream(len(token_ids), out_len, born_s, self.num_steps)
        self.streams[self._engine.add(token_ids, out_len)] = stream
        return stream

    def step(self) -> None:
        outputs = self._engine.step()
        self.ended_s = now_s = self.clock()
        self.num_steps += 1
        for request, num_tokens, _ in outputs:
            if num_tokens:
                stream = self.streams[request]
                stream.times_s.extend([now_s] * num_tokens)
                stream.steps.extend([self.num_steps] * num_tokens)

    def drain(self) -> None:
        while self._engine.busy():
            self.step()
