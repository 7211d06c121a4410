"""The index of records names each of them once, and the documents name records that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
INDEX = RESULTS / "README.md"
NAMED = re.compile(r"\bresults/([\w.-]+\.(?:txt|json|md))\b")
MACHINES = {"CPU", "Xeon", "H200", "none"}
READERS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "bench/**/*.md", "bench/**/*.py", "src/**/*.py", "tests/**/*.py")
    for path in ROOT.glob(pattern)
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)  # `make bench-cpu` keeps its peers there
    and "results/" in path.read_text(encoding="utf-8")
)


def rows() -> list[list[str]]:
    """The table's cells: file, what, command, date, machine."""
    lines = [line for line in INDEX.read_text(encoding="utf-8").splitlines() if line.startswith("| [")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_record_is_in_the_index_once() -> None:
    names = []
    for row in rows():
        match = re.fullmatch(r"\[(\S+)\]\((\S+)\)", row[0])
        assert match is not None and match[1] == match[2], row[0]
        names.append(match[1])
    assert sorted(names) == sorted(path.name for path in RESULTS.iterdir() if path != INDEX)


def test_every_row_says_what_how_when_and_where() -> None:
    for row in rows():
        assert len(row) == 5 and all(row), row
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row[3]) and row[4] in MACHINES, row


@pytest.mark.parametrize("path", READERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_records_that_are_named_exist(path: Path) -> None:
    named = {name for name in NAMED.findall(path.read_text(encoding="utf-8")) if name != "NAME.txt"}
    assert {name for name in named if not (RESULTS / name).exists()} == set()


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0].partition("]")[0].strip("["))
def test_the_date_is_the_records_own(row: list[str]) -> None:
    """One of those that it names; a record that names none says so here."""
    text = (RESULTS / row[0].partition("]")[0].strip("[")).read_text(encoding="utf-8")
    assert row[3] in text or not re.search(r"\d{4}-\d\d-\d\d", text)
