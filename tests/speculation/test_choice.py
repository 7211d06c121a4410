"""The drafts that are computed against every other choice, and the room for them."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import Sequence
from twostroke.core.speculation import NO_DRAFTS, SpeculationParams
from twostroke.core.step import NO_COSTS, DraftCosts
from twostroke.speculation.budget import DraftBudget
from twostroke.speculation.choice import LEAST_GAIN, best_rate, drafts_of_one_width, drafts_that_pay

CHANCES = st.lists(st.lists(st.floats(0.0, 1.0), max_size=4), min_size=1, max_size=3)


def falling(chances):
    return [list(itertools.accumulate(stream, lambda one, other: one * other)) for stream in chances]


@settings(max_examples=200, deadline=None)
@given(CHANCES, st.lists(st.floats(0.5, 6.0), min_size=13, max_size=13), st.integers(0, 3), st.floats(0.0, 4.0))
def test_no_other_choice_promises_more_tokens_a_second(chances, seconds, others, drafting_s):
    survivals, costs = falling(chances), DraftCosts(tuple(range(13)), tuple(seconds))
    num_slots = len(survivals) + others

    def rate(counts, extra_s=0.0):
        expected = num_slots + sum(sum(stream[:count]) for stream, count in zip(survivals, counts, strict=True))
        return expected / (seconds[sum(counts)] + extra_s)

    every = list(itertools.product(*(range(len(stream) + 1) for stream in survivals)))
    none = tuple(0 for _ in survivals)
    chosen = drafts_that_pay(survivals, num_slots, costs)
    best = max(map(rate, every))
    if best > LEAST_GAIN * rate(none) * (1 + 1e-9):
        assert rate(chosen) == pytest.approx(best)
    else:
        assert tuple(chosen) == none or best == pytest.approx(LEAST_GAIN * rate(none))
    promised = best_rate(survivals, num_slots, costs, drafting_s)
    with_time = max(rate(counts, drafting_s) for counts in every)
    plain = rate(none, drafting_s)
    assert promised == pytest.approx(with_time if with_time > LEAST_GAIN * plain else plain, rel=LEAST_GAIN - 1 + 1e-9)


def test_all_are_computed_where_nothing_is_known_of_their_cost():
    assert drafts_that_pay([[0.5, 0.1], []], 2, DraftCosts((0,), (0.0,))) == [2, 0]


def stream(seq_id, position=100, room=1000, speculation=None):
    sampling = SamplingParams(max_tokens=room, speculation=speculation)
    request = Request(str(seq_id), tuple(range(position)), sampling)
    sequence = Sequence(seq_id, request, sample_index=0, max_total_tokens=position + room)
    sequence.num_computed = position
    return sequence


def linear(a_step_s, a_row_s):
    return lambda work: a_step_s + a_row_s * work.num_tokens


@pytest.mark.parametrize(("a_row_s", "most"), [(0.0, 8), (0.1, 8), (20.0, 0)])
def test_room_is_given_where_drafts_that_all_hold_would_pay(a_row_s, most):
    budget = DraftBudget(linear(1.0, a_row_s), 8, ["suffix"])
    running = [stream(0), stream(1)]
    budget.begin(running)
    for sequence in running:
        drafts = budget.drafts(sequence, 100)
        assert (0 if drafts is None else drafts.most) == most


def test_many_streams_get_less_and_then_nothing():
    """A machine on which 16 rows take as long as one, and each further row as long as a sixteenth of that."""
    budget = DraftBudget(lambda work: max(1.0, work.num_tokens / 16), 32, ["suffix"])
    room = {}
    for count in (1, 4, 8, 15, 16, 32):
        running = [stream(number) for number in range(count)]
        budget.begin(running)
        drafts = budget.drafts(running[0], 100)
        room[count] = 0 if drafts is None else drafts.most
    assert room == {1: 15, 4: 3, 8: 1, 15: 0, 16: 0, 32: 0}


def test_requests_say_how_much_they_want():
    budget = DraftBudget(linear(1.0, 0.0), 8, ["suffix"])
    budget.begin([stream(0)])

    def given_room(speculation):
        drafts = budget.drafts(stream(0, speculation=speculation), 100)
        return None if drafts is None else drafts.most

    assert given_room(None) == 8
    assert given_room(SpeculationParams(max_drafts=3)) == 3
    assert given_room(SpeculationParams(method="suffix")) == 8
    assert given_room(SpeculationParams(method="other")) is None
    assert given_room(NO_DRAFTS) is None
    assert budget.drafts(stream(0), 2).most == 2


def test_the_end_of_an_answer_leaves_room_to_launch_ahead():
    """Whatever is left of an answer, the next step still finds a position behind the most that this one may bring."""
    budget = DraftBudget(linear(1.0, 0.0), 32, ["suffix"])
    for room in range(2, 80):
        sequence = stream(0, room=room)
        budget.begin([sequence])
        drafts = budget.drafts(sequence, max(1, room - 2))
        taken = 0 if drafts is None else drafts.most
        assert taken == min(32, room // 2 - 1)
        assert not taken or sequence.next_position + 1 + taken + 1 < sequence.max_total_tokens


@given(st.integers(1, 200), st.integers(1, 32))
def test_the_curve_holds_every_number_that_may_be_asked_for(num_streams, max_drafts):
    budget = DraftBudget(linear(1.0, 0.01), max_drafts, ["suffix"])
    budget.begin([stream(number) for number in range(num_streams)])
    counts, seconds = budget.costs()
    most = num_streams * max_drafts
    assert counts[0] == 0 and counts[-1] == most
    assert list(counts) == sorted(set(counts))
    assert seconds[-1] == pytest.approx(1.0 + 0.01 * (num_streams + most))


def test_of_one_width_all_slots_pay_for_the_widest() -> None:
    """One stream of four has good drafts: with four of them the step is best, though the others gain nothing by it."""
    costs = DraftCosts((0, 4, 16, 28), (1.0, 1.02, 1.1, 2.0))
    sure, nothing = [0.9] * 7, [0.05]
    assert drafts_of_one_width([sure, nothing, nothing, nothing], 4, costs, [1, 4, 7]) == [4, 1, 1, 1]
    assert drafts_of_one_width([nothing] * 4, 4, costs, [1, 4, 7]) == [0] * 4
    assert drafts_of_one_width([sure], 1, NO_COSTS, [1, 4, 7]) == [7], "nothing is known of the costs"
    assert drafts_of_one_width([sure], 1, costs, []) == [0]
