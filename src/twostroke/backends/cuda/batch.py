"""A Step with prefill chunks, rendered as arrays for the device: born complete, dead with the step. Decode tokens come
first, one a sequence; chunks follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.backends.cuda.kernels.embedding import FROM_ROW
from twostroke.core.step import PrefillChunk, Step

Integers = npt.NDArray[np.int32]
NOBODY = -1


@dataclass(frozen=True, slots=True)
class CapturedShape:
    """The sizes that a step is padded to: those that a graph is made for, or nearly its own."""

    num_tokens: int
    decode_slots: int
    """The first of the tokens may be decodes, this many at most; the device is told how many with every step."""
    sampled_chunks: int  # chunks that may yield a token

    @property
    def num_sampled(self) -> int:
        return self.decode_slots + self.sampled_chunks


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Integers  # [num_tokens]; FROM_ROW for decodes, whose token only the device knows
    rows: Integers  # [num_tokens]
    positions: Integers  # [num_tokens]; FROM_ROW for decodes, whose row knows its length
    num_decodes: int  # tokens that come first and are attended as decodes
    segment_first: Integers  # [num_segments] index of a chunk's first token
    segment_count: Integers  # [num_segments] its tokens
    segment_start: Integers  # [num_segments] the position of its first token
    segment_rows: Integers  # [num_segments]
    sampled_tokens: Integers  # the tokens whose logits are sampled, decodes first, then padding
    sampled_rows: Integers  # their rows
    num_sampled: int  # how many of them are not padding

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @staticmethod
    def from_step(
        step: Step, row_of: Mapping[int, int], padding_row: int, shape: CapturedShape, *, takes_first: bool = False
    ) -> Batch:
        """Padded to `shape`, at the end: tokens that pad belong to the padding row and to no segment, and what is
        sampled from them is nobody's. They are the chunks' own once more: all of one kind would crowd few experts.
        `takes_first`: of chunks that are pooled, the first token stands for the chunk, and not the last."""
        decodes, chunks = step.decodes, step.prefills
        counts = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int32)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        chunk_rows = np.array([row_of[chunk.seq_id] for chunk in chunks], dtype=np.int32)
        firsts = len(decodes) + np.cumsum(counts, dtype=np.int32) - counts
        token_ids = np.zeros(shape.num_tokens, dtype=np.int32)
        rows = np.full(shape.num_tokens, padding_row, dtype=np.int32)
        positions = np.zeros(shape.num_tokens, dtype=np.int32)
        token_ids[: len(decodes)] = FROM_ROW
        rows[: len(decodes)] = [row_of[slot.seq_id] for slot in decodes]
        positions[: len(decodes)] = FROM_ROW
        for chunk, first, row in zip(chunks, firsts.tolist(), chunk_rows.tolist(), strict=True):
            end = first + len(chunk.token_ids)
            token_ids[first:end] = chunk.token_ids
            rows[first:end] = row
            positions[first:end] = np.arange(chunk.start, chunk.end, dtype=np.int32)
        held = len(decodes) + int(counts.sum())
        token_ids[held:] = np.resize(token_ids[len(decodes) : held], shape.num_tokens - held)
        samples = np.array([chunk.samples or chunk.pools for chunk in chunks], dtype=bool)
        taken = firsts if takes_first else firsts + counts - 1
        chosen = np.concatenate([np.arange(len(decodes), dtype=np.int32), taken[samples]])
        sampled_tokens = np.zeros(shape.num_sampled, dtype=np.int32)
        sampled_rows = np.full(shape.num_sampled, padding_row, dtype=np.int32)
        sampled_tokens[: len(chosen)] = chosen
        sampled_rows[: len(chosen)] = rows[chosen]
        return Batch(
            token_ids=token_ids,
            rows=rows,
            positions=positions,
            num_decodes=len(decodes),
            segment_first=firsts,
            segment_count=counts,
            segment_start=starts,
            segment_rows=chunk_rows,
            sampled_tokens=sampled_tokens,
            sampled_rows=sampled_rows,
            num_sampled=len(chosen),
        )

    @staticmethod
    def of_nobody(shape: CapturedShape, padding_row: int, max_context: int) -> Batch:
        """What graphs are captured with, and kernels compiled: the padding row's, in chunks as long as they may be."""
        counts = (min(max_context, shape.num_tokens - first) for first in range(0, shape.num_tokens, max_context))
        chunks = tuple(PrefillChunk(NOBODY, 0, (0,) * count, samples=False) for count in counts)
        return Batch.from_step(Step(0, prefills=chunks), {NOBODY: padding_row}, padding_row, shape)
