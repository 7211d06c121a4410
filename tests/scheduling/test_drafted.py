"""What drafts did for each stream of a step, on numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from tests.scheduling.loop import layout, request
from twostroke.core.sequence import Sequence
from twostroke.core.step import DecodeSlot, DraftCosts, Drafted, Drafts, PrefillChunk, SampledToken, Step, StepResult
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.drafted import note_drafts
from twostroke.scheduling.plan import Drafting
from twostroke.scheduling.scheduler import Scheduler

COSTS = DraftCosts((0, 1, 2, 4), (1.0, 1.1, 1.2, 1.4))
TOKENS = tuple(map(SampledToken, (5, 6, 7, 8)))


def streams(count: int) -> dict[int, Sequence]:
    return {number: Sequence(number, request(f"r{number}", range(4)), 0, 100) for number in range(count)}


def step(num_slots: int, *, costs: DraftCosts = COSTS, chunk: bool = False) -> Step:
    prefills = (PrefillChunk(9, 0, (1, 2), samples=False),) if chunk else ()
    return Step(0, prefills, tuple(DecodeSlot(number, 9, Drafts(4)) for number in range(num_slots)), draft_costs=costs)


def test_a_held_draft_spares_a_step_and_all_pay_for_them() -> None:
    """Four drafts: the step took 2.8 s, of which the drafts were predicted to be 0.4 / 1.4; a plain one takes 2 s."""
    found = streams(2)
    result = StepResult(0, {0: TOKENS, 1: TOKENS[:1]}, compute_s=2.9, drafted={0: Drafted("ngram", 4)}, drafting_s=0.1)
    note_drafts(step(2), result, found)
    first, second = found[0].timing, found[1].timing
    assert (first.draft_steps, first.drafts_computed, first.drafts_held) == (1, 4, 3)
    assert (second.draft_steps, second.drafts_computed, second.drafts_held) == (0, 0, 0)
    assert first.speculation_gain_s == pytest.approx(3 * 2.0 - 0.8 - 0.1)
    assert second.speculation_gain_s == pytest.approx(-0.8 - 0.1)


def test_beside_a_prompt_predictions_are_taken_as_they_are() -> None:
    found = streams(1)
    result = StepResult(0, {0: TOKENS[:2]}, compute_s=50.0, drafted={0: Drafted("ngram", 1)})
    note_drafts(step(1, chunk=True), result, found)
    assert found[0].timing.speculation_gain_s == pytest.approx(1.0 - 0.1)


def test_looking_for_drafts_in_vain_is_a_loss() -> None:
    found = streams(1)
    note_drafts(step(1), StepResult(0, {0: TOKENS[:1]}, compute_s=1.0, drafting_s=0.25), found)
    assert found[0].timing.speculation_gain_s == pytest.approx(-0.25) and not found[0].timing.draft_steps


def test_where_nobody_knows_what_a_step_costs_nothing_is_claimed() -> None:
    found = streams(1)
    result = StepResult(0, {0: TOKENS}, compute_s=1.0, drafted={0: Drafted("ngram", 3)})
    note_drafts(step(1, costs=DraftCosts((0,), (0.0,))), result, found)
    timing = found[0].timing
    assert (timing.drafts_computed, timing.drafts_held, timing.speculation_gain_s) == (3, 3, 0.0)


def test_a_slot_that_failed_held_nothing() -> None:
    found = streams(1)
    note_drafts(step(1), StepResult(0, {}, compute_s=1.0, drafted={0: Drafted("ngram", 2)}), found)
    assert (found[0].timing.drafts_computed, found[0].timing.drafts_held) == (2, 0)


def test_a_step_that_wanted_no_drafts_costs_nothing_unless_somebody_worked_for_later_ones() -> None:
    found, plain = streams(1), Step(0, decodes=(DecodeSlot(0, 9),))
    note_drafts(plain, StepResult(0, {0: TOKENS[:1]}, compute_s=1.0, drafting_s=1e-5), found)
    assert found[0].timing.speculation_gain_s == 0.0
    note_drafts(plain, StepResult(0, {0: TOKENS[:1]}, compute_s=1.0, drafting_s=0.5), found)
    assert found[0].timing.speculation_gain_s == pytest.approx(-0.5)


class Costed(Drafting):
    """Room for three drafts always, at costs that are known."""

    def drafts(self, sequence: Sequence, most: int) -> Drafts | None:
        return Drafts(min(3, most)) if most > 0 else None

    def costs(self) -> DraftCosts:
        return COSTS


def test_drafts_that_held_behind_the_end_of_an_answer_gained_nothing() -> None:
    """The stop token is the second of four: one draft became a token, and two held for nobody."""
    scheduler = Scheduler(SchedulerConfig(max_context=100), layout((None, 32)), drafting=Costed(), max_drafts=4)
    stream = scheduler.add(request("r", range(4), eos=frozenset({6})))[0]
    first = scheduler.schedule(0.0)
    assert first is not None
    scheduler.apply(first, StepResult(first.step_id, {stream.seq_id: TOKENS[:1]}), 0.0)
    second = scheduler.schedule(1.0)
    assert second is not None and second.decodes[0].drafts is not None
    drafted = {stream.seq_id: Drafted("ngram", 3)}
    result = StepResult(second.step_id, {stream.seq_id: TOKENS}, compute_s=1.3, drafted=drafted)
    (advance,) = scheduler.apply(second, result, 2.0)
    timing = stream.timing
    assert advance.finished and [token.token_id for token in advance.sampled] == [5, 6]
    assert (timing.drafts_computed, timing.drafts_held) == (3, 1)
    assert timing.speculation_gain_s == pytest.approx(1.0 - 0.3)
