"""One server for all tests that do it no harm, and the offline engine on the same model to hold it against."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.server.running import RunningServer, running_server
from tests.server.scripted_model import make_scripted
from twostroke import LLM

MODEL_OPTIONS = ("smollm2", "--backend", "cpu", "--max-context", "2048", "--kv-memory", "400MB")


@pytest.fixture(scope="session")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server") / "log", *MODEL_OPTIONS) as running:
        yield running


@pytest.fixture(scope="session")
def scripted_options(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    model = make_scripted(tmp_path_factory.mktemp("scripted") / "model", "hermes")
    return str(model), "--backend", "reference", "--name", "scripted", "--name", "claude-*"


@pytest.fixture(scope="session")
def scripted_server(
    scripted_options: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Of a model that thinks, answers and calls tools, as its script says."""
    with running_server(tmp_path_factory.mktemp("server") / "log", *scripted_options) as running:
        yield running


@pytest.fixture(scope="session")
def scripted(scripted_server: RunningServer) -> OpenAI:
    """Its client."""
    return OpenAI(base_url=scripted_server.base_url, api_key="none", max_retries=0).with_options(timeout=120)


@pytest.fixture(scope="session")
def keyed_server(
    scripted_options: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """The same for those who have the keys `one` and `two`, a request at a time and not too large."""
    options = (*scripted_options, "--max-per-key", "1", "--max-body", "64KiB", "--max-stored-responses", "5")
    with running_server(tmp_path_factory.mktemp("server") / "log", *options, TWOSTROKE_API_KEYS="one,two") as running:
        yield running


@pytest.fixture(scope="session")
def offline(smollm2_path: Path) -> Iterator[LLM]:
    with LLM("smollm2", backend="cpu", max_context=2048) as llm:
        yield llm
