"""The program in docs/python.md and the snippet in docs/explain.md, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_blocks(page: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")):
        exec(compile(block, page, "exec"), names)
    return names


@pytest.mark.usefixtures("smollm2_path")
def test_the_program_of_the_page_does_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_blocks("python.md")
    shown = capsys.readouterr().out
    assert "scatter" in shown, "the streamed answer"
    assert set(names["place"]) == {"city", "country"} and all(map(str, names["place"].values()))
    assert names["mood"] in ("positive", "negative")
    assert re.fullmatch(r"(19|20)\d\d", names["year"])
    assert len(names["drawn"].samples) == 3
    assert shown.rstrip().splitlines()[-1] == str(names["drawn"].explain())


@pytest.mark.usefixtures("smollm2_path")
def test_the_snippet_on_explanations_gives_a_whole_answer(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_blocks("explain.md")
    assert names["result"].finish_reason == "stop" and "scatter" in names["result"].text
    assert str(names["explanation"]) in capsys.readouterr().out
