"""What tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.models.resolve import resolve


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model's GGUF file, from the user's cache; a fresh machine downloads it."""
    return resolve("smollm2")
