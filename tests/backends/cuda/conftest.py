"""Kernels run on the card where there is one, and in Triton's interpreter where there is none."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

    from tests.backends.cuda.interpreter import adapt

    adapt()


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
