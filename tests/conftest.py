"""What tests of several rooms share."""

from __future__ import annotations

import os

# Before numpy and torch are imported: two threads of BLAS beside another process take longer than one alone.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest

from twostroke.backends.cuda import _no_device
from twostroke.models.resolve import resolve

# Before anything imports Triton, as transformers does: its own functions are interpreted only if it hears of it then.
if _no_device() is not None:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model's GGUF file, from the user's cache; a fresh machine downloads it."""
    return resolve("smollm2")
