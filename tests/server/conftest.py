"""One server for all tests that do it no harm, and the offline engine on the same model to hold it against."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import RunningServer, running_server
from tests.server.scripted_model import make_scripted
from twostroke import LLM

MODEL_OPTIONS = ("smollm2", "--backend", "cpu", "--max-context", "2048", "--kv-memory", "400MB")


@pytest.fixture(scope="session")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server") / "log", *MODEL_OPTIONS) as running:
        yield running


@pytest.fixture(scope="session")
def scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Of a model that thinks, answers and calls tools, as its script says."""
    folder = tmp_path_factory.mktemp("scripted")
    model = make_scripted(folder / "model", "hermes")
    names = ("--name", "scripted", "--name", "claude-*")
    with running_server(folder / "log", str(model), "--backend", "reference", *names) as running:
        yield running


@pytest.fixture(scope="session")
def offline(smollm2_path: Path) -> Iterator[LLM]:
    with LLM("smollm2", backend="cpu", max_context=2048) as llm:
        yield llm
