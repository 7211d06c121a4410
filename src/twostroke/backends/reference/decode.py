"""Decode attention: one new token a sequence, against everything before it. All that is read is visible, so there is no
mask; the work is a pass over the KV store, which is why decode is bound by memory and not by arithmetic."""

from __future__ import annotations

import numpy as np

from twostroke.backends.host.arithmetic import Array, soft_cap, softmax
from twostroke.backends.reference.kv_store import KVStore, Table
from twostroke.models.spec import GroupedAttention


def attend_decode(
    attention: GroupedAttention, kv: KVStore, layer: int, queries: Array, positions: Table, tables: Table
) -> Array:
    """queries [num_decodes, heads, head_dim], a sequence each; positions [num_decodes]; tables [num_decodes, blocks].
    Returns [num_decodes, heads * head_dim]."""
    window = attention.window
    outputs = np.empty((len(queries), attention.query_width), dtype=np.float32)
    for index, (query, position, table) in enumerate(zip(queries, positions, tables, strict=True)):
        start = 0 if window is None else max(0, int(position) - window + 1)
        keys, values = kv.read(layer, table, start, int(position) + 1)  # [context, kv_heads, head_dim]
        outputs[index] = _attend_one(attention, query, keys, values)
    return outputs


def _attend_one(attention: GroupedAttention, query: Array, keys: Array, values: Array) -> Array:
    """Grouped-query attention: heads share keys and values in groups of `queries_per_kv_head`, in order."""
    grouped = query.reshape(attention.num_kv_heads, attention.queries_per_kv_head, attention.head_dim)
    # [kv_heads, queries, head_dim] @ [kv_heads, head_dim, context] -> [kv_heads, queries, context]
    scores = grouped @ keys.transpose(1, 2, 0) * np.float32(attention.scale)
    weights = softmax(soft_cap(scores, attention.softcap))
    # [kv_heads, queries, context] @ [kv_heads, context, head_dim] -> [kv_heads, queries, head_dim]
    return np.asarray(weights @ values.transpose(1, 0, 2)).reshape(-1)
