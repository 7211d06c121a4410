"""Decode attention: one new token a sequence, against everything before it. All that is read is visible, so there is no
mask; the work is a pass over the KV store, which is why decode is bound by memory and not by arithmetic.

With latent attention the pass is over one vector a token: queries are brought into its space, and never is a key or a
value made of it."""

from __future__ import annotations

import numpy as np

from twostroke.backends.host.arithmetic import Array, soft_cap, softmax
from twostroke.backends.reference.kv_store import KVStore, Table
from twostroke.backends.reference.weights import LatentWeights
from twostroke.models.spec import GroupedAttention, LatentAttention


def attend_decode(
    attention: GroupedAttention,
    sinks: Array | None,
    kv: KVStore,
    layer: int,
    queries: Array,
    positions: Table,
    tables: Table,
) -> Array:
    """queries [num_decodes, heads, head_dim], a sequence each; positions [num_decodes]; tables [num_decodes, blocks].
    Returns [num_decodes, heads * head_dim]."""
    window = attention.window
    outputs = np.empty((len(queries), attention.query_width), dtype=np.float32)
    for index, (query, position, table) in enumerate(zip(queries, positions, tables, strict=True)):
        start = 0 if window is None else max(0, int(position) - window + 1)
        keys, values = kv.read(layer, table, start, int(position) + 1)  # [context, kv_heads, head_dim]
        outputs[index] = _attend_one(attention, sinks, query, keys, values)
    return outputs


def _attend_one(attention: GroupedAttention, sinks: Array | None, query: Array, keys: Array, values: Array) -> Array:
    """Grouped-query attention: heads share keys and values in groups of `queries_per_kv_head`, in order."""
    grouped = query.reshape(attention.num_kv_heads, attention.queries_per_kv_head, attention.head_dim)
    # [kv_heads, queries, head_dim] @ [kv_heads, head_dim, context] -> [kv_heads, queries, context]
    scores = grouped @ keys.transpose(1, 2, 0) * np.float32(attention.scale)
    own_sinks = None if sinks is None else sinks.reshape(attention.num_kv_heads, -1, 1)
    weights = softmax(soft_cap(scores, attention.softcap), own_sinks)
    # [kv_heads, queries, context] @ [kv_heads, context, head_dim] -> [kv_heads, queries, head_dim]
    return np.asarray(weights @ values.transpose(1, 0, 2)).reshape(-1)


def attend_latent_decode(
    attention: LatentAttention,
    weights: LatentWeights,
    kv: KVStore,
    layer: int,
    queries: Array,
    positions: Table,
    tables: Table,
) -> Array:
    """queries [num_decodes, heads, key_dim], a sequence each; positions [num_decodes]; tables [num_decodes, blocks].
    Returns [num_decodes, heads * value_dim].

    A score is q . (B c) for a query q, a latent c and what expands it, B; that is (B^T q) . c, and B^T q is the same
    for all tokens of the context. So is what makes values: it waits until the latents are summed."""
    rank, scale = attention.rank, np.float32(attention.scale)
    outputs = np.empty((len(queries), attention.num_heads * attention.value_dim), dtype=np.float32)
    for index, (query, position, table) in enumerate(zip(queries, positions, tables, strict=True)):
        (kept,) = kv.read(layer, table, 0, int(position) + 1)  # [context, rank + rotated]
        plain, rotated = query[:, : attention.plain_dim], query[:, attention.plain_dim :]
        # [heads, 1, plain] @ [heads, plain, rank] -> [heads, rank]
        absorbed = (plain[:, None] @ weights.key_b)[:, 0]
        scores = (absorbed @ kept[:, :rank].T + rotated @ kept[:, rank:].T) * scale  # [heads, context]
        mixed = softmax(scores) @ kept[:, :rank]  # [heads, rank]
        # [heads, value, rank] @ [heads, rank, 1] -> [heads, value]
        outputs[index] = (weights.value_b @ mixed[:, :, None]).reshape(-1)
    return outputs
