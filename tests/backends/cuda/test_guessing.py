"""Guesses of a host that is a step late: what they are worth is learnt although the next step is launched before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from twostroke.backends.cuda.guessing import Guesser
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import DecodeSlot, DraftCosts, Drafts, PrefillChunk, RowJoin, SampledToken, Step, StepResult
from twostroke.speculation.drafter import Ask, Proposal
from twostroke.speculation.speculator import Speculator
from twostroke.speculation.unseen import UnseenDrafts

PROMPT = (1, 2, 3)
WIDTHS = (2, 3, 5)
COSTS = DraftCosts((0, 1, 4), (1.0, 1.1, 1.4))


class Counting:
    """Guesses that tokens go on by one, or, where it is wrong, by two; sure of it either way."""

    name = "counting"

    def __init__(self, by: int, chance: float = 0.9) -> None:
        self._by, self._chance, self._last = by, chance, 0

    def open(self, seq_id: int, request: Request, token_ids: Sequence[int]) -> None:
        self._last = token_ids[-1]

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._last = token_ids[-1]

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [
            Proposal(
                tuple(self._last + self._by * (1 + place) for place in range(ask.most)), (self._chance,) * ask.most
            )
            for ask in asks
        ]

    def close(self, seq_id: int) -> None: ...


def drafts_of(by: int, num_steps: int) -> list[int]:
    """A stream that counts, two steps in flight at a time: how many drafts each step has."""
    guesser = Guesser()
    guesser.speculator = Speculator([Counting(by)], vocab_size=100_000)
    request = Request("r", PROMPT, SamplingParams(max_tokens=4096))
    first = Step(0, joins=(RowJoin(7, request),), prefills=(PrefillChunk(7, 0, PROMPT, samples=True),))
    flying, counts, length, last = [(first, [])], [], len(PROMPT), PROMPT[-1]
    guesser.update(first)
    guesser.launched(first, [])
    for step_id in range(1, num_steps + 1):
        step = Step(step_id, decodes=(DecodeSlot(7, 0, Drafts(4)),), draft_costs=COSTS)
        guesser.update(step)
        guesses = guesser.guesses(step, WIDTHS)
        guesser.launched(step, guesses)
        counts.append(guesses[0].num_drafts if guesses else 0)
        flying.append((step, guesses))
        done, made = flying.pop(0)
        held = 0
        if made:  # the device takes the guesses behind its own last token
            drafts = made[0].token_ids[length - made[0].start :][: made[0].num_drafts]
            while held < len(drafts) and drafts[held] == last + 1 + held:
                held += 1
        came = range(last + 1, last + 2 + held)
        length, last = length + len(came), came[-1]
        guesser.settle(done, made, StepResult(done.step_id, {7: tuple(map(SampledToken, came))}, {}, {}, 1.0))
    return counts


@pytest.mark.parametrize("by, drafts", [(1, True), (2, False)])
def test_what_holds_is_guessed_on_and_what_never_holds_is_not(by: int, drafts: bool) -> None:
    counts = drafts_of(by, 80)
    assert counts[0] > 0, "to begin with a drafter is believed"
    assert all(counts[-20:]) if drafts else not any(counts[-20:])


@pytest.mark.parametrize(("chance", "method"), [(0.99, "counting"), (0.2, "eagle3")])
def test_the_device_is_asked_where_it_promises_more_than_what_was_looked_up(chance: float, method: str) -> None:
    """Its drafts usually hold three times of four, all together; those that were looked up as often as they say."""
    guesser = Guesser()
    guesser.speculator = Speculator([Counting(1, chance)], vocab_size=100_000)
    unseen = UnseenDrafts("eagle3", "a head", lambda num_streams, num_drafts: 0.01 * num_drafts)
    request = Request("r", PROMPT, SamplingParams(max_tokens=4096))
    first = Step(0, joins=(RowJoin(7, request),), prefills=(PrefillChunk(7, 0, PROMPT, samples=True),))
    guesser.update(first)
    guesser.launched(first, [])
    guesser.settle(first, [], StepResult(0, {7: (SampledToken(4),)}, {}, {}, 1.0))
    for step_id in range(1, 5):  # until it is known how long looking up takes
        step = Step(step_id, decodes=(DecodeSlot(7, 3, Drafts(4)),), draft_costs=COSTS)
        guesser.update(step)
        guesses = guesser.guesses(step, WIDTHS)
        guesser.launched(step, guesses)
        guesser.settle(step, guesses, StepResult(step_id, {7: (SampledToken(4 + step_id),)}, {}, {}, 1.0))
    guesser.unseen = unseen
    unseen.open(7, request, ())
    for turn in range(40):
        unseen.learn(7, 4, [5] * (5 if turn % 4 else 1))
    step = Step(9, decodes=(DecodeSlot(7, 3, Drafts(4)),), draft_costs=COSTS)
    guesser.update(step)
    guess = guesser.guesses(step, WIDTHS)[0]
    assert guess.num_drafts == 4
    assert guess.token_ids == ((9, 10, 11, 12) if method == "counting" else ())
    assert guesser.launched(step, [guess])[7] == (method, 4)


def test_what_a_step_guesses_itself_is_left_alone() -> None:
    guesser = Guesser()
    guesser.unseen = unseen = UnseenDrafts("eagle3", "a head", lambda num_streams, num_drafts: 0.0)
    request = Request("r", PROMPT, SamplingParams(max_tokens=4096))
    first = Step(0, joins=(RowJoin(7, request),), prefills=(PrefillChunk(7, 0, PROMPT, samples=True),))
    guesser.update(first)
    for _ in range(20):
        unseen.learn(7, 4, [5] * 5)
    step = Step(1, decodes=(DecodeSlot(7, 3, Drafts(2, (8, 9), 3)),), draft_costs=COSTS)
    guesser.update(step)
    assert guesser.guesses(step, WIDTHS)[0].token_ids == (8, 9)
