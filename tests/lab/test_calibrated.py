"""Predictions are those of a calibration: stored, taken on the spot, or none at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.cost.calibration import Calibration, write_calibration
from twostroke.cost.floor import StepWork
from twostroke.cost.step_cost import Coefficients
from twostroke.engine.build import Assembly
from twostroke.lab.calibrated import calibrated_prediction
from twostroke.lab.prediction import decode_steps, prefill_steps

WORKS = (StepWork(contexts=[40]), StepWork(((0, 64),), 1), StepWork(((64, 32),), 0, [100, 200]))


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))


def test_without_time_for_one_there_are_floors(tiny: Assembly) -> None:
    prediction = calibrated_prediction(tiny, 0.0, print)
    assert not prediction.is_calibrated and prediction.name == "floor"
    assert all(prediction.step_s(work) == prediction.floor_s(work) for work in WORKS)


def test_one_is_taken_where_none_is_stored(tiny: Assembly) -> None:
    told: list[str] = []
    prediction = calibrated_prediction(tiny, 0.3, told.append)
    assert prediction.is_calibrated and told == ["calibrating the cost model"]
    assert "taken before the first experiment" in prediction.origin
    assert all(prediction.step_s(work) > 0.0 for work in WORKS)
    assert not tiny.preparation.calibration_path.exists(), "the lab stores nothing"


def test_a_stored_one_is_taken_as_it_is(tiny: Assembly) -> None:
    host_s = 0.5
    stored = Calibration(
        tiny.ceilings(), Coefficients(), host_s, 0.07, 12, "one day", newcomer_s=0.25, newcomer_s_per_token=0.001
    )
    write_calibration(tiny.preparation.calibration_path, stored)
    prediction = calibrated_prediction(tiny, 1e9, lambda text: pytest.fail("measured although one is stored"))
    cost = stored.step_cost(tiny.shape)
    assert all(prediction.step_s(work) == cost.seconds(work) + host_s for work in WORKS)
    # A prompt read alone in two steps came to an idle engine; a chunk beside streams did not, nor do decodes.
    prompt = prefill_steps(100, 60)
    steps_s = sum(map(prediction.step_s, prompt))
    assert prediction.steps_s(prompt) == pytest.approx(steps_s + 0.25 + 0.1)
    assert prediction.steps_s(prompt * 2) == pytest.approx(2 * (steps_s + 0.35))
    others = [*prefill_steps(100, 60, contexts=[5]), *decode_steps(101, 3)]
    assert prediction.steps_s(others) == pytest.approx(sum(map(prediction.step_s, others)))
    assert "12 steps, one day, off by 7.0%" in prediction.origin
