"""The prefill path: a step with prompt chunks, decodes beside them or not. All its tokens go through the model in one
pass; logits are computed only for tokens that are sampled or whose logprobs are wanted. A short chunk alone, the tail
behind a prefix hit, replays a captured graph: launching its kernels one by one would take longer than running them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial

import torch

from twostroke.backends.cuda.batch import Batch
from twostroke.backends.cuda.kernels.prefill_tiles import ITEM_FIELDS, PrefillWork
from twostroke.backends.cuda.logprobs import prompt_logprob_readers
from twostroke.backends.cuda.model import TokenArrays
from twostroke.backends.cuda.parts import PLAIN, Parts, is_plain
from twostroke.backends.cuda.results import PromptLogprobReader
from twostroke.core.step import Step

TAIL_BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens that graphs of a lone chunk are made for."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedBatch:
    """A batch where the kernels find it."""

    tokens: TokenArrays
    work: PrefillWork
    sampled_tokens: torch.Tensor
    sampled_rows: torch.Tensor


class PrefillPath:
    def __init__(self, parts: Parts, max_context: int) -> None:
        self._parts = parts
        self._max_context = max_context
        self._buckets = tuple(size for size in TAIL_BUCKETS if size <= min(len(parts.buffers.residual), max_context))

    def launch(self, step: Step) -> tuple[list[int], dict[int, PromptLogprobReader]]:
        """Start the step; tokens as with `DecodePath.launch`. Prompt logprobs can be read when the step is done."""
        parts = self._parts
        pad_to = self._tail_bucket(step)
        batch = Batch.from_step(step, parts.rows.index_of, pad_to=pad_to, padding_row=parts.rows.padding_row)
        staged = self._send(batch, is_tail=pad_to > 0)
        rows = batch.sampled_rows.tolist()
        if pad_to:
            parts.graphs.run(("tail", pad_to), lambda: self._run_tail(staged))
            return rows, {}
        prompt_logprobs: dict[int, PromptLogprobReader] = {}
        if any(chunk.prompt_logprobs is not None for chunk in step.prefills):
            everything = parts.decoder.forward(staged.tokens, batch.num_decodes, staged.work, pdl=parts.pdl)
            prompt_logprobs = prompt_logprob_readers(step, batch, everything, parts)  # before sampling takes the buffer
            residual = everything[staged.sampled_tokens]
        else:
            residual = parts.decoder.forward(
                staged.tokens, batch.num_decodes, staged.work, wanted=staged.sampled_tokens, pdl=parts.pdl
            )
        if rows:
            parts.decoder.logits(residual, pdl=parts.pdl)
            parts.sample(staged.sampled_rows, parts.rows.sampling.features(rows), pdl=parts.pdl)
        return rows, prompt_logprobs

    def prepare(self) -> None:
        """Capture the short chunks, and have every kernel of the general path compiled."""
        parts = self._parts
        for size in reversed(self._buckets):
            nobody = Batch.of_padding(size, parts.rows.padding_row)
            staged = self._send(nobody, is_tail=True)
            parts.graphs.prepare(("tail", size), partial(self._run_tail, staged))
        for size in self._general_sizes():
            nobody = Batch.of_padding(size, parts.rows.padding_row)
            staged = self._send(nobody, is_tail=False)
            parts.decoder.forward(staged.tokens, 0, staged.work, wanted=staged.sampled_tokens, pdl=parts.pdl)

    def _general_sizes(self) -> list[int]:
        """Steps between whose sizes the kernels' configurations change."""
        largest = min(len(self._parts.buffers.residual), self._max_context)
        return [largest >> shift for shift in range(4) if largest >> shift > max(self._buckets, default=0)]

    def _tail_bucket(self, step: Step) -> int:
        """The padded size of a step that is one short chunk, plainly sampled; 0 for any other."""
        if step.decodes or len(step.prefills) != 1:
            return 0
        (chunk,) = step.prefills
        if (
            not chunk.samples
            or chunk.prompt_logprobs is not None
            or len(chunk.token_ids) > max(self._buckets, default=0)
        ):
            return 0
        sampling, row = self._parts.rows.sampling, self._parts.rows.index_of[chunk.seq_id]
        if not is_plain(sampling.features([row])) or sampling.logprobs_wanted(row) is not None:
            return 0
        return self._buckets[bisect_left(self._buckets, len(chunk.token_ids))]

    def _send(self, batch: Batch, *, is_tail: bool) -> StagedBatch:
        attention = self._parts.attention
        segments = (batch.segment_first, batch.segment_count, batch.segment_start, batch.segment_rows)
        numbers = tuple(array.tolist() for array in segments)
        if is_tail:  # a graph serves every tail of its size: its grid is fixed, and what is over does nothing
            tile_rows = attention.tile_rows(batch.num_tokens)
            pad_items = attention.capacity(batch.num_tokens, 1, tile_rows)
            tiles = attention.tiles(*numbers, tile_rows=tile_rows, pad_items=pad_items)
        else:
            tiles = attention.tiles(*numbers)
        arrays = (
            batch.token_ids,
            batch.rows,
            batch.positions,
            batch.sampled_tokens,
            batch.sampled_rows,
            tiles.items.reshape(-1),
        )
        staging = self._parts.staging
        staging.send(arrays)
        sizes = tuple(len(array) for array in arrays)
        token_ids, rows, positions, sampled_tokens, sampled_rows, items = staging.views(sizes)
        work = PrefillWork(
            items.view(-1, ITEM_FIELDS),
            tiles.tile_rows,
            attention.max_part_items if is_tail else tiles.part_items,
            self._max_context if is_tail else tiles.longest_context,
        )
        return StagedBatch(TokenArrays(token_ids, rows, positions), work, sampled_tokens, sampled_rows)

    def _run_tail(self, staged: StagedBatch) -> None:
        parts = self._parts
        residual = parts.decoder.forward(staged.tokens, 0, staged.work, wanted=staged.sampled_tokens, pdl=parts.pdl)
        parts.decoder.logits(residual, pdl=parts.pdl)
        parts.sample(staged.sampled_rows, PLAIN, pdl=parts.pdl)
