"""A Batch as bytes, for the ranks that compute it too: whole numbers alone, in the order that both sides know."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from twostroke.backends.host.batch import Batch

_COUNTS = 5
"""In front: of decodes, tokens, segments, rows whose logits are wanted, KV groups. Then each group's table's width."""


def to_bytes(batch: Batch, block_size: int) -> bytes:
    """Of block tables, as much as its longest sequence has: what lies behind is never read."""
    width = int(batch.positions.max()) // block_size + 1
    tables = [table[:, :width] for table in batch.tables]
    counts = (batch.num_decodes, batch.num_tokens, batch.num_segments, len(batch.logit_rows), len(tables))
    head = np.array([*counts, *(table.shape[1] for table in tables)], dtype=np.int32)
    by_token = (batch.token_ids, batch.positions)
    by_segment = (batch.segment_first, batch.segment_count, batch.segment_start)
    arrays = (head, *by_token, *by_segment, batch.logit_rows, *tables)
    return b"".join(array.astype(np.int32, copy=False).tobytes() for array in arrays)


def from_bytes(data: bytearray | memoryview) -> Batch:
    """Its arrays are views of `data`."""
    numbers = np.frombuffer(data, dtype=np.int32)
    num_decodes, tokens, segments, logits, groups = numbers[:_COUNTS].tolist()
    widths = numbers[_COUNTS : _COUNTS + groups].tolist()
    sizes = [tokens] * 2 + [segments] * 3 + [logits] + [segments * width for width in widths]
    bounds = np.cumsum([_COUNTS + groups, *sizes]).tolist()
    parts = [numbers[first:last] for first, last in pairwise(bounds)]
    token_ids, positions, first, count, start, logit_rows, *tables = parts
    return Batch(
        token_ids=token_ids,
        positions=positions,
        num_decodes=num_decodes,
        segment_first=first,
        segment_count=count,
        segment_start=start,
        tables=tuple(table.reshape(segments, -1) for table in tables),
        logit_rows=logit_rows,
    )
