"""The policy at work: whose guesses are computed, who is asked, and what becomes of one that is slow or broken."""

import random

import pytest

from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.speculation import NO_DRAFTS, SpeculationParams
from twostroke.core.step import DecodeSlot, DraftCosts, Drafts, RowJoin, Step
from twostroke.speculation import speculator as speculator_module
from twostroke.speculation.acceptance import Acceptance
from twostroke.speculation.draft_time import DraftTime
from twostroke.speculation.drafter import Proposal
from twostroke.speculation.ngram import NgramDrafter
from twostroke.speculation.speculator import MAX_REST, Speculator
from twostroke.speculation.suffix import SuffixDrafter
from twostroke.speculation.turn import MAX_FAULTS, TRIAL_TOKENS

FREE = DraftCosts((0, 64), (1.0, 1.0))
"""Rows cost nothing beside the first."""
DEAR = DraftCosts((0, 1), (1.0, 2.0))


class Clock:
    """Time passes only where a drafter says so."""

    def __init__(self, monkeypatch):
        self.now_s = 0.0
        monkeypatch.setattr(speculator_module.time, "perf_counter", lambda: self.now_s)


class Scripted:
    """Drafts `tokens`, with `chance` each; takes its time on the clock."""

    def __init__(self, tokens=(1, 2, 3, 4), chance=0.9, name="scripted", clock=None, asked_s=0.0, token_s=0.0):
        self.name, self.tokens, self.chance = name, tokens, chance
        self.clock, self.asked_s, self.token_s = clock, asked_s, token_s
        self.asks, self.told, self.open_rows = [], [], set()

    def open(self, seq_id, request, token_ids):
        self.open_rows.add(seq_id)

    def extend(self, seq_id, token_ids):
        assert seq_id in self.open_rows
        self.told.append((seq_id, tuple(token_ids)))

    def propose(self, asks):
        self.asks.append(asks)
        found = [Proposal(self.tokens[:most], (self.chance,) * len(self.tokens[:most])) for _, most in asks]
        if self.clock is not None:
            self.clock.now_s += self.asked_s + self.token_s * max(len(one.token_ids) for one in found)
        return found

    def close(self, seq_id):
        self.open_rows.discard(seq_id)


def begun(*drafters, rows=1, speculation=None):
    speculator = Speculator(drafters, vocab_size=1000)
    sampling = SamplingParams(speculation=speculation)
    joins = tuple(RowJoin(row, Request(str(row), (5, 6, 7), sampling)) for row in range(rows))
    speculator.update(Step(0, joins=joins))
    return speculator


def turn(speculator, came, costs=FREE, most=4, rows=1):
    """One step: what is computed for row 0, and then `came` comes for every row."""
    step = Step(1, decodes=tuple(DecodeSlot(row, 9, Drafts(most)) for row in range(rows)), draft_costs=costs)
    speculator.update(step)
    drafts = dict(speculator.draft(step))
    told = [speculator.settle(row, came) for row in range(rows)]
    return drafts.get(0), told[0]


def test_guesses_that_hold_are_computed_and_those_that_do_not_stop():
    drafter = Scripted()
    speculator = begun(drafter)
    for _ in range(5):
        draft, told = turn(speculator, [1, 2, 3, 4, 9])
    assert draft.token_ids == (1, 2, 3, 4)
    assert told == ("scripted", 4)
    assert drafter.told[-1] == (0, (1, 2, 3, 4, 9))
    dear = DraftCosts((0, 1, 2, 4), (1.0, 1.3, 1.6, 2.2))
    for _ in range(12):
        draft, told = turn(speculator, [8], costs=dear)
    assert (draft, told) == (None, None)


def test_a_stream_returns_without_a_draft_computed():
    """Guesses are held against what came, whether or not they were computed: exploring costs nothing."""
    dear = DraftCosts((0, 1, 2, 4), (1.0, 1.4, 1.8, 2.6))
    speculator = begun(Scripted())
    for _ in range(80):
        draft, _ = turn(speculator, [8], costs=dear)
    assert draft is None
    num_plain = 0
    while turn(speculator, [1], costs=dear)[0] is None:
        num_plain += 1
        assert num_plain < 200
    assert num_plain > 0


def test_a_stream_that_nothing_is_known_of_is_asked_about_less_and_less_and_then_at_once_again():
    drafter = Scripted(tokens=())
    speculator = begun(drafter)
    for _ in range(800):
        turn(speculator, [8])
    assert 95 < len(drafter.asks) < 120
    drafter.tokens, waited = (1, 2, 3, 4), 0
    while turn(speculator, [1, 2, 3, 4, 9])[0] is None:
        waited += 1
    assert waited <= MAX_REST
    asked = len(drafter.asks)
    for _ in range(20):
        assert turn(speculator, [1, 2, 3, 4, 9])[0] is not None
    assert len(drafter.asks) == asked + 20


