"""What is promised to a class of requests: how soon the first token comes, how evenly the others come, and what happens
to a request for which that cannot be kept. Knows no queue and no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from twostroke.core.errors import BadRequestError

DEFAULT_LEVEL = "default"
"""The class of a request that names none."""
KEPT_SHARE = 0.99
"""An answer kept its inter-token promise if this share of its gaps was no longer than promised."""

STREAMS_SHARE = 0.85
"""The share of a promised gap that a step of streams alone may take. A step that also takes in a newcomer is longer."""

WhenLate = Literal["queue", "refuse"]
"""What happens to a request whose first token cannot come in time: it waits all the same ("queue"), or is refused at
once ("refuse")."""


class Promise(NamedTuple):
    """What one request was promised. None means that nothing of that kind was promised."""

    level: str
    ttft_s: float | None = None
    itl_s: float | None = None

    def kept_ttft(self, ttft_s: float | None) -> bool | None:
        """Whether the first token came in time. None means that nothing was promised. A first token that never came
        breaks the promise."""
        return None if self.ttft_s is None else ttft_s is not None and ttft_s <= self.ttft_s

    def kept_itl(self, gaps_s: Sequence[float]) -> bool | None:
        """Whether the gaps between an answer's tokens were as promised. None means that nothing was promised. An answer
        without gaps keeps the promise."""
        if self.itl_s is None:
            return None
        num_late = sum(gap_s > self.itl_s for gap_s in gaps_s)
        return num_late <= (1.0 - KEPT_SHARE) * len(gaps_s)


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    name: str
    ttft_s: float | None = None
    """The longest time from arrival to the first token. None means that there is no promise."""
    itl_s: float | None = None
    """The longest time between two tokens of an answer. None means that there is no promise."""
    weight: float = 1.0
    """The weight of its share of a busy engine, beside the other classes."""
    when_late: WhenLate = "queue"
    is_derived: bool = False
    """True means that no user set its promise. The scheduler then derives one for each request from what the hardware
    can do."""

    @property
    def promise(self) -> Promise:
        return Promise(self.name, self.ttft_s, self.itl_s)


@dataclass(frozen=True, slots=True)
class ServiceLevels:
    """All classes of an engine. The default is always among them."""

    levels: tuple[ServiceLevel, ...] = (ServiceLevel(DEFAULT_LEVEL),)
    keys: Mapping[str, str] = field(default_factory=dict)
    """Maps an API key, or the beginning of one and a `*`, to the name of its requests' class. The server reads it."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(level.name for level in self.levels)

    def named(self, name: str) -> ServiceLevel:
        """Returns the class of this name. An empty name means the default. Raises BadRequestError if there is no such
        class."""
        wanted = name or DEFAULT_LEVEL
        for level in self.levels:
            if level.name == wanted:
                return level
        raise BadRequestError(f"service_level must be one of {', '.join(self.names)}, not {name!r:.60}")


def streams_fit(step_s: float, itl_s: float) -> bool:
    """Whether streams keep a promised gap of `itl_s` if each of their steps takes `step_s`."""
    return step_s <= STREAMS_SHARE * itl_s


def most_streams(itl_s: float, most: int, step_s: Callable[[int], float]) -> int:
    """Returns how many streams, `most` at most, keep a promised gap. `step_s` predicts a step of that many streams, and
    never falls as their number grows."""
    fits, fits_not = 0, most + 1
    while fits_not - fits > 1:
        number = (fits + fits_not) // 2
        if streams_fit(step_s(number), itl_s):
            fits = number
        else:
            fits_not = number
    return fits
