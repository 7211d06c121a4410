"""Which backend is taken, and the sentence that says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.tiny_checkpoints import make_tiny

from twostroke import backends
from twostroke.core.errors import BackendError
from twostroke.models.loading import load_checkpoint


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.backends.cuda._no_device", lambda: "there is no NVIDIA driver on this machine")


@pytest.mark.usefixtures("no_cuda")
def test_the_reason_reads_as_a_sentence(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_tiny("llama", tmp_path)[0])
    factory, reason = backends.choose("auto", checkpoint)
    assert factory.name == "cpu"
    assert reason == "the fastest that supports this model (not cuda: there is no NVIDIA driver on this machine)"
    assert backends.choose("reference", checkpoint)[1] == "asked for"


@pytest.mark.usefixtures("no_cuda")
def test_a_size_that_the_tiles_cannot_take_is_named(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_tiny("llama", tmp_path, intermediate_size=100)[0])
    expected = "not cpu: its tiles need sizes that are multiples of 32, and this model's intermediate size is 100"
    assert expected in backends.choose("auto", checkpoint)[1]
    with pytest.raises(BackendError, match=r"^no backend can run this model here; not cpu: its tiles need sizes"):
        backends.choose("cpu", checkpoint)
