import pytest
import torch
from tests.backends.cuda.closeness import DTYPES, assert_close, poisoned, random

from twostroke.backends.cuda.kernels.embedding import FROM_ROW, Places, Positions, gather, gather_places
from twostroke.backends.cuda.kernels.sampling_state import NUM_OUTPUT, NUM_WORDS, PROMPT_LEN
from twostroke.backends.cuda.rows import NO_SECOND


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


def test_gather_finds_where_tokens_stand_that_only_their_rows_know(device):
    """Row 0 is padding's, which has no tokens; a token may stand behind its row's last one, as a draft does."""
    records = torch.zeros(4, NUM_WORDS.value, dtype=torch.int64, device=device)
    records[:, PROMPT_LEN.value] = torch.tensor([0, 7, 300, 12])
    records[:, NUM_OUTPUT.value] = torch.tensor([0, 1, 40, 0])
    sent = [FROM_ROW, FROM_ROW, FROM_ROW, FROM_ROW - 1, FROM_ROW - 4, 0, 11]
    rows = [0, 1, 2, 2, 2, 3, 3]
    sent, rows = (torch.tensor(each, dtype=torch.int32, device=device) for each in (sent, rows))
    found = torch.full_like(sent, -99)
    embedding = random(9, 16, dtype=torch.float32, device=device)
    out = poisoned(7, 16, dtype=torch.float32, device=device)
    ids = torch.zeros_like(rows)
    gather(embedding, ids, rows, ids, out, positions=Positions(sent, records, found))
    assert found.tolist() == [0, 7, 339, 340, 343, 0, 11]
    assert torch.equal(out, embedding[:1].expand(7, -1))


def test_gather_of_no_tokens_does_nothing(device):
    none = torch.empty(0, dtype=torch.int32, device=device)
    embedding = random(9, 16, dtype=torch.float32, device=device)
    gather(embedding, none, none, torch.zeros(1, dtype=torch.int32, device=device), embedding[:0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_texts", [1, 2])
def test_an_encoder_looks_up_where_tokens_stand_and_in_which_text(device, dtype, num_texts):
    """The norm of the sum; a row's second text begins at its third token, the other row has one text."""
    hidden, first_place = 48, 2
    embedding, positions = (random(20, hidden, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    text_rows = random(num_texts, hidden, dtype=dtype, device=device, seed=3)
    norm, bias = (random(hidden, dtype=dtype, device=device, seed=seed) for seed in (4, 5))
    ids, rows, at, seconds = (
        torch.tensor(numbers, dtype=torch.int32, device=device)
        for numbers in ([7, 0, 19, 3, 7], [1, 1, 1, 0, 0], [0, 1, 2, 5, 9], [NO_SECOND, 2])
    )
    out = poisoned(5, hidden, dtype=dtype, device=device)
    places = Places(positions, text_rows, norm, bias)
    gather_places(embedding, places, ids, rows, at, seconds, out, first_place=first_place, eps=1e-5)
    of_text = torch.tensor([0, 0, num_texts - 1, 0, 0], device=device)
    total = embedding[ids.long()].float() + positions[at.long() + first_place].float() + text_rows[of_text].float()
    assert_close(out, torch.nn.functional.layer_norm(total, (hidden,), norm.float(), bias.float(), 1e-5))
