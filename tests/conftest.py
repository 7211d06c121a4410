"""What tests of several rooms share."""

from __future__ import annotations

import os

# Before numpy and torch are imported: two threads of BLAS beside another process take longer than one alone.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest

from twostroke.models.resolve import resolve


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model's GGUF file, from the user's cache; a fresh machine downloads it."""
    return resolve("smollm2")
