"""Logprobs that a step owes, of the model's own distribution: computed in float64 from raw logits on the device, behind
the step's kernels, and read on the host when the step is done. Torch operations, a few rows at a time: rare, and no
part of a graph. Only requests that ask for them pay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from twostroke.backends.cuda.batch import Batch
from twostroke.backends.cuda.parts import Parts
from twostroke.backends.cuda.results import LogprobReader, PromptLogprobReader, sampling_ids
from twostroke.core.step import PrefillChunk, Step, TokenLogprobs

ROWS_AT_ONCE = 32
"""Rows of float64 and of keys that are there at one time."""
ID_BITS = 32


def logprob_readers(
    step: Step, rows: list[int], parts: Parts, width: int = 1, num_queries: Sequence[int] | None = None
) -> dict[int, LogprobReader]:
    """By sequence, for the tokens just sampled from the logits buffer. `width`: tokens of a row there, of which the
    first `num_queries` of each may have come; None: all."""
    wanted = {place: parts.rows.sampling.logprobs_wanted(row) for place, row in enumerate(rows)}
    asked = {place: count for place, count in wanted.items() if count is not None}
    if not asked:
        return {}
    queries = {place: width if num_queries is None else num_queries[place] for place in asked}
    entries = [place * width + number for place in asked for number in range(queries[place])]
    places = torch.tensor(entries, device=parts.tokens.device)
    tensors = token_logprobs(parts.buffers.logits[places], parts.tokens[places], max(asked.values())).to_host()
    counts = [asked[place] for place in asked for _ in range(queries[place])]
    seq_ids, ends = sampling_ids(step), accumulate(queries.values())
    firsts = {place: end - queries[place] for place, end in zip(queries, ends, strict=True)}
    return {seq_ids[place]: partial(_read_one, tensors, counts, first) for place, first in firsts.items()}


def prompt_logprob_readers(
    step: Step, batch: Batch, residual: torch.Tensor, parts: Parts
) -> dict[int, PromptLogprobReader]:
    """By sequence, from the residual stream of all the step's tokens. A vocabulary's worth of logits for every token of
    a prompt would not fit: they pass through the logits buffer in slices."""
    readers: dict[int, PromptLogprobReader] = {}
    at_once = len(parts.buffers.logits)
    for chunk, first in zip(step.prefills, batch.segment_first.tolist(), strict=True):
        if chunk.prompt_logprobs is None:
            continue
        targets = torch.tensor(following(chunk), dtype=torch.int64, device=residual.device)
        slices = []
        for start in range(0, len(targets), at_once):
            some = targets[start : start + at_once]
            logits = parts.decoder.logits(residual[first + start : first + start + len(some)])
            slices.append(token_logprobs(logits, some, chunk.prompt_logprobs).to_host())
        readers[chunk.seq_id] = partial(_read_prompt, slices, chunk.prompt_logprobs)
    return readers


def following(chunk: PrefillChunk) -> list[int]:
    """The token after each position; after the last one only where it is known."""
    return [*chunk.token_ids[1:], *([] if chunk.next_token_id is None else [chunk.next_token_id])]


def _read_one(tensors: LogprobTensors, counts: list[int], first: int, number: int) -> TokenLogprobs:
    at = first + number
    (found,) = LogprobTensors(*(tensor[at : at + 1] for tensor in tensors)).rows(counts[at : at + 1])
    return found


def _read_prompt(slices: list[LogprobTensors], count: int) -> tuple[TokenLogprobs, ...] | None:
    if not all(bool(tensors.finite.all()) for tensors in slices):
        return None
    return tuple(item for tensors in slices for item in tensors.rows([count] * len(tensors.token_ids)))


class LogprobTensors(NamedTuple):
    """The logprobs of one token in each of several rows, and of the most likely ones, best first."""

    token_ids: torch.Tensor  # int64 [rows]
    logprobs: torch.Tensor  # float64 [rows]
    top_ids: torch.Tensor  # int64 [rows, top_count]
    top_logprobs: torch.Tensor  # float64 [rows, top_count]
    finite: torch.Tensor  # bool [rows]: false where a logit is not finite, and the row's logprobs mean nothing

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
