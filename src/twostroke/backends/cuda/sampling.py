"""Sampling on the device: each row's parameters and state, kept there, and the kernels that a batch needs of them.
Rows are opened and closed on the host; `flush` sends what changed; `sample` reads nothing back, so it can be captured.
Knows logits and rows; nothing of the model, of KV or of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton

from twostroke.backends.cuda.grammar_rows import Masks
from twostroke.backends.cuda.kernels import sampling as kernels
from twostroke.backends.cuda.kernels.sampling_edits import edit, mask
from twostroke.backends.cuda.kernels.sampling_filters import FilterScratch, Summaries, filter_rows
from twostroke.backends.cuda.kernels.sampling_search import SearchShape
from twostroke.backends.cuda.kernels.sampling_state import COUNTS, LISTS, SampledBatch, place_records
from twostroke.backends.cuda.sampling_records import RECORD_WORDS, RowRecord, has_edits, has_filters, record_of
from twostroke.backends.cuda.staging import UploadRing
from twostroke.core.step import RowJoin

BLOCK = 4096
"""Scores to a block of the vocabulary. A draw's rounding depends on it, so it does not vary with the batch."""
COLUMN = 128
"""Top-k up to the number of such columns starts from the best score of each."""
LIST_SIZE = 4096
"""Candidates that a filtered row may list; one with more is searched whole."""
DEFAULT_SEARCH = SearchShape()
DRAWS, FILTERS, EDITS = 1, 2, 4


@dataclass(frozen=True, slots=True)
class SamplingFeatures:
    """Which kernels a batch needs: part of what names a captured graph."""

    draws: bool = False  # some row is not greedy
    filters: bool = False  # some row has top-k, top-p or min-p
    edits: bool = False  # some row has penalties, a logit bias, min_tokens or a grammar

    @property
    def is_plain(self) -> bool:
        return not (self.filters or self.edits)


