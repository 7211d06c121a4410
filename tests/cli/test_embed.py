"""`embed`: vectors and rankings on a terminal."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from tests.cli.in_process import typed
from tests.models.tiny_embedders import make_embedder

from twostroke import LLM

TEXTS = ["the cat sat on a mat", "prefill and decode"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_embedder("bert", tmp_path_factory.mktemp("bert")).folder)


def test_vectors_are_lines_of_json(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder, backend="reference") as llm:
        wanted = llm.embed(TEXTS, dimensions=8)
    found = typed("embed", folder, *TEXTS, "--dimensions", "8", "--backend", "reference")
    assert found.returncode == 0, found.stderr
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [line["text"] for line in lines] == TEXTS and [line["embedding"] for line in lines] == wanted
    stream = io.TextIOWrapper(io.BytesIO("\n".join(TEXTS).encode()))
    monkeypatch.setattr(sys, "stdin", stream)
    assert typed("embed", folder, "--dimensions", "8", "--backend", "reference").stdout == found.stdout


def test_a_query_ranks_texts(folder: str) -> None:
    with LLM(folder, backend="reference") as llm:
        wanted = llm.rerank("a cat", TEXTS)
    found = typed("embed", folder, *TEXTS, "--query", "a cat", "--backend", "reference")
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [line["index"] for line in lines] == [one.index for one in wanted]
    assert lines[0]["score"] == pytest.approx(wanted[0].score, abs=1e-5)


def test_refusals_are_sentences(folder: str, tmp_path: Path) -> None:
    for arguments, sentence in (
        ((*TEXTS, "--query", "a", "--dimensions", "8"), "have no part in it"),
        (("a " * 100,), "this model takes 60 at most"),
        (("a", "--dimensions", "65"), "from 1 to this model's 64"),
    ):
        found = typed("embed", folder, *arguments, "--backend", "reference")
        assert found.returncode == 2 and sentence in found.stderr and not found.stdout


def test_the_help_teaches() -> None:
    shown = typed("embed", "--help").stdout
    assert "texts that mean the same" in shown and "--query" in shown and "Qwen3-Embedding" in shown
