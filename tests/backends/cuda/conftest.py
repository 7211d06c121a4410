"""Kernels run on the card where there is one, and in Triton's interpreter where there is none."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy_2_4(tensor, scope):
        """Triton 3.6 takes loop bounds with `int(array)` from arrays of shape [1], which NumPy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_for_numpy_2_4


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
