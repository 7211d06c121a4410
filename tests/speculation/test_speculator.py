"""The policy at work: whose guesses are computed, for which streams."""

from tests.speculation.scripted import Scripted, begun, turn
from twostroke.core.request import Request
from twostroke.core.speculation import NO_DRAFTS, SpeculationParams
from twostroke.core.step import DecodeSlot, DraftCosts, Drafts, RowJoin, Step
from twostroke.speculation.acceptance import Acceptance
from twostroke.speculation.ngram import NgramDrafter
from twostroke.speculation.speculator import MAX_REST, Speculator
from twostroke.speculation.suffix import SuffixDrafter


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
