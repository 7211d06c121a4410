"""The page of families: its table has a row for each variant that the tests hold to its oracle, in the bounds that they
hold it in, and says of each backend what the backend says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.backends.reference.test_against_transformers import GGUF_VARIANTS, TOLERANCE
from tests.engine.test_embedding import KINDS
from tests.models.tiny_checkpoints import cpu_variants, cuda_variants, variants

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"\| `(\w+)` \| (\w+) \| `(\w+)` \| (\S+) \| (\S*) ?\| ([\w, ]+) \|")

EMBEDDER = re.compile(r"\| `(\w+)` \| `(\w+)` \| (\S+) \| (\S+) \|")
TWO_DIGITS = re.compile(r"\d\.\de-\d\d")
"""One digit alone would bring 1.4e-04 to the bound."""
CPU_TOLERANCE = 5e-3
"""Of vectors, with KV in 16 bits."""


def rows(name: str, row: re.Pattern[str] = ROW) -> list[tuple[str, ...]]:
    return [match.groups() for match in row.finditer((ROOT / name).read_text(encoding="utf-8"))]


def test_the_page_is_the_record() -> None:
    for row in (ROW, EMBEDDER):
        assert rows("docs/families.md", row) == rows("bench/results/families.txt", row)


def test_every_embedder_has_a_row_within_the_bound() -> None:
    found = rows("docs/families.md", EMBEDDER)
    assert [kind for kind, *_ in found] == KINDS
    for _, _, reference, cpu in found:
        assert float(reference) < TOLERANCE and float(cpu) < CPU_TOLERANCE


def test_every_variant_has_a_row_within_the_bound() -> None:
    found = {row[0]: row for row in rows("docs/families.md")}
    assert list(found) == variants()
    for variant, (_, _, _, folder, in_file, where) in found.items():
        for figure in (folder, *([in_file] if variant in GGUF_VARIANTS else [])):
            assert TWO_DIGITS.fullmatch(figure) and float(figure) < TOLERANCE
        assert bool(in_file) == (variant in GGUF_VARIANTS)
        expected = ["reference"] + ["cpu"] * (variant in cpu_variants()) + ["cuda"] * (variant in cuda_variants())
        assert where.split(", ") == expected


@pytest.mark.parametrize("text", ["| `llama` | llama | `L` | 2.1e-05 |  | reference, cpu |"])
def test_rows_are_found(text: str) -> None:
    assert ROW.findall(text) == [("llama", "llama", "L", "2.1e-05", "", "reference, cpu")]