def test_streams_are_judged_by_themselves():
    speculator = begun(Scripted(), rows=2)
    costs = DraftCosts((0, 1, 2, 4, 8), (1.0, 1.2, 1.4, 1.8, 2.6))
    for _ in range(20):
        step = Step(1, decodes=tuple(DecodeSlot(row, 9, Drafts(4)) for row in range(2)), draft_costs=costs)
        speculator.update(step)
        drafts = dict(speculator.draft(step))
        speculator.settle(0, [1, 2, 3, 4, 9])
        speculator.settle(1, [8])
    assert len(drafts[0].token_ids) == 4
    assert 1 not in drafts


def test_the_better_of_two_drafters_is_believed():
    speculator = begun(Scripted((1, 2), 0.9, "boasts"), Scripted((3, 4), 0.6, "knows"))
    for _ in range(12):
        draft, _ = turn(speculator, [3, 4, 9])
    assert (draft.method, draft.token_ids) == ("knows", (3, 4))


def test_nobody_is_asked_without_room_or_by_those_who_want_nothing():
    drafter = Scripted()
    speculator = begun(drafter)
    speculator.update(Step(1))
    assert speculator.draft(Step(1, decodes=(DecodeSlot(0, 9),))) == {}
    off = Scripted()
    turn(begun(off, speculation=NO_DRAFTS), [1])
    other = Scripted(name="other")
    turn(begun(drafter, other, speculation=SpeculationParams(method="other")), [1])
    assert not drafter.asks
    assert not off.asks and not off.told and not off.open_rows, "it neither learns nor teaches"
    assert other.asks and other.told


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


def test_what_is_behind_a_failure_or_an_end_teaches_nothing():
    """Of drafts that ended with the answer, those behind its end have neither held nor failed."""
    acceptance, other = Acceptance(), Acceptance()
    for one in (acceptance, other):
        one.open(0)
    for _ in range(20):
        acceptance.learn(0, (1, 2, 3, 4), (0.9,) * 4, [1, 2])
        other.learn(0, (1, 2), (0.9,) * 2, [1, 2])
    assert acceptance.survivals(0, (0.9,) * 4) == other.survivals(0, (0.9,) * 4)
    assert acceptance.survivals(0, (0.9,))[0] > 0.9
    for _ in range(20):
        acceptance.learn(0, (1, 2, 3, 4), (0.9,) * 4, [7])
    assert acceptance.survivals(0, (0.9,))[0] < 0.2


def test_positions_are_told_apart():
    acceptance = Acceptance()
    for row in range(40):
        acceptance.open(row)
        acceptance.learn(row, (1, 2, 3), (0.8,) * 3, [1, 2, 9])
    acceptance.open(99)
    first, second, third = acceptance.survivals(99, (0.8,) * 3)
    assert first > 0.75 and second / first > 0.75 and third / second < 0.3
    usual = acceptance.usual_survivals(99, 20)
    assert len(usual) == 20
    assert usual == sorted(usual, reverse=True)
    assert usual[1] > 0.6 > 0.3 > usual[2] / usual[1]


class Raises(Scripted):
    def __init__(self, where):
        super().__init__()
        setattr(self, where, self.fail)
        self.num_calls = 0

    def fail(self, *_):
        self.num_calls += 1
        raise RuntimeError(f"broken {self.num_calls}")


@pytest.mark.parametrize("where", ["open", "extend", "propose", "close"])
def test_one_that_raises_loses_its_turn_and_then_all_turns(where):
    broken, sound = Raises(where), Scripted(name="sound")
    speculator = begun(broken, sound, rows=4)
    for _ in range(10):
        draft, told = turn(speculator, [1, 2, 3, 4, 9], rows=4)
    for row in range(4):
        speculator.update(Step(2, leaves=(row,)))
    assert told == (draft.method, 4)
    assert 1 <= broken.num_calls <= MAX_FAULTS
    told = ["the drafter scripted failed: RuntimeError: broken 1", "the drafter scripted is asked no more"]
    assert speculator.faults == told[: 1 + (broken.num_calls == MAX_FAULTS)]
    assert not sound.open_rows


