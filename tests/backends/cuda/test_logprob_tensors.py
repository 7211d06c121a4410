"""Logprobs on the device against the host's, which are its oracle."""

import numpy as np
import pytest
import torch

from twostroke.backends.cuda import logprobs
from twostroke.backends.cuda.logprobs import following
from twostroke.backends.host.sampler import token_logprobs
from twostroke.core.step import PrefillChunk

VOCAB = 700


def random_logits(count):
    return (4 * np.random.default_rng(0).standard_normal((count, VOCAB))).astype(np.float32)


def assert_alike(ours, theirs):
    assert (ours.token_id, [i for i, _ in ours.top]) == (theirs.token_id, [i for i, _ in theirs.top])
    assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-12)
    assert [p for _, p in ours.top] == pytest.approx([p for _, p in theirs.top], abs=1e-12)


def test_logprobs_are_the_hosts_in_more_rows_than_are_taken_at_once(device):
    logits = random_logits(2 * logprobs.ROWS_AT_ONCE + 3)
    logits[0] = np.round(logits[0])  # many are equal: the lowest ids come first
    logits[1, 10:20] = [0.0, -0.0] * 5
    tokens = torch.arange(len(logits), dtype=torch.int32, device=device)
    wanted = [index % 6 for index in range(len(logits))]
    ours = logprobs.token_logprobs(torch.tensor(logits, device=device), tokens, max(wanted)).to_host()
    if device == "cuda":
        torch.cuda.synchronize()
    for index, row in enumerate(ours.rows(wanted)):
        assert_alike(row, token_logprobs(logits[index], index, wanted[index]))


def test_more_wanted_than_there_are_tokens_and_signed_zeros(device):
    logits = np.array([[0.0, -0.0, -1.0, 0.0, -0.0]], dtype=np.float32)
    ours = logprobs.token_logprobs(torch.tensor(logits, device=device), torch.tensor([2], device=device), 64)
    assert ours.top_ids.tolist() == [[0, 1, 3, 4, 2]]


def test_rows_that_are_not_finite_are_told(device):
    logits = random_logits(3)
    logits[1, 5], logits[2, 6] = np.nan, np.inf
    tokens = torch.tensor([1, -1, 2], device=device)
    ours = logprobs.token_logprobs(torch.tensor(logits, device=device), tokens, 2)
    assert ours.finite.tolist() == [True, False, False]


@pytest.mark.parametrize("next_token_id", [None, 9])
def test_prompt_logprobs_are_of_the_tokens_that_follow(device, next_token_id):
    chunk = PrefillChunk(0, 0, (5, 6, 7, 8), samples=False, prompt_logprobs=2, next_token_id=next_token_id)
    logits = random_logits(4)
    targets = following(chunk)
    assert targets == ([6, 7, 8] if next_token_id is None else [6, 7, 8, 9])
    own = torch.tensor(logits[: len(targets)], device=device), torch.tensor(targets, device=device)
    ours = logprobs.token_logprobs(*own, 2).to_host()
    if device == "cuda":
        torch.cuda.synchronize()
    rows = ours.rows([2] * len(targets))
    assert len(rows) == len(targets)
    for index, row in enumerate(rows):
        assert_alike(row, token_logprobs(logits[index], targets[index], 2))


def test_a_chunk_whose_next_token_is_unknown_may_have_none(device):
    chunk = PrefillChunk(0, 0, (5,), samples=False, prompt_logprobs=2)
    assert following(chunk) == []
    no_logits, no_tokens = torch.tensor(random_logits(1), device=device)[:0], torch.tensor([], device=device)
    assert logprobs.token_logprobs(no_logits, no_tokens, 2).rows([]) == []
