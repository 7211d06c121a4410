"""A Step with prefill chunks, rendered as arrays for the device: born complete, dead with the step. Decode tokens come
first, one a sequence; chunks follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.backends.cuda.kernels.embedding import FROM_ROW
from twostroke.core.step import Step

Integers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Integers  # [num_tokens]; FROM_ROW for decodes, whose token only the device knows
    rows: Integers  # [num_tokens]
    positions: Integers  # [num_tokens]
    num_decodes: int
    segment_first: Integers  # [num_segments] index of a chunk's first token
    segment_count: Integers  # [num_segments] its tokens
    segment_start: Integers  # [num_segments] the position of its first token
    segment_rows: Integers  # [num_segments]
    sampled_tokens: Integers  # [num_sampled] the tokens whose logits are sampled, decodes first
    sampled_rows: Integers  # [num_sampled]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @staticmethod
    def from_step(step: Step, row_of: Mapping[int, int], *, pad_to: int = 0, padding_row: int = 0) -> Batch:
        """`pad_to`: at least so many tokens; those that pad belong to the padding row, and to no segment."""
        decodes, chunks = step.decodes, step.prefills
        counts = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int32)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        chunk_rows = np.array([row_of[chunk.seq_id] for chunk in chunks], dtype=np.int32)
        firsts = len(decodes) + np.cumsum(counts, dtype=np.int32) - counts
        num_tokens = max(step.num_tokens, pad_to)
        token_ids = np.zeros(num_tokens, dtype=np.int32)
        rows = np.full(num_tokens, padding_row, dtype=np.int32)
        positions = np.zeros(num_tokens, dtype=np.int32)
        token_ids[: len(decodes)] = FROM_ROW
        rows[: len(decodes)] = [row_of[slot.seq_id] for slot in decodes]
        positions[: len(decodes)] = [slot.position for slot in decodes]
        for chunk, first, row in zip(chunks, firsts.tolist(), chunk_rows.tolist(), strict=True):
            end = first + len(chunk.token_ids)
            token_ids[first:end] = chunk.token_ids
            rows[first:end] = row
            positions[first:end] = np.arange(chunk.start, chunk.end, dtype=np.int32)
        samples = np.array([chunk.samples for chunk in chunks], dtype=bool)
        decode_tokens = np.arange(len(decodes), dtype=np.int32)
        sampled_tokens = np.concatenate([decode_tokens, (firsts + counts - 1)[samples]])
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
            sampled_rows=rows[sampled_tokens],
        )

    @staticmethod
    def of_padding(num_tokens: int, padding_row: int) -> Batch:
        """A chunk of nobody's: what graphs are captured with, and kernels compiled."""

        def zeros(count: int) -> Integers:
            return np.zeros(count, dtype=np.int32)

        rows = np.full(num_tokens, padding_row, dtype=np.int32)
        return Batch(
            token_ids=zeros(num_tokens),
            rows=rows,
            positions=np.arange(num_tokens, dtype=np.int32),
            num_decodes=0,
            segment_first=zeros(1),
            segment_count=np.full(1, num_tokens, dtype=np.int32),
            segment_start=zeros(1),
            segment_rows=rows[:1],
            sampled_tokens=zeros(1),
            sampled_rows=rows[:1],
        )
