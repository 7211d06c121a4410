import pytest
import torch
from tests.backends.cuda.closeness import DTYPES, poisoned, random

from twostroke.backends.cuda.kernels.embedding import FROM_ROW, gather


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [48, 64])
def test_gather_takes_known_tokens_and_a_rows_last_sampled_one(device, dtype, hidden):
    embedding = random(37, hidden, dtype=dtype, device=device)
    token_ids = torch.tensor([5, FROM_ROW, 0, FROM_ROW, 36], dtype=torch.int32, device=device)
    rows = torch.tensor([0, 3, 1, 0, 2], dtype=torch.int32, device=device)
    last_tokens = torch.tensor([11, 12, 13, 14], dtype=torch.int32, device=device)
    out = poisoned(5, hidden, dtype=dtype, device=device)
    gather(embedding, token_ids, rows, last_tokens, out)
    assert torch.equal(out, embedding[[5, 14, 0, 11, 36]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_scales_in_float32(device, dtype):
    embedding = random(9, 40, dtype=dtype, device=device)
    ids = torch.tensor([8, 1], dtype=torch.int32, device=device)
    out = poisoned(2, 40, dtype=dtype, device=device)
    gather(embedding, ids, torch.zeros_like(ids), torch.zeros_like(ids), out, scale=40**0.5)
    torch.testing.assert_close(out, (embedding[[8, 1]].float() * 40**0.5).to(dtype), rtol=0.01, atol=0)


def test_gather_of_no_tokens_does_nothing(device):
    none = torch.empty(0, dtype=torch.int32, device=device)
    embedding = random(9, 16, dtype=torch.float32, device=device)
    gather(embedding, none, none, torch.zeros(1, dtype=torch.int32, device=device), embedding[:0])
