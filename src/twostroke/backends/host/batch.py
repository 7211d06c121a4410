"""A Step as arrays: complete when it is made, and gone with the step. Decode tokens come first and prefill chunks
follow, so that each phase's attention reads one contiguous range of tokens. A draft is a decode like others, one
position further. So attention computes it just as it would without drafts, if all drafts before it hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.rows import RowSet
from twostroke.core.step import DecodeSlot, PrefillChunk, Step
from twostroke.models.pooling import Wanted

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Int32Array  # [num_tokens]
    positions: Int32Array  # [num_tokens]
    num_decodes: int  # that many segments, and tokens, come first
    segment_first: Int32Array  # [num_segments] index of a segment's first token
    segment_count: Int32Array  # [num_segments] its tokens
    segment_start: Int32Array  # [num_segments] the position of its first token
    tables: tuple[Int32Array, ...]  # one for each KV group of the model, [num_segments, max blocks]
    logit_rows: Int32Array  # [num_logits] tokens whose logits, or last states, are wanted, in token order
    texts: Int32Array | None = None  # [num_tokens] 0, or 1 of the second of two texts; None: there is no second

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_segments(self) -> int:
        return len(self.segment_first)

    @staticmethod
    def from_step(
        step: Step,
        rows: RowSet,
        drafts: Mapping[int, tuple[int, ...]] | None = None,
        pooled: Wanted = "last",
    ) -> Batch:
        """`drafts` has the tokens to compute behind the own tokens of some slots. `pooled` says which tokens' states
        are wanted of a chunk that is pooled."""
        if not step.prefills and not drafts:
            return Batch._of_decodes(step.decodes, rows)
        seq_ids: list[int] = []
        token_ids: list[int] = []
        positions: list[int] = []
        for slot in step.decodes:
            row = rows[slot.seq_id]
            entering = (row.last_token, *(drafts or {}).get(slot.seq_id, ()))
            seq_ids += [slot.seq_id] * len(entering)
            token_ids += entering
            positions += range(row.length - 1, row.length - 1 + len(entering))
        num_decodes = len(token_ids)
        firsts, counts, starts = list(range(num_decodes)), [1] * num_decodes, list(positions)
        logit_rows = list(firsts)
        for chunk in step.prefills:
            first, count = len(token_ids), len(chunk.token_ids)
            firsts.append(first)
            counts.append(count)
            starts.append(chunk.start)
            token_ids.extend(chunk.token_ids)
            positions.extend(range(chunk.start, chunk.end))
            if chunk.prompt_logprobs is not None:
                logit_rows.extend(range(first, first + count))
            elif chunk.samples or (chunk.pools and pooled == "last"):
                logit_rows.append(first + count - 1)
            elif chunk.pools:
                logit_rows.extend(range(first, first + (1 if pooled == "first" else count)))
        seq_ids += [chunk.seq_id for chunk in step.prefills]
        per_row = [rows[seq_id].tables for seq_id in seq_ids]
        return Batch(
            token_ids=np.array(token_ids, dtype=np.int32),
            positions=np.array(positions, dtype=np.int32),
            num_decodes=num_decodes,
            segment_first=np.array(firsts, dtype=np.int32),
            segment_count=np.array(counts, dtype=np.int32),
            segment_start=np.array(starts, dtype=np.int32),
            tables=_stacked(per_row, rows.num_groups),
            logit_rows=np.array(logit_rows, dtype=np.int32),
            texts=_texts(step.prefills, rows, num_decodes),
        )

    @staticmethod
    def _of_decodes(slots: tuple[DecodeSlot, ...], rows: RowSet) -> Batch:
        """Returns the batch of a step of decodes alone. It is the most frequent step, and the one that its preparation
        delays most."""
        found = [rows[slot.seq_id] for slot in slots]
        positions = np.array([row.length - 1 for row in found], dtype=np.int32)
        numbers = np.arange(len(slots), dtype=np.int32)
        return Batch(
            token_ids=np.array([row.last_token for row in found], dtype=np.int32),
            positions=positions,
            num_decodes=len(slots),
            segment_first=numbers,
            segment_count=np.ones(len(slots), dtype=np.int32),
            segment_start=positions,
            tables=_stacked([row.tables for row in found], rows.num_groups),
            logit_rows=numbers,
        )


def _texts(chunks: tuple[PrefillChunk, ...], rows: RowSet, num_decodes: int) -> Int32Array | None:
    seconds = [rows[chunk.seq_id].second_text_at for chunk in chunks]
    if all(second is None for second in seconds):
        return None
    parts = [np.zeros(num_decodes, dtype=np.int32)]
    for chunk, second in zip(chunks, seconds, strict=True):
        positions = np.arange(chunk.start, chunk.end)
        parts.append((positions >= (chunk.end if second is None else second)).astype(np.int32))
    return np.concatenate(parts)


def _stacked(per_row: list[tuple[Int32Array, ...]], num_groups: int) -> tuple[Int32Array, ...]:
    """Returns a copy of the rows' tables, for each of the first groups [rows, max blocks]."""
    count, by_group = len(per_row), zip(*per_row, strict=True)
    return tuple(np.concatenate(group).reshape(count, -1) for group in islice(by_group, num_groups))
