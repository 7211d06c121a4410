"""Logprobs that a step owes: computed on the device behind its kernels, read on the host when the step is done. Only
requests that ask for them pay."""

from __future__ import annotations

from functools import partial

import torch

from twostroke.backends.cuda.batch import Batch
from twostroke.backends.cuda.logprob_tensors import LogprobTensors, token_logprobs
from twostroke.backends.cuda.parts import Parts
from twostroke.backends.cuda.results import LogprobReader, PromptLogprobReader, sampling_ids
from twostroke.core.step import PrefillChunk, Step, TokenLogprobs


def logprob_readers(step: Step, rows: list[int], parts: Parts) -> dict[int, LogprobReader]:
    """By sequence, for the tokens just sampled from the logits buffer."""
    wanted = {place: parts.rows.sampling.logprobs_wanted(row) for place, row in enumerate(rows)}
    asked = {place: count for place, count in wanted.items() if count is not None}
    if not asked:
        return {}
    places = torch.tensor(list(asked), device=parts.tokens.device)
    tensors = token_logprobs(parts.buffers.logits[places], parts.tokens[places], max(asked.values())).to_host()
    seq_ids = sampling_ids(step)
    counts = list(asked.values())
    return {seq_ids[place]: partial(_read_one, tensors, counts, at) for at, place in enumerate(asked)}


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


def _read_one(tensors: LogprobTensors, counts: list[int], at: int) -> TokenLogprobs:
    return tensors.rows(counts)[at]


def _read_prompt(slices: list[LogprobTensors], count: int) -> tuple[TokenLogprobs, ...] | None:
    if not all(bool(tensors.finite.all()) for tensors in slices):
        return None
    return tuple(item for tensors in slices for item in tensors.rows([count] * len(tensors.token_ids)))
