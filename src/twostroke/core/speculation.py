"""What a request may say of drafts. Knows no drafter."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.errors import BadRequestError
from twostroke.core.setting import is_integer, shown

OFF = "off"
MAX_DRAFTS = 64


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    method: str | None = None
    """Who drafts: one of those that the engine was started with, or `off`; None: as it was started."""
    max_drafts: int | None = None
    """The most drafts a step; 0: none; None: as many as pay."""

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


NO_DRAFTS = SpeculationParams(method=OFF)
