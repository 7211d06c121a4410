"""`twostroke tune` where nothing can be tuned, and how it shows what it found; what it measures on a card is held by
tests/backends/cuda/test_tuning.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.test_cli import twostroke

from twostroke.backends.interface import TunedChange, TuningReport
from twostroke.cli.tune import _show


def test_a_backend_without_tuning_says_so_in_a_sentence(smollm2_path: Path) -> None:
    done = twostroke("tune", str(smollm2_path), "--backend", "cpu")
    assert done.returncode != 0
    assert "the cpu backend has nothing to tune: it chooses its kernels by itself" in done.stderr


def test_what_changed_is_shown_with_what_it_gained(capsys: pytest.CaptureFixture[str]) -> None:
    changes = [TunedChange("gated 14336 x 4096", 16, "cublas", 41.04, "packed groups=2", 31.5)]
    report = TuningReport("NVIDIA A100", 5, changes, ["head by gemv: error 0.5"], 61.2, Path("/there.json"), "{}")
    _show(Console(width=200), report)
    text = capsys.readouterr().out
    for words in (
        "gated 14336 x 4096    16  cublas  41.0  packed groups=2  31.5",
        "5 products measured on NVIDIA A100 in 61 s: 1 choices changed, 10 us less over all of them.",
        "1 candidates did not run, or not rightly, and are left out.",
        "head by gemv: error 0.5",
        "/there.json",
    ):
        assert words in text
