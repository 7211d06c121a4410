"""Drafts beside prompts: a newcomer is read as soon as if nobody drafted, whatever room the budget has for drafts."""

from __future__ import annotations

import pytest

from tests.scheduling.loop import Loop, layout, request
from twostroke.cost.floor import StepWork
from twostroke.speculation.budget import DraftBudget


def steps_to_first_token(num_streams: int, drafting: DraftBudget | None) -> int:
    """Of a prompt that comes while this many streams write."""
    loop = Loop(layout((None, 20_000)), depth=1, max_context=600, max_running=64, drafting=drafting, max_drafts=7)
    for number in range(num_streams):
        loop.add(request(f"stream-{number}", range(number, number + 8), max_tokens=500))
    for _ in range(8):
        loop.turn()
    loop.add(request("late", range(100, 500), max_tokens=4))
    for count in range(1, 60):
        if any(advance.sequence.request.request_id == "late" and advance.sampled for advance in loop.turn()):
            return count
    raise AssertionError("it was never read")


@pytest.mark.parametrize("num_streams", [1, 8, 16, 32])
def test_a_late_prompt_waits_for_no_drafts(num_streams: int) -> None:
    def seconds(work: StepWork) -> float:
        return 8e-3 + 3e-4 * work.num_tokens

    drafting = DraftBudget(seconds, 7, ["suffix"])
    assert steps_to_first_token(num_streams, drafting) == steps_to_first_token(num_streams, None)
