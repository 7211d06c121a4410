from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cost.test_step_cost import CEILINGS, SHAPE

from twostroke.cost.calibration import Calibration, CalibrationKey, read_calibration, write_calibration
from twostroke.cost.floor import StepWork
from twostroke.cost.step_cost import Coefficients, StepCost

FOUND = Calibration(
    CEILINGS,
    Coefficients(weights=1.25),
    host_s=1e-4,
    error=0.07,
    num_steps=200,
    taken="today",
    newcomer_s=4e-4,
    newcomer_s_per_token=2e-7,
)
KEY = CalibrationKey("cpu", "some processor", 2, SHAPE, "0.1.0")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = KEY.path(tmp_path / "calibrations")
    assert read_calibration(path) is None
    write_calibration(path, FOUND)
    write_calibration(path, FOUND)
    assert read_calibration(path) == FOUND
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    work = StepWork(contexts=[100])
    assert FOUND.step_cost(SHAPE).seconds(work) == StepCost(SHAPE, CEILINGS, Coefficients(weights=1.25)).seconds(work)


def test_nothing_else_is_found_under_the_same_name(tmp_path: Path) -> None:
    others = [
        replace(KEY, backend="cuda"),
        replace(KEY, device="another"),
        replace(KEY, threads=4),
        replace(KEY, version="0.2.0"),
        replace(KEY, shape=replace(SHAPE, weight_bytes_per_step=1)),
    ]
    assert len({key.path(tmp_path) for key in (KEY, *others)}) == 6
    assert KEY.path(tmp_path) == replace(KEY).path(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "[" * 100_000,
        "\x00\xff",
        json.dumps({"ceilings": {}, "coefficients": {}}),
    ],
)
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(text)
    assert read_calibration(path) is None


@pytest.mark.parametrize(
    "change",
    [
        {"host_s": -1},
        {"error": float("nan")},
        {"num_steps": "many"},
        {"ceilings": [1]},
        {"newcomer_s": -1e-9},
        {"newcomer_s_per_token": float("inf")},
    ],
)
def test_unsound_numbers_are_as_good_as_none(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "one.json"
    write_calibration(path, FOUND)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert read_calibration(path) is None


def test_what_was_kept_before_newcomers_were_measured_still_counts(tmp_path: Path) -> None:
    path = tmp_path / "older.json"
    write_calibration(path, FOUND)
    fields = json.loads(path.read_text())
    del fields["newcomer_s"], fields["newcomer_s_per_token"]
    path.write_text(json.dumps(fields))
    assert read_calibration(path) == replace(FOUND, newcomer_s=0.0, newcomer_s_per_token=0.0)


def test_a_folder_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        write_calibration(KEY.path(tmp_path / "file"), FOUND)
