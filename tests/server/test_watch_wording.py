"""What a page is told of a step, beside what the end of a request says of the same step."""

from __future__ import annotations

import pytest

from tests.server.test_phases import FACTS
from twostroke.core.events import TokenEvent
from twostroke.core.sequence import FinishReason
from twostroke.core.step_record import ChunkRecord, StepRecord, StepTotals
from twostroke.core.timing import SequenceTiming
from twostroke.cost.floor import StepWork, step_bytes_read, step_multiply_adds
from twostroke.cost.step_cost import StepCost
from twostroke.explain.account import start_account
from twostroke.explain.facts import Yardstick
from twostroke.server import watch_events as w
from twostroke.server.watch_wording import ended, with_intensity

BEGAN_S, DONE_S = 10.0, 10.5
OWN, OTHER, CONTEXT = 24, 16, 12
FITTED = StepCost(FACTS.engine.shape, FACTS.engine.ceilings)


def told(chunks: list[w.Chunk], slots: list[w.Slot], cost: StepCost | None) -> w.Stepped:
    step = w.Stepped(1, BEGAN_S, DONE_S, DONE_S - BEGAN_S, 0.0, None, chunks, slots, [], 0, 1 + len(slots))
    return with_intensity(step, FACTS.engine, cost)


@pytest.mark.parametrize("cost", [None, FITTED], ids=["floors", "fitted"])
@pytest.mark.parametrize("others", [[], [(2, 0, OTHER, OTHER)]], ids=["no other prompt", "another prompt"])
@pytest.mark.parametrize("streams", [1, 3])
def test_a_chunks_share_is_what_the_end_will_say(cost: StepCost | None, others: list[w.Chunk], streams: int) -> None:
    step = told([(1, 0, OWN, OWN), *others], [(10 + r, CONTEXT, 0, 0) for r in range(streams)], cost)
    tokens = OWN + sum(count for _, _, count, _ in others)
    record = StepRecord(
        BEGAN_S, DONE_S, DONE_S - BEGAN_S, tokens, 1 + len(others), streams, streams * CONTEXT, StepTotals(steps=1)
    )
    timing = SequenceTiming(
        arrival_s=9.0,
        scheduled_s=BEGAN_S,
        token_times_s=[DONE_S],
        prompt_tokens=OWN,
        chunks=[ChunkRecord(0, OWN, record)],
    )
    account = start_account(timing, FACTS.engine, Yardstick(FACTS.engine, cost))
    assert account is not None and account.beside_s > 0.0
    assert len(step.chunk_shares) == 1 + len(others)
    assert (1.0 - step.chunk_shares[0]) * (DONE_S - BEGAN_S) == pytest.approx(account.beside_s, abs=1e-4)


def test_what_shares_no_step_has_no_share_to_tell() -> None:
    assert told([(1, 0, OWN, OWN)], [], None).chunk_shares == []
    assert told([], [(10, CONTEXT, 0, 0), (11, CONTEXT, 0, 0)], None).chunk_shares == []


@pytest.mark.parametrize("cost", [None, FITTED], ids=["floors", "fitted"])
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_phase_alone_has_all_of_the_steps_time(cost: StepCost | None, drafts: int) -> None:
    step = told([], [(10, CONTEXT, 0, 0), (11, CONTEXT, drafts, 0)], cost)
    work = StepWork(contexts=(CONTEXT, CONTEXT + drafts), queries=(1, 1 + drafts))
    flops = 2 * step_multiply_adds(FACTS.engine.shape, work)
    intensity = flops / step_bytes_read(FACTS.engine.shape, work)
    assert step.split is None and step.intensity.prefill is None
    assert step.intensity.decode == pytest.approx((intensity, flops / (DONE_S - BEGAN_S)), rel=1e-3)


def test_an_end_is_not_before_the_step_that_brought_it() -> None:
    """Steps are told to microseconds: a page that looks at an end sees its last step."""
    done_s = 1614.781424744
    timing = SequenceTiming(arrival_s=9.0, token_times_s=[done_s], finished_s=done_s, prompt_tokens=4)
    event = TokenEvent("a", 0, (1,), "", finish_reason=FinishReason.LENGTH, timing=timing)
    told_end = ended(1, event, FACTS, None, None)
    assert told_end.at_s == told_end.token_times_s[-1] == round(done_s, 6) > done_s
