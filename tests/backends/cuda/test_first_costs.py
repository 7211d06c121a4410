"""What an engine on a card expects of its first steps, beside what an H200 took (bench/results/cuda-turns.txt)."""

from __future__ import annotations

import pytest
from tests.backends.cuda.test_planned_copies import SHAPES, planned_on

from twostroke.backends.cuda import FACTORY
from twostroke.cost.floor import StepWork
from twostroke.cost.hardware import Ceilings
from twostroke.cost.step_cost import StepCost

MEASURED = Ceilings(4.3e12, 387e12, "what was measured on an H200")
ONE_STREAM, STREAMS = StepWork(contexts=(640,)), StepWork(contexts=(400,) * 32)
LONG_PROMPT = (StepWork(chunks=((0, 8192),)), StepWork(chunks=((8192, 8192),), num_sampling_chunks=1))


@pytest.mark.parametrize(
    "model, one_ms, streams_ms, prompt_ms",
    [
        ("llama-3.1-8b", 3.297, 3.921, 452.3),
        ("qwen3-0.6b", 0.651, 1.118, 79.3),
        ("qwen3-30b-a3b", 2.606, 11.9, 345.8),
    ],
)
def test_first_steps_take_about_what_is_expected(
    model: str, one_ms: float, streams_ms: float, prompt_ms: float
) -> None:
    shape = planned_on(str(SHAPES / model), "h200").shape
    seconds = StepCost(shape, MEASURED, FACTORY.first_coefficients(shape)).seconds
    assert 1e3 * seconds(ONE_STREAM) == pytest.approx(one_ms, rel=0.15)
    assert 1e3 * seconds(STREAMS) == pytest.approx(streams_ms, rel=0.15)
    assert 1e3 * sum(map(seconds, LONG_PROMPT)) == pytest.approx(prompt_ms, rel=0.15)
