"""Gemma 4's vectors for each layer, against transformers' own way to make them."""

import pytest
import torch
from tests.backends.cuda.closeness import DTYPES, assert_close, random
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from twostroke.backends.cuda.kernels.embedding import FROM_ROW
from twostroke.backends.cuda.kernels.layer_inputs import make_inputs

EPS = 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layers", "width"), [(3, 32), (2, 48), (1, 256)])
def test_half_is_projected_and_half_looked_up(device, dtype, layers, width):
    """Of a token that the host knows, and of one that only its row does."""
    projected = random(3, layers * width, dtype=dtype, device=device) * 5
    embedding = random(9, layers * width, dtype=dtype, device=device, seed=1)
    norm = random(width, dtype=dtype, device=device, seed=2) + 1
    ids = torch.tensor([4, FROM_ROW, 0], dtype=torch.int32, device=device)
    rows = torch.tensor([0, 1, 0], dtype=torch.int32, device=device)
    last = torch.tensor([3, 7], dtype=torch.int32, device=device)
    own = Gemma4RMSNorm(width, eps=EPS).to(device)
    own.weight.data = norm.float()
    half = own(projected.float().view(3, layers, width) * 0.125).detach()
    other = embedding[[4, 7, 0]].float().view(3, layers, width) * width**0.5
    make_inputs(projected, norm, embedding, ids, rows, last, gain=0.125, eps=EPS)
    assert_close(projected, ((half + other) * 2**-0.5).flatten(1))
