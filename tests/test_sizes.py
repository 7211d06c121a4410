"""What keeps rooms readable: functions that fit on a screen where requests are scheduled and steps are made, and little
more than that elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "twostroke"
ON_A_SCREEN, ELSEWHERE = 60, 80
"""Lines of a function."""
SCREENS = {"engine", "scheduling", "kv", "core"}
ROOMS = sorted(path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.rglob("*.py")))


def functions(files: list[Path]) -> Iterator[tuple[str, int]]:
    for file in sorted(files):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield f"{file.relative_to(SOURCE)}: {node.name}", node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("room", ROOMS)
def test_functions_fit_on_a_screen(room: str) -> None:
    found = dict(functions(list((SOURCE / room).rglob("*.py"))))
    most = ON_A_SCREEN if room in SCREENS else ELSEWHERE
    assert {name: lines for name, lines in found.items() if lines > most} == {}


def test_every_room_is_looked_at() -> None:
    assert set(ROOMS) > SCREENS and len(ROOMS) > 12
    assert all(len(dict(functions(list((SOURCE / room).rglob("*.py"))))) > 10 for room in SCREENS)
    own = dict(functions(list(SOURCE.glob("*.py"))))  # those of no room
    assert own and max(own.values()) <= ELSEWHERE
