"""Paged attention said plainly in float64, and random caches to try it on: no split, no tile, no online softmax."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from twostroke.backends.cuda.kernels.paged import PagedKV
from twostroke.backends.cuda.one_byte_kv import OneByteKV

LARGEST = {"fp8": 448.0, "int8": 127.0}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class PagedCache:
    """A cache in which every context has its own pages, in random order, and all else is NaN."""

    k: torch.Tensor  # [num_blocks + 1, kv_heads, block_size, head_dim]
    v: torch.Tensor
    table: torch.Tensor  # int32 [num_rows + 1, table_len]; the last row is padding, all scratch
    contexts: list[int]
    one_byte: OneByteKV | None = None
    """How the cache is kept, where it is not as it is; `k` and `v` then are what its numbers stand for."""

    @property
    def kv(self):
        if self.one_byte is None:
            return PagedKV(self.k, self.v, self.table)
        page = self.k.shape[2]
        return self.one_byte.paged(
            0, as_bytes(self.k, self.one_byte, 0), as_bytes(self.v, self.one_byte, 1), page, self.table
        )

    @classmethod
    def random(cls, rng, contexts, shape, device, spare_pages=1, one_byte=None):
        """`contexts[r]` keys for row r. Positions behind a context, pages of nobody and the scratch page are NaN."""
        pages = [-(-context // shape.page) for context in contexts]
        num_blocks = sum(pages) + spare_pages
        order = rng.permutation(num_blocks)
        table = np.full((len(contexts) + 1, max(pages) + 2), num_blocks, dtype=np.int32)
        blocks = (num_blocks + 1, shape.kv_heads, shape.page, shape.head_dim)
        k, v = np.full(blocks, np.nan, np.float32), np.full(blocks, np.nan, np.float32)
        given = 0
        for row, (context, count) in enumerate(zip(contexts, pages, strict=True)):
            table[row, :count] = order[given : given + count]
            given += count
            for page, block in enumerate(table[row, :count]):
                filled = min(shape.page, context - page * shape.page)
                k[block, :, :filled] = rng.standard_normal((shape.kv_heads, filled, shape.head_dim))
                v[block, :, :filled] = rng.standard_normal((shape.kv_heads, filled, shape.head_dim))

        def put(array):
            return torch.from_numpy(array).to(dtype=shape.dtype, device=device)

        k, v = put(k), put(v)
        if one_byte is not None:
            k, v = (rounded(part, one_byte, number).to(shape.dtype) for number, part in enumerate((k, v)))
        return cls(k, v, torch.from_numpy(table).to(device), list(contexts), one_byte)

    def keys_and_values(self, row, end):
        """The first `end` keys and values of a row, each float64 [end, kv_heads, head_dim]."""
        block_size = self.k.shape[2]
        blocks = self.table[row, : -(-end // block_size)].long()

        def gather(cache):
            pages = cache[blocks].to(torch.float64).cpu().numpy()  # [pages, kv_heads, block_size, head_dim]
            return pages.transpose(0, 2, 1, 3).reshape(-1, pages.shape[1], pages.shape[3])[:end]

        return gather(self.k), gather(self.v)


def scale_of(part, one_byte, number):
    """What each head of each token is divided by, in plain words: its own largest number fits exactly."""
    if one_byte.of_heads:
        return one_byte.of_heads[0][number][None, :, None, None].float()
    return (part.float().abs().amax(3, keepdim=True) / LARGEST[one_byte.name]).clamp(min=2.0**-100)


def rounded(part, one_byte, number):
    """[blocks, kv_heads, page, head_dim] float32: what is left of numbers that are kept in a byte each."""
    scale, most = scale_of(part, one_byte, number), LARGEST[one_byte.name]
    codes = (part.float() / scale).clamp(-most, most)
    return (codes.to(torch.float8_e4m3fn).float() if one_byte.name == "fp8" else codes.round()) * scale


def as_bytes(part, one_byte, number):
    """uint8 [blocks, kv_heads, bytes], laid out by hand: NaN is a NaN of float8, and the scale of its token."""
    scale, shape = scale_of(part, one_byte, number), part.shape
    codes = part.float() / scale
    kept = codes.to(torch.float8_e4m3fn) if one_byte.name == "fp8" else codes.nan_to_num().round().to(torch.int8)
    held = [kept.view(torch.uint8).reshape(*shape[:2], -1)]
    if not one_byte.of_heads:
        held.append(scale[..., 0].contiguous().view(torch.uint8))
    return torch.cat(held, 2).contiguous()


def attend(query, cache, row, position, scoring):
    """One token's attention, float64 [heads, head_dim]; query is [heads, head_dim]."""
    heads = query.shape[0]
    keys, values = cache.keys_and_values(row, position + 1)
    first = 0 if scoring.window is None else max(0, position - scoring.window + 1)
    group = heads // keys.shape[1]
    result = np.empty((heads, keys.shape[2]))
    for head in range(heads):
        scores = keys[first:, head // group] @ query[head] * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * np.tanh(scores / scoring.softcap)
        sink = -np.inf if scoring.sinks is None else float(scoring.sinks[head])
        peak = max(scores.max(), sink)
        weights = np.exp(scores - peak)
        result[head] = weights / (weights.sum() + np.exp(sink - peak)) @ values[first:, head // group]
    return result


def random_sinks(rng, heads, device):
    """Of a score that takes nearly all, one that takes nearly nothing, and some between."""
    found = rng.standard_normal(heads) * 2
    found[0], found[-1] = 12.0, -30.0
    return torch.from_numpy(found.astype(np.float32)).to(device)


def random_queries(rng, num_tokens, shape, device):
    """The query part of a fused qkv buffer, so that tokens lie further apart than their heads reach."""
    width = shape.heads * shape.head_dim
    fused = rng.standard_normal((num_tokens, width + 2 * shape.kv_heads * shape.head_dim)).astype(np.float32)
    buffer = torch.from_numpy(fused).to(dtype=shape.dtype, device=device)
    return buffer[:, :width].view(num_tokens, shape.heads, shape.head_dim)


def assert_near(out, expected, dtype):
    got = out.to(torch.float64).cpu().numpy().reshape(expected.shape)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
