"""What `plan` and `simulate` may be told of drafts. Each field is an option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.core.errors import BadRequestError
from twostroke.core.setting import integer, number
from twostroke.core.speculation import MAX_DRAFTS

if TYPE_CHECKING:
    from twostroke.planner.speculating import Speculating

SPECULATION = "Speculation"
DEFAULT_DRAFTS = 4


@dataclass(frozen=True, slots=True)
class SpeculationWish:
    accept: float | None = number(
        None,
        0.0,
        1.0,
        SPECULATION,
        "The chance that a draft holds if those before it do. Not given: no drafts.",
    )
    accepted_length: float | None = number(
        None, 1.0, MAX_DRAFTS + 1.0, SPECULATION, "Instead: the tokens that a step with all of its drafts brings."
    )
    drafts: int | None = integer(
        None, 1, MAX_DRAFTS, SPECULATION, f"The most drafts of a stream in a step; default {DEFAULT_DRAFTS}."
    )

    def speculating(self) -> Speculating | None:
        from twostroke.planner.speculating import Speculating

        if self.accept is not None and self.accepted_length is not None:
            raise BadRequestError("--accept and --accepted-length say the same: one of them")
        if self.accept is None and self.accepted_length is None:
            if self.drafts is not None:
                raise BadRequestError("--drafts goes with --accept or --accepted-length")
            return None
        drafts = DEFAULT_DRAFTS if self.drafts is None else self.drafts
        if self.accept is not None:
            return Speculating(self.accept, drafts)
        assert self.accepted_length is not None
        return Speculating.of_length(self.accepted_length, drafts)
