"""What keeps rooms readable: functions that fit on a screen where requests are scheduled and steps are made."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "twostroke"
MOST_LINES = 60


def functions(room: str) -> Iterator[tuple[str, int]]:
    for file in sorted((SOURCE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield f"{file.relative_to(SOURCE)}: {node.name}", node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("room", ["engine", "scheduling", "kv", "core"])
def test_functions_fit_on_a_screen(room: str) -> None:
    found = dict(functions(room))
    assert len(found) > 10
    assert {name: lines for name, lines in found.items() if lines > MOST_LINES} == {}
