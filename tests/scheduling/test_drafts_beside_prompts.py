"""Drafts beside prompts: a newcomer is read as soon as if nobody drafted, whatever room the budget has for drafts; and
what drafts in such steps would cost on a CPU, which is why there are none."""

from __future__ import annotations

import pytest

from tests.scheduling.loop import Loop, layout, request
from twostroke.cost.floor import StepWork
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import KVGroupShape, ModelShape
from twostroke.cost.step_cost import StepCost
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


SMOLLM2 = ModelShape(134_500_000, 106_200_000, 28_300_000, 143_000_000, 9, 64, (KVGroupShape(30, None, 23_040),))
A_CPU = StepCost(SMOLLM2, Ceilings(49e9, 113e9, "a test"))
STEP_TOKENS, CONTEXT = 256, 500


def a_step_s(num_streams: int, num_drafts: int, chunk_tokens: int) -> float:
    """Of streams with this many drafts each, beside a chunk."""
    queries = [1 + num_drafts] * num_streams
    chunks = ((0, chunk_tokens),) if chunk_tokens else ()
    return A_CPU.seconds(StepWork(chunks, contexts=[CONTEXT + num_drafts] * num_streams, queries=queries))


@pytest.mark.parametrize("num_streams", [1, 4, 16])
def test_beside_a_prompt_a_draft_costs_no_less_than_a_token_of_the_prompt(num_streams: int) -> None:
    """Arithmetic binds such a step, so nothing is idle that a draft could use. Every draft delays the newcomer."""
    chunk = STEP_TOKENS - 4 * num_streams
    a_prompt_token_s = (a_step_s(num_streams, 0, chunk) - a_step_s(num_streams, 0, chunk // 2)) / (chunk - chunk // 2)
    for num_drafts in (1, 3):
        more_s = a_step_s(num_streams, num_drafts, chunk) - a_step_s(num_streams, 0, chunk)
        assert more_s >= 0.98 * num_streams * num_drafts * a_prompt_token_s


@pytest.mark.parametrize("num_streams", [1, 4, 16])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_in_the_place_of_a_prompts_tokens_delay_its_first_token(num_streams: int, num_drafts: int) -> None:
    """By the share of the step that they take, whether they hold or not."""

    def first_token_s(num_drafts: int) -> float:
        chunk = STEP_TOKENS - (1 + num_drafts) * num_streams
        whole, rest = divmod(8 * STEP_TOKENS, chunk)
        return whole * a_step_s(num_streams, num_drafts, chunk) + a_step_s(num_streams, num_drafts, rest)

    least = 1 + 0.9 * num_drafts * num_streams / STEP_TOKENS
    assert first_token_s(num_drafts) >= least * first_token_s(0)
