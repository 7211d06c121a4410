"""Without a CUDA device the kernels run under Triton's interpreter, which is chosen before Triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"
