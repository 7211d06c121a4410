"""How the bench of heads makes drafts hold: as often as is stated, with tokens of the plain answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bench.speculation_head import Mended, chance_of
from twostroke.core.request import Request
from twostroke.speculation.drafter import Ask, Proposal

ANSWER = [100 + place for place in range(40)]


class Guessing:
    """Always as many tokens as it is asked for, and never right."""

    def open(self, seq_id: int, request: Request, token_ids: Sequence[int]) -> None:
        self.known = list(token_ids)

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self.known += token_ids

    def close(self, seq_id: int) -> None:
        self.known = []

    def follow(self, done: object) -> None:
        pass

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [Proposal((5,) * ask.most, (0.9,) * ask.most) for ask in asks]


@pytest.mark.parametrize("length", [1.0, 1.3, 1.64, 2.0, 3.08, 5.0])
def test_drafts_hold_as_often_as_stated(length: float) -> None:
    head: Any = Guessing()
    mended = Mended(head, lambda: 0.0, chance_of(length, 4), {(1, 2): ANSWER})
    num_tokens = 0
    for _ in range(4000):
        head.open(0, Request("r", (1, 2)), (1, 2, *ANSWER[:3]))
        (found,) = head.propose([Ask(0, 4)])
        assert len(found.token_ids) == 4
        held = next((place for place in range(4) if found.token_ids[place] != ANSWER[3 + place]), 4)
        num_tokens += 1 + held
        head.extend(0, ANSWER[3 : 4 + held])
        assert head.known == [1, 2, *ANSWER[: 4 + held]], "the head hears of everything"
        head.close(0)
    assert num_tokens / 4000 == pytest.approx(length, abs=0.08)
    assert mended.num_passes == 16_000


def test_a_length_that_drafts_cannot_bring_is_refused() -> None:
    with pytest.raises(SystemExit, match="4 drafts bring from 1 to 5 tokens a step, and not 6"):
        chance_of(6.0, 4)
