"""Prefill attention: a chunk of one sequence's prompt, all its tokens at once. Each sees the context before the chunk
and the chunk up to itself, which a mask says; the work is matrix products: prefill is bound by arithmetic.

With latent attention keys and values are made of the kept latents first: for many queries that takes less arithmetic
than to bring each of them into the latents' wider space, as decode does."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.arithmetic import Array, soft_cap, softmax
from twostroke.backends.reference.kv_store import KVStore, Table
from twostroke.backends.reference.weights import LatentWeights
from twostroke.models.spec import GroupedAttention, LatentAttention


def attend_prefill(
    attention: GroupedAttention,
    sinks: Array | None,
    kv: KVStore,
    layer: int,
    queries: Array,
    first: int,
    table: Table,
) -> Array:
    """queries [chunk, heads, head_dim] of one sequence, at positions first, first + 1, ...; table [blocks].
    Returns [chunk, heads * head_dim]."""
    window = attention.window
    end = first + len(queries)
    # The chunk's first token looks back furthest: nothing before its window is read.
    start = 0 if window is None else max(0, first - window + 1)
    keys, values = kv.read(layer, table, start, end)  # [context, kv_heads, head_dim], the chunk itself included
    # Tokens that see each other both ways are all in one chunk.
    sees = visibility if attention.is_causal else neighbourhood
    visible = sees(first, end, start, window)  # [chunk, context]
    outputs = np.empty(queries.shape, dtype=np.float32)
    # One KV head at a time, with the query heads that share it: it bounds the memory that scores take.
    for kv_head in range(attention.num_kv_heads):
        heads = slice(kv_head * attention.queries_per_kv_head, (kv_head + 1) * attention.queries_per_kv_head)
        head_queries = queries[:, heads].transpose(1, 0, 2)  # [queries a KV head, chunk, head_dim]
        scores = head_queries @ keys[:, kv_head].T * np.float32(attention.scale)  # [.., chunk, context]
        scores = np.where(visible, soft_cap(scores, attention.softcap), np.float32(-np.inf))
        own_sinks = None if sinks is None else sinks[heads, None, None]
        mixed = softmax(scores, own_sinks) @ values[:, kv_head]  # [.., chunk, head_dim]
        outputs[:, heads] = mixed.transpose(1, 0, 2)
    return outputs.reshape(len(queries), -1)


def attend_latent_prefill(
    attention: LatentAttention,
    weights: LatentWeights,
    kv: KVStore,
    layer: int,
    queries: Array,
    first: int,
    table: Table,
) -> Array:
    """queries [chunk, heads, key_dim] of one sequence, at positions first, first + 1, ...; table [blocks]. The context
    before the chunk is expanded like the chunk itself, from what is kept of it: however a prompt is cut, the numbers
    are the same. Returns [chunk, heads * value_dim]."""
    end = first + len(queries)
    (kept,) = kv.read(layer, table, 0, end)  # [context, rank + rotated], the chunk itself included
    latents, rotated = kept[:, : attention.rank], kept[:, attention.rank :]
    visible = visibility(first, end, 0, None)  # [chunk, context]
    outputs = np.empty((len(queries), attention.num_heads, attention.value_dim), dtype=np.float32)
    for head in range(attention.num_heads):  # one at a time: expanded, all of them would take many times the KV
        keys = np.concatenate([latents @ weights.key_b[head].T, rotated], axis=1)  # [context, key_dim]
        scores = queries[:, head] @ keys.T * np.float32(attention.scale)  # [chunk, context]
        shares = softmax(np.where(visible, scores, np.float32(-np.inf)))
        outputs[:, head] = shares @ (latents @ weights.value_b[head].T)
    return outputs.reshape(len(queries), -1)


def visibility(first: int, end: int, start: int, window: int | None) -> npt.NDArray[np.bool_]:
    """Which of the keys at start..end-1 each query at first..end-1 may read  # [end - first, end - start]

    Causal: none that come after it. Windowed: none at or before `position - window`. Every query sees itself."""
    queries = np.arange(first, end)[:, None]
    keys = np.arange(start, end)[None, :]
    causal = keys <= queries
    return causal if window is None else causal & (keys > queries - window)


def neighbourhood(first: int, end: int, start: int, window: int | None) -> npt.NDArray[np.bool_]:
    """The same of an encoder: every key, or those less than a window away on either side."""
    queries = np.arange(first, end)[:, None]
    keys = np.arange(start, end)[None, :]
    near: npt.NDArray[np.bool_] = np.abs(queries - keys) < (end + 1 if window is None else window)
    return near
