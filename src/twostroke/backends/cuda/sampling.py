"""Sampling on the device: each row's parameters and state, kept there, and the kernels that a batch needs of them.
Rows are opened and closed on the host; `flush` sends what changed; `sample` reads nothing back, so it can be captured.
Knows logits and rows; nothing of the model, of KV or of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton

from twostroke.backends.cuda.kernels import sampling as kernels
from twostroke.backends.cuda.kernels import sampling_state as words
from twostroke.backends.cuda.upload import UploadRing
from twostroke.core.step import RowJoin

BLOCK = 4096
"""Scores to a block of the vocabulary. A draw's rounding depends on it, so it does not vary with the batch."""
DRAWS, FILTERS, EDITS = 1, 2, 4
RECORD_WORDS = words.NUM_WORDS.value
WORD_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingFeatures:
    """Which kernels a batch needs: part of what names a captured graph."""

    draws: bool = False
    """Some row is not greedy."""
    filters: bool = False
    """Some row has top-k, top-p or min-p."""
    edits: bool = False
    """Some row has penalties, a logit bias or min_tokens."""


class SamplingRows:
    """The sampling of up to `max_rows` rows. Row `max_rows` pads batches: it is greedy and keeps no state."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str, *, block: int = BLOCK) -> None:
        self._device = torch.device(device)
        self._vocab_size = vocab_size
        self._block = block
        num_blocks = triton.cdiv(vocab_size, block)
        self._state = torch.zeros(max_rows + 1, RECORD_WORDS, dtype=torch.int64, device=self._device)
        self._arrived = torch.zeros(max_rows * (RECORD_WORDS + 1), dtype=torch.int64, device=self._device)
        self._summaries = (
            torch.zeros(max_rows, num_blocks, dtype=torch.float32, device=self._device),
            torch.zeros(max_rows, num_blocks, dtype=torch.int32, device=self._device),
            torch.zeros(max_rows, num_blocks, dtype=torch.float32, device=self._device),
        )
        self._uploads = UploadRing(self._device)
        self._needs = [0] * (max_rows + 1)
        self._logprobs: list[int | None] = [None] * (max_rows + 1)
        self._changed: dict[int, RowJoin] = {}

    def open(self, row: int, join: RowJoin) -> None:
        """Begin a row, or go on with one that has written `join.output_token_ids`; `flush` tells the device."""
        sampling = join.request.sampling
        needs = 0 if sampling.is_greedy else DRAWS
        if not sampling.is_greedy and _has_filters(join, self._vocab_size):
            needs |= FILTERS
        if sampling.has_penalties or sampling.logit_bias or sampling.min_tokens:
            needs |= EDITS
        self._needs[row] = needs
        self._logprobs[row] = sampling.logprobs
        self._changed[row] = join

    def close(self, row: int) -> None:
        """Forget a row. Steps already launched may still sample it."""
        self._needs[row] = 0
        self._logprobs[row] = None
        self._changed.pop(row, None)

    def logprobs_wanted(self, row: int) -> int | None:
        """How many of the most likely tokens the row wants beside the chosen one's logprob; None: no logprobs."""
        return self._logprobs[row]

    def features(self, rows: Sequence[int]) -> SamplingFeatures:
        needs = 0
        for row in rows:
            needs |= self._needs[row]
        return SamplingFeatures(bool(needs & DRAWS), bool(needs & FILTERS), bool(needs & EDITS))

    def flush(self) -> None:
        """Queue what was opened since the last flush: one copy to the device, behind the steps launched before."""
        if not self._changed:
            return
        records = np.zeros((len(self._changed), 1 + RECORD_WORDS), dtype=np.int64)
        for record, (row, join) in zip(records, self._changed.items(), strict=True):
            record[0] = row
            _fill_record(record[1:], join, self._vocab_size)
        self._changed.clear()
        self._uploads.send(records.reshape(-1), self._arrived)
        words.place_records(self._state, self._arrived[: records.size].view(len(records), -1))

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        last_tokens: torch.Tensor,
        tokens_out: torch.Tensor,
        features: SamplingFeatures,
        *,
        pdl: bool = False,
    ) -> None:
        """Choose a token for each row and advance it. logits [batch, vocab], rows int32 [batch]; writes tokens_out
        int32 [batch] (-1 where logits are not finite) and, at each row, last_tokens int32 [max_rows + 1]."""
        if features.filters or features.edits:
            raise NotImplementedError
        state, block = self._state, self._block
        kernels.survey(logits, rows, state, self._summaries, draws=features.draws, block=block, pdl=pdl)
        kernels.choose(
            logits,
            rows,
            state,
            self._summaries,
            last_tokens,
            tokens_out,
            draws=features.draws,
            block=block,
            pdl=pdl,
        )


def _has_filters(join: RowJoin, vocab_size: int) -> bool:
    sampling = join.request.sampling
    has_top_k = sampling.top_k is not None and sampling.top_k < vocab_size
    return has_top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _fill_record(record: npt.NDArray[np.int64], join: RowJoin, vocab_size: int) -> None:
    """The words of a row, without addresses: see kernels/sampling_state.py."""
    request, sampling = join.request, join.request.sampling
    numbers = record.view(np.float64)
    if not sampling.is_greedy:
        # Temperatures below 1e-38 and the smallest one allowed choose alike.
        numbers[words.SCALE.value] = min(math.log2(math.e) / max(sampling.temperature, 1e-300), words.LARGEST_SCALE)
    if sampling.top_p < 1.0:
        numbers[words.TOP_P.value] = sampling.top_p
    numbers[words.MIN_P.value] = sampling.min_p
    if sampling.top_k is not None and sampling.top_k < vocab_size:
        record[words.TOP_K.value] = sampling.top_k
    record[words.SEED.value] = np.uint64(request.seed & WORD_MASK).view(np.int64)
    record[words.SAMPLE_INDEX.value] = join.sample_index
    record[words.NUM_OUTPUT.value] = len(join.output_token_ids)
