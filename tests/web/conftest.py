"""One browser, and servers to look at: SmolLM2, and a tiny model where only the page matters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import RunningServer, running_server
from tests.server.scripted_model import make_scripted

SMOLLM2 = ("smollm2", "--backend", "cpu", "--max-context", "4096", "--kv-memory", "200MB", "--speculate", "auto")
SMALL_STEPS = ("--max-tokens-per-step", "128", "--itl-target-ms", "100")
"""So that a long prompt takes several steps on any machine."""


@pytest.fixture(scope="session")
def running_browser() -> Iterator[object]:
    pytest.importorskip("playwright.sync_api", reason="make test-browser installs it")
    from tests.web import browsing

    if browsing.CHROMIUM is None:
        pytest.skip("Chromium is not installed; CHROMIUM=PATH says where it is")
    with browsing.browser() as running:
        yield running


@pytest.fixture(scope="session")
def page_server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    """And the file that it records to."""
    folder = tmp_path_factory.mktemp("page")
    options = (*SMOLLM2, *SMALL_STEPS, "--record", str(folder / "run.jsonl"))
    with running_server(folder / "log", *options) as running:
        yield running, folder / "run.jsonl"


@pytest.fixture(scope="session")
def tiny_options(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    model = make_scripted(tmp_path_factory.mktemp("tiny") / "model", "hermes")
    return str(model), "--backend", "reference", "--name", "scripted"
