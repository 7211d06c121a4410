"""The prefill path: a step with prompt chunks, decodes beside them or not. All its tokens go through the model in one
pass; logits are computed only for tokens that are sampled or whose logprobs are wanted. Short chunks, alone (the tail
behind a prefix hit) or beside decodes, replay a captured graph: launching kernels one by one would take longer."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial

import torch

from twostroke.backends.cuda.batch import Batch, CapturedShape
from twostroke.backends.cuda.kernels.prefill_tiles import ITEM_FIELDS, PrefillWork
from twostroke.backends.cuda.logprobs import prompt_logprob_readers
from twostroke.backends.cuda.model import TokenArrays
from twostroke.backends.cuda.parts import PLAIN, Parts, is_plain
from twostroke.backends.cuda.results import PromptLogprobReader, sampling_ids
from twostroke.core.step import Step

LONE_SLOTS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens that graphs of a lone chunk are made for."""
MIXED_SLOTS = (128, 256, 512, 768, 1024, 1280, 1536, 2048)
"""Prompt tokens that graphs of chunks beside decodes are made for; the scheduler's pace prefers multiples of 256."""
DECODE_SLOTS = (16, 64, 128, 256, 512)
MAX_CHUNKS = 8
"""Of a captured step beside decodes."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedBatch:
    """A batch where the kernels find it."""

    tokens: TokenArrays
    work: PrefillWork
    sampled_tokens: torch.Tensor
    sampled_rows: torch.Tensor


class PrefillPath:
    def __init__(self, parts: Parts, max_rows: int, max_context: int) -> None:
        self._parts = parts
        self._max_context = max_context
        self._max_tokens = len(parts.buffers.residual)
        self._lone_slots = [size for size in LONE_SLOTS if size <= min(self._max_tokens, max_context)]
        self._decode_slots = [*(size for size in DECODE_SLOTS if size < max_rows), max_rows]
        self._mixed_slots = [size for size in MIXED_SLOTS if size <= min(self._max_tokens - max_rows, max_context)]

    def launch(self, step: Step) -> tuple[list[int], dict[int, PromptLogprobReader]]:
        """Start the step; tokens as with `DecodePath.launch`. Prompt logprobs can be read when the step is done."""
        parts = self._parts
        shape = self._captured_shape(step)
        batch = Batch.from_step(step, parts.rows.index_of, parts.rows.padding_row, shape)
        staged = self._send(batch, shape)
        rows = batch.sampled_rows[: batch.num_sampled].tolist()
        if shape is not None:
            parts.graphs.run(shape, lambda: self._run_captured(staged, batch.num_decodes))
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
            masks = parts.rows.grammars.masks(sampling_ids(step))  # the device is at work while this waits
            parts.sample(staged.sampled_rows, parts.rows.sampling.features(rows), masks, pdl=parts.pdl)
        return rows, prompt_logprobs

    def prepare(self) -> None:
        """Capture the steps that recur, the largest first, and have every kernel of the general path compiled."""
        parts, padding_row = self._parts, self._parts.rows.padding_row
        largest = min(self._max_tokens, self._max_context)
        for size in (largest >> shift for shift in range(4)):
            staged = self._send(Batch.of_nobody(CapturedShape(0, size, 1), padding_row), None)
            parts.decoder.forward(staged.tokens, 0, staged.work, wanted=staged.sampled_tokens, pdl=parts.pdl)
        shapes = [CapturedShape(0, size, 1) for size in self._lone_slots]
        shapes += [CapturedShape(slots, size, MAX_CHUNKS) for slots in self._decode_slots for size in self._mixed_slots]
        for shape in sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True):
            staged = self._send(Batch.of_nobody(shape, padding_row), shape)
            parts.graphs.prepare(shape, partial(self._run_captured, staged, shape.decode_slots))

    def _captured_shape(self, step: Step) -> CapturedShape | None:
        """The least shape that a graph was made for and the step fits in; None: it is too large, or asks for more than
        plainly sampled tokens."""
        num_decodes, num_tokens = len(step.decodes), step.num_prefill_tokens
        slots = self._mixed_slots if num_decodes else self._lone_slots
        if num_tokens > max(slots, default=0) or len(step.prefills) > (MAX_CHUNKS if num_decodes else 1):
            return None
        if any(chunk.prompt_logprobs is not None for chunk in step.prefills):
            return None
        sampling, row_of = self._parts.rows.sampling, self._parts.rows.index_of
        rows = [row_of[seq_id] for seq_id in sampling_ids(step)]
        if not is_plain(sampling.features(rows)) or any(sampling.logprobs_wanted(row) is not None for row in rows):
            return None
        prompt_slots = slots[bisect_left(slots, num_tokens)]
        if not num_decodes:
            return CapturedShape(0, prompt_slots, 1)
        decode_slots = self._decode_slots[bisect_left(self._decode_slots, num_decodes)]
        return CapturedShape(decode_slots, prompt_slots, MAX_CHUNKS)

    def _send(self, batch: Batch, shape: CapturedShape | None) -> StagedBatch:
        attention = self._parts.attention
        segments = (batch.segment_first, batch.segment_count, batch.segment_start, batch.segment_rows)
        numbers = tuple(array.tolist() for array in segments)
        if shape is None:
            tiles = attention.tiles(*numbers)
        else:  # a graph serves every step of its shape: its grid is fixed, and what is over does nothing
            tile_rows = attention.tile_rows(shape.prompt_slots)
            pad_items = attention.capacity(shape.prompt_slots, shape.sampled_chunks, tile_rows)
            tiles = attention.tiles(*numbers, tile_rows=tile_rows, pad_items=pad_items)
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
            tiles.part_items if shape is None else attention.max_part_items,
            tiles.longest_context if shape is None else self._max_context,
        )
        return StagedBatch(TokenArrays(token_ids, rows, positions), work, sampled_tokens, sampled_rows)

    def _run_captured(self, staged: StagedBatch, num_decodes: int) -> None:
        parts = self._parts
        residual = parts.decoder.forward(
            staged.tokens, num_decodes, staged.work, wanted=staged.sampled_tokens, pdl=parts.pdl
        )
        parts.decoder.logits(residual, pdl=parts.pdl)
        parts.sample(staged.sampled_rows, PLAIN, pdl=parts.pdl)
