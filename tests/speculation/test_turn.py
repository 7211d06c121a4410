"""Who is asked, how often and for how much, where drafters take time."""

import random

import pytest

from tests.speculation.scripted import Clock, Computing, Scripted, begun, followed, turn
from twostroke.core.step import DraftCosts
from twostroke.speculation.draft_time import DraftTime
from twostroke.speculation.turn import FOLLOWED_OUT, TRIAL_SHARE, TRIAL_TOKENS


def test_a_drafters_time_counts(monkeypatch):
    """Two that are always right. One takes a tenth of a step a token and is asked for what pays with that; the other
    takes four steps and is hardly ever asked."""
    clock = Clock(monkeypatch)
    quick = Scripted((1,) * 16, 0.95, clock=clock, token_s=0.1)
    speculator = begun(quick)
    costs = DraftCosts((0, 16), (1.0, 1.8))
    for _ in range(40):
        draft, _ = turn(speculator, [1] * 17, costs=costs, most=16)
    assert len(draft.token_ids) == 16
    slow = Scripted((1,) * 16, 0.95, clock=clock, asked_s=30.0)
    speculator = begun(slow)
    for _ in range(2000):
        turn(speculator, [1], costs=costs, most=16)
    assert len(slow.asks) <= 5


def test_trials_of_a_drafter_that_is_never_right_take_little_time(monkeypatch):
    """Half a step for each token, all in vain: of all time, little goes into asking."""
    clock = Clock(monkeypatch)
    vain = Scripted((1,) * 8, 0.9, clock=clock, token_s=0.5)
    speculator = begun(vain)
    steps = 5000
    for _ in range(steps):
        turn(speculator, [8], costs=DraftCosts((0, 8), (1.0, 1.2)), most=8)
    assert clock.now_s < 0.02 * steps
    assert all(ask.most <= TRIAL_TOKENS for asks in vain.asks[20:] for ask in asks)
    vain.tokens, asked = (8,) * 8, len(vain.asks)
    for _ in range(2000):
        turn(speculator, [8] * 9, costs=DraftCosts((0, 8), (1.0, 1.2)), most=8)
    assert len(vain.asks) > asked + 500, "one that turns out right is asked again"


def test_a_costly_drafter_is_not_asked_where_a_cheap_one_is_sure(monkeypatch):
    clock = Clock(monkeypatch)
    cheap, costly = Scripted(name="cheap"), Scripted(name="costly", clock=clock, token_s=0.3)
    speculator = begun(cheap, costly)
    for _ in range(300):
        draft, _ = turn(speculator, [1, 2, 3, 4, 9])
    assert draft.method == "cheap"
    assert len(costly.asks) < 12


def test_draft_time_is_a_line_through_what_was_seen():
    time, draw = DraftTime(), random.Random(0)
    time.observe(4, 50.0)  # everything is made ready
    for _ in range(60):
        tokens = draw.randint(1, 8)
        time.observe(tokens, (0.5 + 0.25 * tokens) * draw.uniform(0.95, 1.05))
    for tokens in (1, 4, 8, 16):
        assert time.seconds(tokens) == pytest.approx(0.5 + 0.25 * tokens, rel=0.2)
    time.observe(4, 1000.0)  # something else held it up
    assert time.seconds(4) < 5.0
    alike = DraftTime()
    for _ in range(5):
        alike.observe(4, 2.0)
    assert (alike.seconds(4), alike.seconds(2)) == (pytest.approx(2.0), pytest.approx(1.0))


@pytest.mark.parametrize("token_s", [0.03, 0.3, 2.0])
def test_a_drafter_of_another_model_is_noticed_while_it_sits_out(monkeypatch, token_s):
    clock = Clock(monkeypatch)
    drafter = Computing(clock=clock, token_s=token_s)
    speculator = begun(drafter)
    num_steps = 0
    while not speculator.doubts:
        followed(speculator, [8])
        num_steps += 1
        assert num_steps < 50 * (3 + 100 * TRIAL_TOKENS * token_s)
    assert speculator.doubts == [
        "a head hardly ever guesses right (0 of 40 first drafts): it was most likely made for another model"
    ]
    assert num_steps > 100, "it sat most of them out"
    assert clock.now_s < 0.02 * num_steps + 10 * token_s * TRIAL_TOKENS, "and took next to no time"
    for _ in range(2000):
        followed(speculator, [8])
    assert len(speculator.doubts) == 1


def test_one_that_is_behind_when_it_is_tried_is_asked_twice(monkeypatch):
    """It followed nothing while it sat out."""
    clock = Clock(monkeypatch)
    drafter = Computing(clock=clock, token_s=0.3)
    speculator = begun(drafter)
    for _ in range(5000):
        followed(speculator, [8])
    assert speculator.doubts, "its guesses came, though it was behind at each trial"
    waited = 0
    while not followed(speculator, [1, 2, 3, 4, 9]):
        drafter.token_s = 0.03  # meanwhile it pays
        waited += 1
        assert waited < 5000


@pytest.mark.parametrize("right_every", [1_000_000, 50], ids=["never right", "seldom right"])
@pytest.mark.parametrize(("token_s", "follow_s"), [(0.004, 0.02), (0.03, 0.01), (0.07, 0.02), (0.3, 0.05), (3.0, 0.5)])
def test_a_head_that_does_not_pay_takes_one_part_in_a_hundred(monkeypatch, token_s, follow_s, right_every):
    """Its guesses and what it does to keep up with a stream, together; a plain step takes a second."""
    clock = Clock(monkeypatch)
    speculator = begun(Computing(clock=clock, token_s=token_s, follow_s=follow_s))

    def taken_s(num_steps):
        before_s = clock.now_s
        for step in range(num_steps):
            followed(speculator, [8] if step % right_every else [1, 8])
        return clock.now_s - before_s

    taken_s(500)  # it is given up
    a_trial_s = TRIAL_TOKENS * token_s + (FOLLOWED_OUT + 2) * follow_s
    assert 0.0 < taken_s(6000) <= TRIAL_SHARE * 6000 + a_trial_s
