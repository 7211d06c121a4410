"""Playing workloads on an engine and turning what was seen into figures: warm-up, repetitions, prefixes forgotten in
between, and a sentence for what could not be played. Prints nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twostroke.core.errors import BackendError, TwostrokeError
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape
from twostroke.engine.engine import Engine
from twostroke.lab.adapter import EngineAdapter
from twostroke.lab.figures import Figure, Floors
from twostroke.lab.stage import Stage
from twostroke.lab.workload import Workload
from twostroke.lab.workloads import Single


@dataclass(frozen=True, slots=True)
class FigureSummary:
    """One figure over all repetitions; `typical` holds the medians."""

    typical: Figure
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    workload: Workload
    figures: tuple[FigureSummary, ...] = ()
    num_steps: int = 0
    """Of the last repetition."""
    duration_s: float = 0.0
    """All of it, the warm-up included."""
    skipped: str | None = None
    """Why there are no figures."""


class Bench:
    def __init__(self, engine: Engine, vocab_size: int, shape: ModelShape, ceilings: Ceilings) -> None:
        self._adapter = EngineAdapter(engine)
        self._vocab_size = vocab_size
        self._shape = shape
        self._ceilings = ceilings
        pool_limit = engine.scheduler.ledger.max_total_tokens
        context = engine.scheduler.config.max_context
        self._max_tokens = context if pool_limit is None else min(context, pool_limit)

    def run(
        self, workload: Workload, repetitions: int = 1, progress: Callable[[str], None] | None = None
    ) -> WorkloadResult:
        """`progress` is told what begins; nothing is said while time counts."""
        say = progress or (lambda message: None)
        if workload.longest_tokens > self._max_tokens:
            longest = f"its longest request has {workload.longest_tokens:,} tokens"
            return WorkloadResult(workload, skipped=f"{longest}, and here {self._max_tokens:,} fit")
        started_s, num_steps, runs = time.perf_counter(), 0, []
        try:
            if (small := workload.warm_up()) is not None:
                say("warming up")
                self._play(small)
            for repetition in range(repetitions):
                say("measuring" + (f" {repetition + 1} of {repetitions}" if repetitions > 1 else ""))
                stage, floors = self._play(workload)
                runs.append(workload.figures(stage, floors))
                num_steps = stage.num_steps
        except TwostrokeError as error:
            return WorkloadResult(workload, duration_s=time.perf_counter() - started_s, skipped=f"it failed: {error}")
        return WorkloadResult(workload, summarise(runs), num_steps, time.perf_counter() - started_s)

    def first_token_s(self) -> float:
        """TTFT of a short prompt. As the engine's very first request it pays for whatever the start put off."""
        stage, _ = self._play(Single(prompt_len=min(16, self._max_tokens - 2), out_len=2, reps=1))
        return next(iter(stage.streams.values())).ttft_s

    def _play(self, workload: Workload) -> tuple[Stage, Floors]:
        self._adapter.clear_prefix()
        self._adapter.take_log()
        stage = Stage(self._adapter)
        try:
            workload.play(stage, self._vocab_size)
            for stream in stage.streams.values():
                if (written := len(stream.times_s)) != stream.out_len:
                    raise BackendError(f"{written} tokens were written where {stream.out_len} were asked for")
        except BaseException:
            self._adapter.abandon()
            raise
        return stage, Floors(self._shape, self._ceilings, self._adapter.take_log())


def summarise(runs: Sequence[Sequence[Figure]]) -> tuple[FigureSummary, ...]:
    """Medians over repetitions, figure by figure; a figure that one repetition lacks is left out."""
    by_name: dict[str, list[Figure]] = {}
    for run in runs:
        for figure in run:
            by_name.setdefault(figure.name, []).append(figure)
    summaries = []
    for name, found in by_name.items():
        if len(found) < len(runs):
            continue
        values = tuple(figure.value for figure in found)
        floors = [figure.floor for figure in found if figure.floor is not None]
        typical = Figure(name, statistics.median(values), statistics.median(floors) if floors else None)
        summaries.append(FigureSummary(typical, values))
    return tuple(summaries)
