"""Drafts that a device makes for itself: their number follows what held, the time they take, and what is asked."""

from __future__ import annotations

import pytest

from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.speculation import SpeculationParams
from twostroke.core.step import NO_COSTS, DecodeSlot, DraftCosts, Drafts
from twostroke.speculation.trust import FEW_TRIALS
from twostroke.speculation.turn import TRIAL_SHARE, TRIAL_TOKENS
from twostroke.speculation.unseen import UnseenDrafts

NUMBERS = (1, 2, 4, 7)
COSTS = DraftCosts((0, 4, 64), (0.010, 0.0105, 0.020))
A_DRAFT_S = 0.0005


def drafter(a_draft_s: float = A_DRAFT_S) -> UnseenDrafts:
    return UnseenDrafts("eagle3", "a head", lambda num_streams, num_drafts: a_draft_s * num_drafts)


def asked_with(speculation: SpeculationParams | None) -> Request:
    return Request("r", (1, 2), SamplingParams(speculation=speculation))


def slots(*mosts: int | None) -> list[DecodeSlot]:
    return [DecodeSlot(seq_id, 5, None if most is None else Drafts(most)) for seq_id, most in enumerate(mosts)]


def opened(count: int = 1, a_draft_s: float = A_DRAFT_S) -> UnseenDrafts:
    unseen = drafter(a_draft_s)
    for seq_id in range(count):
        unseen.open(seq_id, asked_with(None), (1, 2))
    return unseen


def test_drafts_that_hold_become_more_and_those_that_do_not_none() -> None:
    unseen = opened()
    for _ in range(50):
        count = unseen.counts(slots(7), 1, COSTS, NUMBERS)[0]
        unseen.learn(0, count, [5] * (count + 1))
    assert count == 7
    for _ in range(60):
        if count := unseen.counts(slots(7), 1, COSTS, NUMBERS).get(0, 0):
            unseen.learn(0, count, [5])
    assert unseen.counts(slots(7), 1, COSTS, NUMBERS) == {}


def test_one_that_sits_out_is_tried_again() -> None:
    unseen = opened()
    counts = []
    for _ in range(400):
        counts.append(unseen.counts(slots(7), 1, COSTS, NUMBERS).get(0, 0))
        unseen.learn(0, counts[-1], [5] if len(counts) < 100 else [5] * (counts[-1] + 1))
    assert 0 in counts[50:100]
    assert min(counts[-20:]) >= 4


def test_what_takes_too_long_is_not_made() -> None:
    dear = opened(a_draft_s=0.02)
    for _ in range(20):
        if count := dear.counts(slots(7), 1, COSTS, NUMBERS).get(0, 0):
            dear.learn(0, count, [5, 6])
    assert dear.counts(slots(7), 1, COSTS, NUMBERS) == {}


def test_numbers_are_those_of_a_width_within_each_slots_room() -> None:
    unseen = opened(3)
    for _ in range(30):
        for seq_id in range(3):
            unseen.learn(seq_id, 4, [5] * 5)
    assert unseen.counts(slots(5, 3, None), 3, NO_COSTS, NUMBERS) == {0: 5, 1: 3}
    assert unseen.counts(slots(7, 1, 7), 3, NO_COSTS, (1, 2)) == {0: 2, 1: 1, 2: 2}


def test_a_drafter_makes_so_many_and_reads_so_far() -> None:
    unseen = UnseenDrafts("medusa", "heads", lambda num_streams, num_drafts: 0.0, most=3, max_context=7)
    for seq_id in range(2):
        unseen.open(seq_id, asked_with(None), (1, 2))
        for _ in range(30):
            unseen.learn(seq_id, 3, [5] * 4)
    assert unseen.counts(slots(7, 2), 2, NO_COSTS, NUMBERS) == {0: 3, 1: 2}
    far = [DecodeSlot(0, 6, Drafts(7)), DecodeSlot(1, 7, Drafts(7))]
    assert unseen.counts(far, 2, NO_COSTS, NUMBERS) == {0: 3}


@pytest.mark.parametrize(
    ("speculation", "is_asked"),
    [
        (None, True),
        (SpeculationParams(max_drafts=3), True),
        (SpeculationParams(method="eagle3"), True),
        (SpeculationParams(method="ngram"), False),
        (SpeculationParams(method="off"), False),
        (SpeculationParams(max_drafts=0), False),
    ],
)
def test_requests_say_who_drafts(speculation: SpeculationParams | None, is_asked: bool) -> None:
    unseen = drafter()
    unseen.open(0, asked_with(speculation), (1, 2))
    assert bool(unseen.counts(slots(4), 1, NO_COSTS, NUMBERS)) == is_asked
    unseen.close(0)
    assert not unseen.counts(slots(4), 1, NO_COSTS, NUMBERS)


@pytest.mark.parametrize("a_draft_s", [0.0001, A_DRAFT_S, 0.01])
def test_a_head_that_is_never_right_is_doubted_soon(a_draft_s: float) -> None:
    """In every way that it is asked for one stream: what it costs decides how often, and it sits out most steps."""
    unseen = opened(a_draft_s=a_draft_s)
    steps_a_trial = max(4, int(TRIAL_TOKENS * a_draft_s / (TRIAL_SHARE * COSTS.with_drafts(0))) + 3)
    num_steps = num_asked = 0
    while unseen.doubt is None:
        num_steps += 1
        assert num_steps <= FEW_TRIALS * steps_a_trial
        count = unseen.counts(slots(7), 1, COSTS, NUMBERS).get(0, 0)
        num_asked += count > 0
        unseen.learn(0, count, [num_steps % 7])
    assert num_asked == FEW_TRIALS
    assert "a head hardly ever guesses right (0 of 40 first drafts)" in unseen.doubt
    for _ in range(9 * FEW_TRIALS * steps_a_trial):  # it is asked on, but less
        count = unseen.counts(slots(7), 1, COSTS, NUMBERS).get(0, 0)
        num_asked += count > 0
        unseen.learn(0, count, [3])
    assert FEW_TRIALS < num_asked < 9 * FEW_TRIALS


@pytest.mark.parametrize("a_draft_s", [0.0001, A_DRAFT_S, 0.01])
def test_a_head_that_does_not_pay_takes_one_part_in_a_hundred(a_draft_s: float) -> None:
    """What makes its drafts and what verifies them, together; also while it is not judged yet."""
    unseen, plain_s = opened(a_draft_s=a_draft_s), COSTS.with_drafts(0)

    def taken_s(num_steps: int) -> float:
        taken = 0.0
        for _ in range(num_steps):
            if count := unseen.counts(slots(7), 1, COSTS, NUMBERS).get(0, 0):
                taken += a_draft_s * count + COSTS.with_drafts(count) - plain_s
                unseen.learn(0, count, [3])
        return taken

    unseen.learn(0, 4, [5, 6])
    taken_s(100)  # it is given up
    a_trial_s = TRIAL_TOKENS * a_draft_s + COSTS.with_drafts(TRIAL_TOKENS) - plain_s
    assert 0.0 < taken_s(1500) <= TRIAL_SHARE * 1500 * plain_s + a_trial_s


def test_a_head_that_is_right_is_not_doubted_nor_one_that_guesses_noise() -> None:
    held = opened()
    for _ in range(500):
        held.learn(0, 4, [3, 4])
    assert held.doubt is None
    noisy = drafter()
    noisy.open(0, Request("r", (1, 2), SamplingParams(temperature=1.5)), (1, 2))
    for _ in range(500):
        noisy.learn(0, 4, [3])
    assert noisy.doubt is None