class SamplingRows:
    """The sampling of up to `max_rows` rows, in batches of up to `max_batch` (as many, unless said). Row `max_rows`
    pads batches: it is greedy and keeps no state."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device | str,
        *,
        max_batch: int | None = None,
        block: int = BLOCK,
        column: int = COLUMN,
        list_size: int = LIST_SIZE,
        search: SearchShape = DEFAULT_SEARCH,
    ) -> None:
        self._device = torch.device(device)
        self._max_batch = max_batch or max_rows
        self.vocab_size = vocab_size
        self._block, self._column, self._list_size, self._search = block, column, list_size, search
        self._num_blocks = triton.cdiv(vocab_size, block)
        self.records = torch.zeros(max_rows + 1, RECORD_WORDS, dtype=torch.int64, device=self._device)
        """A row's words, as `kernels/sampling_state.py` has them."""
        self.spread = torch.zeros(self._max_batch, RECORD_WORDS, dtype=torch.int64, device=self._device)
        """A record for each entry of a batch that verifies drafts, written at its beginning."""
        self._entries = torch.arange(self._max_batch, dtype=torch.int32, device=self._device)
        self._summaries = Summaries.allocate(self._max_batch, self._num_blocks, self._device)
        self._filter_scratch: FilterScratch | None = None
        self._edited: torch.Tensor | None = None  # [max_batch, vocab]
        self._uploads = UploadRing(torch.int64, self._device)
        self._mask_uploads = UploadRing(torch.int32, self._device)
        self._needs = [0] * (max_rows + 1)
        self._logprobs: list[int | None] = [None] * (max_rows + 1)
        self._changed: dict[int, RowJoin] = {}
        # What the records of open rows point at. It never moves, so captured graphs stay true; memory that is given
        # back is reused in the stream's order, behind the steps that were launched before.
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def open(self, row: int, join: RowJoin) -> None:
        """Begin a row, or go on with one that has written `join.output_token_ids`; `flush` tells the device."""
        sampling = join.request.sampling
        needs = 0 if sampling.is_greedy else DRAWS
        if has_filters(sampling, self.vocab_size):
            needs |= FILTERS
        if has_edits(sampling):
            needs |= EDITS
        self._needs[row] = needs
        self._logprobs[row] = sampling.logprobs
        self._changed[row] = join

    def close(self, row: int) -> None:
        """Forget a row. Steps already launched may still sample it."""
        self._needs[row] = 0
        self._logprobs[row] = None
        self._changed.pop(row, None)
        self._held.pop(row, None)

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
        changed, self._changed = self._changed, {}
        records = {row: record_of(join, self.vocab_size) for row, join in changed.items()}
        for row, record in records.items():
            self._hold(row, record)
        parts = [np.concatenate([[row], record.words]) for row, record in records.items()]
        for record in records.values():
            parts += (record.lists, record.seen_ids, record.output_ids)
        payload = np.concatenate(parts)
        arrived = torch.empty(len(payload), dtype=torch.int64, device=self._device)
        self._uploads.send((payload,), arrived)

        first = len(records) * (1 + RECORD_WORDS)
        place_records(self.records, arrived[:first].view(len(records), 1 + RECORD_WORDS))
        for row, record in records.items():
            sizes = [len(record.lists), len(record.seen_ids), len(record.output_ids)]
            if row in self._held:
                self._fill(row, *torch.split(arrived[first : first + sum(sizes)], sizes))
            first += sum(sizes)

    def prepare_records(self) -> None:
        """Have the kernel of `flush` compiled: on the padding row's record, which is zeros and remains so."""
        record = torch.zeros(1, 1 + RECORD_WORDS, dtype=torch.int64, device=self._device)
        record[0, 0] = len(self.records) - 1
        place_records(self.records, record)

    def _hold(self, row: int, record: RowRecord) -> None:
        """Make room for what a row's record points at, and write the addresses into it."""
        self._held.pop(row, None)
        if len(record.lists) or record.has_penalties:
            lists = torch.empty(len(record.lists), dtype=torch.int64, device=self._device)
            counts: torch.Tensor | None = None
            if record.has_penalties:
                counts = torch.zeros(self.vocab_size, dtype=torch.int32, device=self._device)
                record.words[COUNTS.value] = counts.data_ptr()
            record.words[LISTS.value] = lists.data_ptr()
            self._held[row] = (lists, counts)

    def _fill(self, row: int, lists: torch.Tensor, seen_ids: torch.Tensor, output_ids: torch.Tensor) -> None:
        held_lists, counts = self._held[row]
        held_lists.copy_(lists)
        if counts is not None:
            counts.index_fill_(0, seen_ids, 1)
            counts.index_add_(0, output_ids, torch.full_like(output_ids, 2, dtype=torch.int32))

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        last_tokens: torch.Tensor,
        tokens_out: torch.Tensor,
        features: SamplingFeatures,
        masks: Masks | None = None,
    ) -> None:
        """Choose a token for each row and advance it. logits float32 [batch, vocab], rows int32 [batch]; writes
        tokens_out int32 [batch] (-1 where logits are not finite) and, at each row, last_tokens int32 [max_rows + 1].
        The logits stay as they are. `masks`: of the entries whose rows have a grammar; sent now, so no part of a
        captured graph."""
        self.prepare(features)
        batch = SampledBatch(logits, self._edited if features.edits else None, rows, self.records)
        self._choose(batch, last_tokens, tokens_out, features, masks)

    def draw(
        self,
        logits: torch.Tensor,
        drafted: torch.Tensor,
        draws_out: torch.Tensor,
        features: SamplingFeatures,
        masks: Masks | None = None,
        *,
        width: int,
    ) -> None:
        """Choose a token for each entry, `width` of them a row, by the records of `spread`, and advance none: draws_out
        int32 [batch]. `drafted` int32 [batch]: the token that each entry stands behind."""
        self.prepare(features)
        edited, rows = self._edited if features.edits else None, self._entries[: len(logits)]
        batch = SampledBatch(logits, edited, rows, self.spread, drafted)
        self._choose(batch, None, draws_out, features, masks, width)

    def _choose(
        self,
        batch: SampledBatch,
        last_tokens: torch.Tensor | None,
        tokens_out: torch.Tensor,
        features: SamplingFeatures,
        masks: Masks | None,
        width: int = 1,
    ) -> None:
        logits, edited, block, draws = batch.logits, batch.edited, self._block, features.draws
        if len(logits) > self._max_batch or logits.stride(1) != 1 or logits.dtype != torch.float32:
            raise ValueError(f"logits must be float32 rows, at most {self._max_batch}: {logits.dtype} {logits.shape}")
        filters = self._filter_scratch if features.filters else None
        if edited is not None:
            sent = None if masks is None else self._send(masks)  # ahead of the kernels, which follow each other closely
            edit(batch, block=block, width=width)
            if sent is not None:
                mask(edited, *sent, block=block)
        kernels.survey(batch, self._summaries, filters, draws=draws, block=block, column=self._column)
        if filters is not None:
            filter_rows(batch, self._summaries, filters, block=block)
        found = (self._summaries, filters)
        kernels.choose(batch, *found, last_tokens, tokens_out, draws=draws, block=block, search=self._search)

    def _send(self, masks: Masks) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries and words, on the device."""
        arrays = (masks.entries, masks.words.reshape(-1))
        uploads, count = self._mask_uploads, len(masks.entries)
        arrived = torch.empty(uploads.length([len(array) for array in arrays]), dtype=torch.int32, device=self._device)
        uploads.send(arrays, arrived)
        return arrived[:count], arrived[uploads.aligned(count) :].view(masks.words.shape)

    def prepare(self, features: SamplingFeatures) -> None:
        """Allocate what batches with these features need, once; `sample` does so too, but a capture should not."""
        if features.filters and self._filter_scratch is None:
            num_columns = triton.cdiv(self.vocab_size, self._column)
            self._filter_scratch = FilterScratch.allocate(
                self._max_batch, self._num_blocks, num_columns, self._list_size, self._device
            )
        if features.edits and self._edited is None:
            shape = (self._max_batch, self.vocab_size)
            self._edited = torch.empty(shape, dtype=torch.float32, device=self._device)
