"""Logprobs where they are asked for: of the model's own distribution, in float64, from raw logits on the device. Queued
like any other work and read on the host after. Torch operations, a few rows at a time: rare, and no part of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from twostroke.core.step import TokenLogprobs

ROWS_AT_ONCE = 32
"""Rows of float64 and of keys that are there at one time."""
ID_BITS = 32


class LogprobTensors(NamedTuple):
    """The logprobs of one token in each of several rows, and of the most likely ones, best first."""

    token_ids: torch.Tensor
    """int64 [rows]"""
    logprobs: torch.Tensor
    """float64 [rows]"""
    top_ids: torch.Tensor
    """int64 [rows, top_count]"""
    top_logprobs: torch.Tensor
    """float64 [rows, top_count]"""
    finite: torch.Tensor
    """bool [rows]: false where a logit is not finite, and the row's logprobs mean nothing."""

    def to_host(self) -> LogprobTensors:
        """Queue the copy to the host; the values are there when the stream has come so far."""
        return LogprobTensors(*map(_to_host, self))

    def rows(self, top_counts: Sequence[int]) -> list[TokenLogprobs]:
        """As the engine knows them, with as many of the most likely tokens as each row wants. Call on the host."""
        values = (tensor.tolist() for tensor in (self.token_ids, self.logprobs, self.top_ids, self.top_logprobs))
        return [
            TokenLogprobs(token_id, logprob, tuple(zip(top_ids[:count], top_logprobs[:count], strict=True)))
            for token_id, logprob, top_ids, top_logprobs, count in zip(*values, top_counts, strict=True)
        ]


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, top_count: int) -> LogprobTensors:
    """The logprob of a token in each row of raw logits float32 [rows, vocab], and of the `top_count` most likely ones;
    of equal ones the lowest ids. token_ids of any integer type [rows]; -1 (no token) is read as 0."""
    ids = token_ids.to(torch.int64).clamp(min=0)
    parts = [
        _some_logprobs(some_logits, some_ids, min(top_count, logits.shape[1]))
        for some_logits, some_ids in zip(torch.split(logits, ROWS_AT_ONCE), torch.split(ids, ROWS_AT_ONCE), strict=True)
    ]
    return LogprobTensors(ids, *(torch.cat(part) for part in zip(*parts, strict=True)))


def _some_logprobs(logits: torch.Tensor, ids: torch.Tensor, top_count: int) -> tuple[torch.Tensor, ...]:
    values = logits.double()
    log_total = torch.logsumexp(values, dim=1, keepdim=True)
    # One integer for (score, lowest id first), so that equal scores have an order: topk promises none.
    bits = torch.where(logits == 0, 0.0, logits).contiguous().view(torch.int32)
    codes = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    keys = (codes << ID_BITS) - torch.arange(logits.shape[1], device=logits.device)
    best = torch.topk(keys, top_count, dim=1).values
    top_ids = -best & ((1 << ID_BITS) - 1)
    return (
        (values.gather(1, ids[:, None]) - log_total)[:, 0],
        top_ids,
        values.gather(1, top_ids) - log_total,
        torch.isfinite(logits).all(dim=1),
    )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
