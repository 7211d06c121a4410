"""What came out of a simulation: the times that users felt, and how many met an objective. Definitions are those of
`docs/metrics.md`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
class Served:
    """The finished requests, kept flat: there may be millions of tokens."""

    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: list[float | None] = field(default_factory=list)
    queue_s: array[float] = field(default_factory=lambda: array("d"))
    itl_s: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    output_tokens: int = 0

    def take(self, timings: Iterable[SequenceTiming]) -> None:
        for timing in timings:
            ttft_s, queue_s = timing.ttft_s, timing.queue_s
            assert ttft_s is not None and queue_s is not None  # it finished, so it began
            self.ttft_s.append(ttft_s)
            self.queue_s.append(queue_s)
            self.tpot_s.append(timing.tpot_s)
            self.itl_s.fromlist(gaps_of(timing.token_times_s))
            self.prompt_tokens += timing.prompt_tokens
            self.output_tokens += len(timing.token_times_s)


def percentiles(values: Iterable[float], fractions: Mapping[str, float] = PERCENTILES) -> dict[str, float]:
    """The value at index `int(p * n)` of the sorted ones; nothing where there are none."""
    ordered = sorted(values)
    return {
        name: ordered[min(len(ordered) - 1, int(part * len(ordered)))] for name, part in fractions.items() if ordered
    }


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
        )

    def goodput(self, objective: Objective) -> tuple[float, float]:
        """Requests that met the objective: their share of all that asked, and how many a second."""
        pairs = zip(self.served.ttft_s, self.served.tpot_s, strict=True)
        good = sum(objective.met(ttft_s, tpot_s) for ttft_s, tpot_s in pairs)
        asked = len(self.served.ttft_s) + self.num_refused
        return good / max(1, asked), good / self.duration_s if self.duration_s > 0.0 else 0.0
