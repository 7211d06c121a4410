"""What a page is told of a step, beside what the end of a request says of the same step."""

from __future__ import annotations

import pytest

from tests.server.test_phases import FACTS
from twostroke.core.step_record import ChunkRecord, StepRecord, StepTotals
from twostroke.core.timing import SequenceTiming
from twostroke.cost.step_cost import StepCost
from twostroke.explain.account import start_account
from twostroke.explain.facts import Yardstick
from twostroke.server import watch_events as w
from twostroke.server.watch_wording import with_intensity

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
