"""What came out of a simulated fleet, beside what its users felt: what was handed over, who stayed, how many replicas
there were and for how long, and what failures cost."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from twostroke.planner.report import SimulationReport, percentiles


@dataclass(slots=True)
class Handoff:
    """KV of one prompt on its way."""

    num_bytes: int = 0
    link_s: float = 0.0
    """That a link was busy with it."""
    read_s: float = 0.0
    """When the prompt was read."""
    there_s: float = 0.0
    """When all of it had arrived."""

    @property
    def exposed_s(self) -> float:
        """What the user waits for it: the rest hides behind reading."""
        return max(0.0, self.there_s - self.read_s)


@dataclass(frozen=True, slots=True)
class HandoffReport:
    number: int
    num_bytes: int
    """Of all."""
    mean_bytes: float
    exposed_s: dict[str, float]
    link_s: dict[str, float]
    hidden_share: float
    """Of the links' seconds, those behind reading."""
    num_kept: int
    """Requests that were read where they were written: a handoff would have taken longer."""
    num_lost: int
    """KV that found no room, and was read again."""

    @classmethod
    def of(cls, handoffs: list[Handoff], num_kept: int, num_lost: int) -> HandoffReport:
        num_bytes = sum(one.num_bytes for one in handoffs)
        link_s, exposed_s = sum(one.link_s for one in handoffs), sum(one.exposed_s for one in handoffs)
        return cls(
            len(handoffs),
            num_bytes,
            num_bytes / max(1, len(handoffs)),
            percentiles(one.exposed_s for one in handoffs),
            percentiles(one.link_s for one in handoffs),
            max(0.0, 1.0 - exposed_s / link_s) if link_s > 0.0 else 0.0,
            num_kept,
            num_lost,
        )


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a fleet stood, each time that it was looked at."""

    moment_s: float
    prefill: int
    decode: int
    """Replicas, those that load or drain among them."""
    unfinished: int
    why: str = ""


@dataclass(slots=True)
class Felt:
    """A request a place, in the order in which they ended."""

    arrival_s: array[float] = field(default_factory=lambda: array("d"))
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    is_kept: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, slots=True)
class FleetReport:
    simulation: SimulationReport
    handoffs: HandoffReport
    replica_s: dict[str, float]
    """By role, from the beginning of their loading to their end."""
    felt: Felt
    moments: list[Moment]
    num_failures: int = 0
    num_sent_again: int = 0
    """Requests that had no token yet when their replica failed."""
    num_broken: int = 0
    """Answers that ended with an error, in their midst."""

    @property
    def replica_hours(self) -> float:
        return sum(self.replica_s.values()) / 3600.0

    @property
    def kept_share(self) -> float:
        """Of all that asked, those for whom everything was kept that was promised."""
        simulation = self.simulation
        asked = len(self.felt.is_kept) + simulation.num_refused + simulation.num_late + self.num_broken
        return sum(self.felt.is_kept) / max(1, asked)
