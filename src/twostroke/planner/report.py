"""What came out of a simulation: the times that users felt, and how many met an objective. Definitions are those of
`docs/metrics.md`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from twostroke.core.service_level import DEFAULT_LEVEL
from twostroke.core.timing import SequenceTiming, gaps_of

PERCENTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Objective:
    """What a user should feel at worst; None: anything goes."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met(self, ttft_s: float, tpot_s: float | None) -> bool:
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return False
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s


@dataclass(slots=True)
class LevelServed:
    """What became of a class's requests."""

    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    itl_s: array[float] = field(default_factory=lambda: array("d"))
    num_kept_ttft: int = 0
    num_kept_itl: int = 0
    num_kept: int = 0
    """Both, as far as they were promised."""
    num_refused: int = 0
    """At once, because they would have been late."""

    def take(self, timing: SequenceTiming, ttft_s: float, gaps_s: list[float]) -> None:
        self.ttft_s.append(ttft_s)
        self.itl_s.fromlist(gaps_s)
        promise = timing.promise
        kept_ttft = promise is None or promise.kept_ttft(ttft_s) is not False
        kept_itl = promise is None or promise.kept_itl(gaps_s) is not False
        self.num_kept_ttft += kept_ttft
        self.num_kept_itl += kept_itl
        self.num_kept += kept_ttft and kept_itl


@dataclass(slots=True)
class Served:
    """The finished requests, kept flat: there may be millions of tokens."""

    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: list[float | None] = field(default_factory=list)
    queue_s: array[float] = field(default_factory=lambda: array("d"))
    itl_s: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    output_tokens: int = 0
    levels: dict[str, LevelServed] = field(default_factory=dict)
    """By name, those that anybody asked for."""

    def refuse(self, level: str) -> None:
        self._level(level).num_refused += 1

    def _level(self, name: str) -> LevelServed:
        return self.levels.setdefault(name or DEFAULT_LEVEL, LevelServed())

    def take(self, timings: Iterable[SequenceTiming]) -> None:
        for timing in timings:
            ttft_s, queue_s = timing.ttft_s, timing.queue_s
            assert ttft_s is not None and queue_s is not None  # it finished, so it began
            self.ttft_s.append(ttft_s)
            self.queue_s.append(queue_s)
            self.tpot_s.append(timing.tpot_s)
            gaps_s = gaps_of(timing.token_times_s)
            self.itl_s.fromlist(gaps_s)
            self._level("" if timing.promise is None else timing.promise.level).take(timing, ttft_s, gaps_s)
            self.prompt_tokens += timing.prompt_tokens
            self.output_tokens += len(timing.token_times_s)


def percentiles(values: Iterable[float], fractions: Mapping[str, float] = PERCENTILES) -> dict[str, float]:
    """The value at index `int(p * n)` of the sorted ones; nothing where there are none."""
    ordered = sorted(values)
    return {
        name: ordered[min(len(ordered) - 1, int(part * len(ordered)))] for name, part in fractions.items() if ordered
    }


@dataclass(frozen=True, slots=True)
class LevelReport:
    """Of one class: how many asked, how many of them were served as promised, and what they felt."""

    name: str
    requests: int
    """Those that were refused among them."""
    refused: int
    kept_ttft_share: float
    """Of those that were served."""
    kept_itl_share: float
    kept_share: float
    """Of all that asked, those for whom everything was kept that was promised."""
    goodput_per_s: float
    """Those, a second."""
    ttft_s: dict[str, float]
    itl_s: dict[str, float]

    @classmethod
    def of(cls, name: str, served: LevelServed, duration_s: float) -> LevelReport:
        num_served = len(served.ttft_s)
        num_asked = num_served + served.num_refused
        return cls(
            name,
            num_asked,
            served.num_refused,
            served.num_kept_ttft / max(1, num_served),
            served.num_kept_itl / max(1, num_served),
            served.num_kept / max(1, num_asked),
            served.num_kept / duration_s if duration_s > 0.0 else 0.0,
            percentiles(served.ttft_s),
            percentiles(served.itl_s),
        )


@dataclass(frozen=True, slots=True)
class SimulationReport:
    served: Served
    num_refused: int
    duration_s: float
    """From the first arrival to the last token."""
    num_steps: int
    num_preemptions: int
    prefix_hit_tokens: int
    busy_share: float
    """Of all replicas' time, how much a step was running."""
    ttft_s: dict[str, float]
    queue_s: dict[str, float]
    itl_s: dict[str, float]
    tpot_s: dict[str, float]
    output_tokens_per_s: float
    requests_per_s: float
    levels: tuple[LevelReport, ...]
    """By class, those that anybody asked for."""

    @classmethod
    def of(
        cls,
        served: Served,
        *,
        num_refused: int,
        duration_s: float,
        busy_s: float,
        num_steps: int,
        num_preemptions: int,
        prefix_hit_tokens: int,
        replicas: int,
    ) -> SimulationReport:
        per_s = 1.0 / duration_s if duration_s > 0.0 else 0.0
        return cls(
            served=served,
            num_refused=num_refused,
            duration_s=duration_s,
            num_steps=num_steps,
            num_preemptions=num_preemptions,
            prefix_hit_tokens=prefix_hit_tokens,
            busy_share=min(1.0, busy_s * per_s / replicas),
            ttft_s=percentiles(served.ttft_s),
            queue_s=percentiles(served.queue_s),
            itl_s=percentiles(served.itl_s),
            tpot_s=percentiles(value for value in served.tpot_s if value is not None),
            output_tokens_per_s=served.output_tokens * per_s,
            requests_per_s=len(served.ttft_s) * per_s,
            levels=tuple(LevelReport.of(name, served.levels[name], duration_s) for name in sorted(served.levels)),
        )

    @property
    def num_late(self) -> int:
        """Refused at once, because their class refuses rather than to be late."""
        return sum(level.refused for level in self.levels)

    def goodput(self, objective: Objective) -> tuple[float, float]:
        """Requests that met the objective: their share of all that asked, and how many a second."""
        pairs = zip(self.served.ttft_s, self.served.tpot_s, strict=True)
        good = sum(objective.met(ttft_s, tpot_s) for ttft_s, tpot_s in pairs)
        asked = len(self.served.ttft_s) + self.num_refused + self.num_late
        return good / max(1, asked), good / self.duration_s if self.duration_s > 0.0 else 0.0