def test_one_that_fails_for_one_stream_goes_on_for_others():
    class FailsOnce(Scripted):
        def extend(self, seq_id, token_ids):
            if seq_id == 1:
                raise ValueError("no such row")
            super().extend(seq_id, token_ids)

    drafter = FailsOnce()
    speculator = begun(drafter, rows=3)
    for _ in range(10):
        turn(speculator, [1, 2, 3, 4, 9], rows=3)
    assert [ask.seq_id for ask in drafter.asks[-1]] == [0, 2]
    assert drafter.open_rows == {0, 2}
    assert speculator.faults == ["the drafter scripted failed: ValueError: no such row"]


RUBBISH = [
    None,
    "text",
    [],
    [None],
    [Proposal((5000,), (0.9,))],
    [Proposal((-1,), (0.9,))],
    [Proposal((1,), (float("nan"),))],
    [Proposal((1,), (2.0,))],
    [Proposal((1, 2), (0.9,))],
    [Proposal(("a",), (0.9,))],
    [Proposal((1.0,), (0.9,))],
    [7],
    [Proposal((1,), (0.9,))] * 2,
    {0: (1,)},
]


@pytest.mark.parametrize("rubbish", RUBBISH, ids=repr)
def test_rubbish_is_never_computed(rubbish):
    drafter = Scripted()
    asked = []
    drafter.propose = lambda asks: asked.append(asks) or rubbish
    speculator = begun(drafter)
    for _ in range(6):
        assert turn(speculator, [9]) == (None, None)
    if rubbish is not None:
        assert len(asked) == MAX_FAULTS
        assert speculator.faults


def test_more_than_was_asked_for_is_cut():
    drafter = Scripted()
    drafter.propose = lambda asks: [Proposal((1, 2, 3, 4), (0.9,) * 4)]
    speculator = begun(drafter)
    draft, _ = turn(speculator, [1, 2, 9], most=2)
    assert draft.token_ids == (1, 2)


def test_a_row_that_returns_begins_anew():
    """A preempted row closes and opens with what it has written; rows of a step that raised leave nothing behind."""
    drafter = SuffixDrafter()
    speculator = Speculator([drafter], vocab_size=1000)
    request = Request("a", tuple(range(30)))
    speculator.update(Step(0, joins=(RowJoin(0, request),)))
    turn(speculator, [500])
    speculator.update(Step(1, leaves=(0,), joins=(RowJoin(0, request, 0, (500,)),)))
    for token in range(5, 15):
        speculator.settle(0, [token])
    draft, _ = turn(speculator, [900])
    assert not speculator.faults
    assert draft.token_ids[:2] == (15, 16)


def test_one_that_finds_nothing_more_is_asked_where_it_is_named():
    """`suffix` looks wherever `ngram` does: of an engine that has both, the first alone is asked by default."""
    for named, asked in ((None, "suffix"), ("suffix", "suffix"), ("ngram", "ngram")):
        speculator = begun(SuffixDrafter(), NgramDrafter(), speculation=SpeculationParams(named))
        for token in (5, 6, 7, 5, 6):
            speculator.settle(0, [token])
        methods = {turn(speculator, [7, 5, 6])[1].method for _ in range(4)}
        assert methods == {asked}


class Computing(Scripted):
    """One that computes, from a file; it can say something only if it was asked in the step before, or lately."""

    source = "a head"
    patience = 10**9

    def __init__(self, **named):
        super().__init__(**named)
        self.num_unasked, self.is_behind = 0, False

    def begin(self, step):
        self.num_unasked += 1

    def follow(self, done):
        self.is_behind = self.num_unasked > self.patience

    def propose(self, asks):
        found = super().propose(asks)
        self.num_unasked = 0
        return [Proposal((), ()) for _ in asks] if self.is_behind else found

    def seconds(self, num_streams, num_drafts):
        return self.asked_s + num_drafts * self.token_s


DRAFTS_COST = DraftCosts((0, 4), (1.0, 1.2))


def followed(speculator, came, most=4):
    """One step of row 0, followed by those that compute; whether drafts were computed."""
    step = Step(1, decodes=(DecodeSlot(0, 9, Drafts(most)),), draft_costs=DRAFTS_COST)
    speculator.update(step, done=object())
    is_drafted = bool(speculator.draft(step))
    speculator.settle(0, came)
    return is_drafted


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


def test_one_that_fell_behind_while_it_sat_out_is_asked_twice(monkeypatch):
    clock = Clock(monkeypatch)
    drafter = Computing(clock=clock, token_s=0.3)
    drafter.patience = 20
    speculator = begun(drafter)
    for _ in range(5000):
        followed(speculator, [8])
    assert speculator.doubts, "its guesses came, though it was behind at most trials"
    waited = 0
    while not followed(speculator, [1, 2, 3, 4, 9]):
        drafter.token_s = 0.03  # meanwhile it pays
        waited += 1
        assert waited < 5000
