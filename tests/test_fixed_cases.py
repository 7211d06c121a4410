"""The cases of a property are the same in every plain run, whatever its process ran before (`tests/properties.py`)."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples


def drawn() -> list[tuple[int, str]]:
    cases = []

    @examples(300)
    @given(number=st.integers(), text=st.text())
    def check(number: int, text: str) -> None:
        cases.append((number, text))

    check()
    return cases


def test_a_module_that_is_loaded_meanwhile_changes_no_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = drawn()
    assert len(set(first)) > 100
    constants = [f"{number}, 'constant {number}'," for number in range(10**6, 10**6 + 500)]
    (tmp_path / "many_constants.py").write_text(f"CONSTANTS = [{' '.join(constants)}]\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("many_constants")
    assert drawn() == first
