"""What a request may say about drafts. Knows no drafter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from twostroke.core.errors import BadRequestError
from twostroke.core.setting import is_integer, shown

OFF = "off"
AUTO = "auto"
MAX_DRAFTS = 64


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    method: str | None = None
    """The name of a drafter that the engine was started with, or `off`. None means as the engine was started."""
    max_drafts: int | None = None
    """The most drafts in one step. 0 means none; None means as many as pay."""

    def __post_init__(self) -> None:
        if self.method is not None and (not isinstance(self.method, str) or not self.method):
            raise BadRequestError(f"speculation's method must be a name or 'off', not {shown(self.method):.60}")
        most = self.max_drafts
        if most is not None and not (is_integer(most) and 0 <= most <= MAX_DRAFTS):
            raise BadRequestError(
                f"speculation's max_drafts must be an integer from 0 to {MAX_DRAFTS}, not {shown(most):.60}"
            )

    @property
    def is_off(self) -> bool:
        return self.method == OFF or self.max_drafts == 0


class DrafterState(NamedTuple):
    """What an operator should know of one drafter. Error messages of its faults are in the log alone, since they may
    quote a request."""

    name: str
    num_faults: int = 0
    """How often it raised, returned something invalid, or took too long to be told of tokens."""
    is_out: bool = False
    """Whether it is not asked any more, for a while or for good."""
    is_doubted: bool = False
    """Whether it hardly ever guesses right. Most likely it was made for another model."""


NO_DRAFTS = SpeculationParams(method=OFF)


def as_speculation(value: object) -> SpeculationParams | None:
    """Returns the parameters that a user wrote as a method's name, or as a mapping of the fields."""
    if value is None or isinstance(value, SpeculationParams):
        return value
    if isinstance(value, str):
        return None if value == AUTO else SpeculationParams(method=value)
    if isinstance(value, Mapping):
        if unknown := [name for name in value if name not in ("method", "max_drafts")]:
            raise BadRequestError(f"speculation has method and max_drafts, and no {shown(unknown[0]):.60}")
        method = value.get("method")
        return SpeculationParams(None if method == AUTO else method, value.get("max_drafts"))
    raise BadRequestError(
        f"speculation must be a method's name, {OFF!r}, or method and max_drafts, not {shown(value):.60}"
    )


def expected_tokens(chance: float, num_drafts: int) -> float:
    """Returns how many tokens a step is expected to bring a stream. `chance` is the probability that a draft holds if
    those before it do."""
    return sum(chance**place for place in range(num_drafts + 1))


def check_speculation(asked: SpeculationParams | None, methods: Collection[str]) -> None:
    """Raises BadRequestError if the asked method is not one of `methods`, which the engine was started with."""
    method = None if asked is None else asked.method
    if method is None or method == OFF or method in methods:
        return
    had = f"of {', '.join(methods)}" if methods else "none, as this engine drafts nothing"
    raise BadRequestError(
        f"speculation's method {shown(method):.60} is not one that this engine was started with ({had}); {OFF!r} is "
        "always one"
    )
