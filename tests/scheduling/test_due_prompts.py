"""Which prompts share a step where a first token was promised: nobody is late for the sake of whoever is read next,
unless too many wait behind."""

from __future__ import annotations

import pytest

from tests.scheduling.loop import Loop, layout
from tests.scheduling.test_pace import CEILINGS, LONG, SHAPE, add_prompts
from twostroke.core.service_level import DEFAULT_LEVEL, ServiceLevel, ServiceLevels
from twostroke.cost.floor import StepWork
from twostroke.cost.step_cost import Coefficients, StepCost
from twostroke.scheduling.pace import LOST_SHARE, PrefillPace

LAUNCHING = StepCost(SHAPE, CEILINGS, Coefficients(prefill_s=0.002))
"""A step that reads takes so much more, whatever it reads: two of them lose more than LOST_SHARE."""
ALONE_S = LAUNCHING.seconds(StepWork(((0, 5000),), 1))
TOGETHER_S = LAUNCHING.seconds(StepWork(((0, 5000), (0, 3192)), 2))
SHARED, APART = [[5000, 3192], [2308]], [[5000], [5500]]


def first_steps(ttft_s: float | None, lengths: list[int], num_steps: int = 2) -> list[list[int]]:
    """The chunks of the first steps, of prompts sent at once. The first step is chosen a second after they came."""
    levels = ServiceLevels((ServiceLevel(DEFAULT_LEVEL, ttft_s=None if ttft_s is None else 1.0 + ttft_s),))
    loop = Loop(
        layout((None, 20_000)),
        max_context=12_000,
        max_tokens_per_step=8192,
        max_running=64,
        pace=PrefillPace(LAUNCHING.seconds, 10.0),
        step_seconds=LAUNCHING.seconds,
        levels=levels,
    )
    add_prompts(loop, lengths)
    steps = [loop.move() for _ in range(num_steps)]
    return [[len(chunk.token_ids) for chunk in step.prefills] for step in steps if step is not None]


@pytest.mark.parametrize(
    ("ttft_s", "steps"),
    [
        (None, SHARED),
        (0.5 * ALONE_S, SHARED),  # it is late in any case
        (0.5 * (ALONE_S + TOGETHER_S), APART),
        (2.0 * TOGETHER_S, SHARED),  # it is in time in any case
    ],
)
def test_a_step_ends_with_a_prompt_that_the_next_one_would_make_late(
    ttft_s: float | None, steps: list[list[int]]
) -> None:
    own_s = LAUNCHING.seconds(StepWork(((0, 3192),), 1))
    assert ALONE_S + own_s - TOGETHER_S > LOST_SHARE * ALONE_S
    assert first_steps(ttft_s, [5000, 5500]) == steps


def test_a_long_line_is_not_held_up_for_one_that_would_be_late() -> None:
    """What a step of its own takes more, all who wait behind take more."""
    between_s = 0.5 * (ALONE_S + TOGETHER_S)
    few, many = (first_steps(between_s, [5000, *[5500] * count], 1) for count in (1, 40))
    assert few == [[5000]] and many == [[5000, 3192]]


def test_who_may_have_to_wait_for_a_step_in_flight_is_due_so_much_earlier() -> None:
    """In time alone, and in time together with the next one if it began at once: it may begin a step later."""
    room = PrefillPace(LAUNCHING.seconds, 10.0).open([], 2, LONG, LONG)
    room.take(0, 5000, samples=True)
    room.note_due(TOGETHER_S - 0.5 * ALONE_S, TOGETHER_S + 0.5 * ALONE_S)
    assert not room.goes_on(0, 3192, samples=True) and room.is_full
