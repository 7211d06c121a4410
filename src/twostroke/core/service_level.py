"""What was promised to a class of requests: how soon the first token comes, how evenly the others, and what happens to
a request for which that cannot be kept. Knows no queue and no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from twostroke.core.errors import BadRequestError

DEFAULT_LEVEL = "default"
"""The class of a request that names none."""
KEPT_SHARE = 0.99
"""An answer kept its inter-token promise if this share of its gaps was no longer than promised."""

WhenLate = Literal["queue", "refuse"]
"""A request whose first token cannot come in time: it waits all the same, or is refused at once."""


class Promise(NamedTuple):
    """What one request was promised; None: nothing of that kind."""

    level: str
    ttft_s: float | None = None
    itl_s: float | None = None

    def kept_ttft(self, ttft_s: float | None) -> bool | None:
        """None: nothing was promised. A first token that never came breaks the promise."""
        return None if self.ttft_s is None else ttft_s is not None and ttft_s <= self.ttft_s

    def kept_itl(self, gaps_s: Sequence[float]) -> bool | None:
        """Over the gaps between an answer's tokens; one without gaps keeps it."""
        if self.itl_s is None:
            return None
        num_late = sum(gap_s > self.itl_s for gap_s in gaps_s)
        return num_late <= (1.0 - KEPT_SHARE) * len(gaps_s)


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    name: str
    ttft_s: float | None = None
    """From arrival to the first token; None: no promise."""
    itl_s: float | None = None
    """Between two tokens of an answer; None: no promise."""
    weight: float = 1.0
    """Its share of a busy engine beside the others."""
    when_late: WhenLate = "queue"
    is_derived: bool = False
    """Nobody said what it promises: whoever schedules derives it from what the hardware does, for each request."""

    @property
    def promise(self) -> Promise:
        return Promise(self.name, self.ttft_s, self.itl_s)


@dataclass(frozen=True, slots=True)
class ServiceLevels:
    """All classes of an engine, by name; the default is always among them."""

    levels: tuple[ServiceLevel, ...] = (ServiceLevel(DEFAULT_LEVEL),)
    keys: Mapping[str, str] = field(default_factory=dict)
    """Which class the requests of an API key are of: by its name, or by its beginning and a `*`. A server's to read."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(level.name for level in self.levels)

    def named(self, name: str) -> ServiceLevel:
        """Empty: the default. Raises for a name that is not there."""
        wanted = name or DEFAULT_LEVEL
        for level in self.levels:
            if level.name == wanted:
                return level
        raise BadRequestError(f"service_level must be one of {', '.join(self.names)}, not {name!r:.60}")
