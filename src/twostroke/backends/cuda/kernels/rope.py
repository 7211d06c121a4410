"""What stands between the qkv product and attention: the norms of queries and keys where a family has them, the rotary
embedding, and the write of keys and values to the paged cache. One pass, mathematics in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostroke.backends.cuda.kernels import paged
from twostroke.backends.cuda.kernels.paged import TOKEN_SCALES, PagedKV
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.whole_numbers import cdiv, next_power_of_2

FEW_TOKENS: Final = 64
"""Up to here a token's heads are spread over many small programs, as latency is what counts; above, a program takes
more of them, as it is the memory's pace."""
LARGEST: Final = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Number of a cache of one byte each."""
LEAST_SCALE = tl.constexpr(2.0**-100)
"""Of a head of zeros."""
SCALE_BYTES = tl.constexpr(paged.SCALE_BYTES)


@dataclass(frozen=True, slots=True)
class HeadRules:
    """What is done to the heads of a token, beside turning them. A constant of kernels."""

    norms_turned: bool = False
    """Their norm is behind the turn."""
    norms_values: bool = False
    """Values are normed too, without a weight."""
    made: int = 3
    """Of queries, keys and values, how many the product made. Without values these are the keys as it made them;
    without both, others have stored them."""


PLAIN_HEADS: Final = HeadRules()


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Where the numbers of a token's heads lie, in the product's row and in the cache. A constant of kernels, which
    read its properties too."""

    heads: int
    kv_heads: int
    """0: the product made none that are stored."""
    head_dim: int
    half: int
    """Pairs that are turned."""
    stride: int
    """Of the cache, from one head to the next."""
    page: int
    largest: float
    """Number of the cache, where it is of one byte."""
    token_scales: bool
    programs: int
    """Of a token."""
    program_heads: int
    """Of one program."""

    @property
    def half_block(self) -> int:
        return next_power_of_2(self.half)

    @property
    def rest_block(self) -> int:
        """Numbers of a head that are not turned, padded; 0: there are none."""
        rest = self.head_dim - 2 * self.half
        return next_power_of_2(rest) if rest else 0

    @property
    def first_value(self) -> int:
        """Heads ahead of the values'."""
        return self.heads + self.kv_heads

    @property
    def all_heads(self) -> int:
        return self.heads + 2 * self.kv_heads


def rope_and_store(
    qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; queries are turned in place
    cos_sin: torch.Tensor,  # float32 [max_context, rope_dim]: cosines of the pairs, then sines
    positions: torch.Tensor,  # int32 [num_tokens]
    rows: torch.Tensor,  # int32 [num_tokens]
    kv: PagedKV,
    q_norm: torch.Tensor | None = None,  # [head_dim]
    k_norm: torch.Tensor | None = None,  # [head_dim]
    *,
    eps: float = 0.0,
    growth: torch.Tensor | None = None,  # float32 [max_context]
    rules: HeadRules = PLAIN_HEADS,
    heads_per_program: int | None = None,
) -> None:
    """Turn queries in place; turn keys and write them and the values to page table[row, position // page], slot
    position % page, rounded to a byte each where the cache has such. Dimension i is paired with i + rope_dim / 2;
    those from rope_dim on are not turned. `growth`: what the queries of each position are multiplied by."""
    assert rules.made == 1 or (q_norm is None) == (k_norm is None)
    assert kv.keys.stride() == kv.values.stride()
    num_tokens, rope_dim = len(positions), cos_sin.shape[1]
    _, num_kv_heads, page, head_dim = kv.keys.shape
    num_heads = qkv.shape[1] // head_dim - (rules.made - 1) * num_kv_heads
    num_kv_heads = num_kv_heads if rules.made > 1 else 0
    all_heads = num_heads + 2 * num_kv_heads
    if num_tokens == 0:
        return
    if heads_per_program is None:
        elements = 512 if num_tokens <= FEW_TOKENS else 2048
        heads_per_program = max(elements // next_power_of_2(head_dim), 1)
    heads_per_program = min(heads_per_program, next_power_of_2(all_heads))
    layout = HeadLayout(
        num_heads,
        num_kv_heads,
        head_dim,
        half=rope_dim // 2,
        stride=kv.keys.stride(1),
        page=page,
        largest=LARGEST.get(kv.keys.dtype, 1.0),
        token_scales=kv.scaled == TOKEN_SCALES,
        programs=cdiv(all_heads, heads_per_program),
        program_heads=heads_per_program,
    )
    dependent(_rope_and_store, (num_tokens * layout.programs,), qkv.device)(
        qkv, cos_sin, growth, positions, rows, kv.table, kv.keys, kv.values, kv.key_scales, kv.value_scales, q_norm,
        k_norm, eps, qkv.stride(0), kv.table.stride(0), kv.keys.stride(0), LAYOUT=layout, RULES=rules,
        num_warps=min(max(heads_per_program * head_dim // 512, 1), 8),
    )  # fmt: skip


@triton.jit
def _store_part(
    x, scale, head, column, mask, qkv_row, k_slot, v_slot, WRITE_QUERIES: tl.constexpr, LAYOUT: tl.constexpr
):  # fmt: skip
    """x float32 [heads, columns]: each head's columns to where its kind belongs, queries back, keys and values to
    their slots."""
    if WRITE_QUERIES:
        own = qkv_row + head * LAYOUT.head_dim + column
        tl.store(own, x.to(qkv_row.dtype.element_ty), mask=mask & (head < LAYOUT.heads))
    kept = x
    if scale is not None:
        kept = tl.clamp(x / scale, -LAYOUT.largest, LAYOUT.largest)
        if k_slot.dtype.element_ty == tl.int8:
            kept = tl.floor(kept + 0.5)
    kept = kept.to(k_slot.dtype.element_ty)
    is_key = (head >= LAYOUT.heads) & (head < LAYOUT.first_value)
    tl.store(k_slot + (head - LAYOUT.heads) * LAYOUT.stride + column, kept, mask=mask & is_key)
    is_value = (head >= LAYOUT.first_value) & (head < LAYOUT.all_heads)
    tl.store(v_slot + (head - LAYOUT.first_value) * LAYOUT.stride + column, kept, mask=mask & is_value)


@triton.jit
def _scale_of(
    largest, head, k_scales, v_scales, block, place, cache_stride, LAYOUT: tl.constexpr
):  # fmt: skip
    """What keys and values of each head are divided by  # [heads, 1]. `largest` [heads, 1] of a head: where a scale is
    a token's own it is found by it, and written down."""
    is_key = (head >= LAYOUT.heads) & (head < LAYOUT.first_value)
    is_value = (head >= LAYOUT.first_value) & (head < LAYOUT.all_heads)
    if LAYOUT.token_scales:
        scale = tl.maximum(largest / LAYOUT.largest, LEAST_SCALE)
        own = block.to(tl.int64) * (cache_stride // SCALE_BYTES) + place
        tl.store(k_scales + own + (head - LAYOUT.heads) * (LAYOUT.stride // SCALE_BYTES), scale, mask=is_key)
        tl.store(v_scales + own + (head - LAYOUT.first_value) * (LAYOUT.stride // SCALE_BYTES), scale, mask=is_value)
    else:
        scale = tl.load(k_scales + head - LAYOUT.heads, mask=is_key, other=1.0)
        scale *= tl.load(v_scales + head - LAYOUT.first_value, mask=is_value, other=1.0)
    return scale


@triton.jit
def _normed(
    first, second, rest, q_norm, k_norm, eps, column, rest_column, is_query, is_value, LAYOUT: tl.constexpr,
    RULES: tl.constexpr,
):  # fmt: skip
    """Each head by itself  # [heads, columns] of each part"""
    squares = tl.sum(first * first + second * second, 1)
    if LAYOUT.rest_block:
        squares += tl.sum(rest * rest, 1)
    scale = tl.rsqrt(squares / LAYOUT.head_dim + eps)[:, None]
    if not RULES.norms_values:
        scale = tl.where(is_value, 1.0, scale)
    is_turned = column < LAYOUT.half
    first *= scale * _norm_weight(q_norm, k_norm, column, is_turned, is_query, is_value)
    second *= scale * _norm_weight(q_norm, k_norm, LAYOUT.half + column, is_turned, is_query, is_value)
    if LAYOUT.rest_block:
        rest *= scale * _norm_weight(q_norm, k_norm, rest_column, rest_column < LAYOUT.head_dim, is_query, is_value)
    return first, second, rest


@triton.jit
def _norm_weight(q_norm, k_norm, column, mask, is_query, is_value):
    """The factor of each head's columns: [heads, columns]."""
    q_weight = tl.load(q_norm + column, mask=mask, other=0.0).to(tl.float32)
    k_weight = q_weight
    if k_norm is not None:
        k_weight = tl.load(k_norm + column, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_value, 1.0, tl.where(is_query, q_weight, k_weight))


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["positions", "rows"])
def _rope_and_store(
    qkv, cos_sin, growth, positions, rows, table, k_cache, v_cache, k_scales, v_scales, q_norm, k_norm, eps, qkv_stride,
    table_stride, cache_stride, LAYOUT: tl.constexpr, RULES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # A token's programs lie side by side, so that its cosines are read from memory once.
    token = tl.program_id(0) // LAYOUT.programs
    first_head = (tl.program_id(0) % LAYOUT.programs) * LAYOUT.program_heads
    head = first_head + tl.arange(0, LAYOUT.program_heads)[:, None]
    column = tl.arange(0, LAYOUT.half_block)[None, :]
    in_head = head < LAYOUT.all_heads
    mask = in_head & (column < LAYOUT.half)
    is_query = head < LAYOUT.heads
    is_value = head >= LAYOUT.first_value
    if PDL:
        gdc_launch_dependents()
    # Where a token stands was known before the step began: only its heads are waited for.
    position = tl.load(positions + token)
    block = tl.load(table + tl.load(rows + token).to(tl.int64) * table_stride + position // LAYOUT.page)
    slot = block.to(tl.int64) * cache_stride + (position % LAYOUT.page) * LAYOUT.head_dim
    k_slot = k_cache + slot
    v_slot = v_cache + slot
    angles = cos_sin + position.to(tl.int64) * (2 * LAYOUT.half) + column
    cos = tl.load(angles, mask=column < LAYOUT.half, other=0.0)
    sin = tl.load(angles + LAYOUT.half, mask=column < LAYOUT.half, other=0.0)
    if growth is not None:
        grown = tl.where(is_query, tl.load(growth + position), 1.0)
    if PDL:
        gdc_wait()
    qkv_row = qkv + token.to(tl.int64) * qkv_stride
    source = qkv_row + head * LAYOUT.head_dim
    if RULES.made == 2:
        source = qkv_row + tl.where(is_value, head - LAYOUT.kv_heads, head) * LAYOUT.head_dim
    first = tl.load(source + column, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + LAYOUT.half + column, mask=mask, other=0.0).to(tl.float32)
    rest_column, rest = column, first  # which nothing reads where all dimensions are turned
    if LAYOUT.rest_block:
        rest_column = 2 * LAYOUT.half + tl.arange(0, LAYOUT.rest_block)[None, :]
        rest_mask = in_head & (rest_column < LAYOUT.head_dim)
        rest = tl.load(source + rest_column, mask=rest_mask, other=0.0).to(tl.float32)
    if q_norm is not None and not RULES.norms_turned:
        first, second, rest = _normed(
            first, second, rest, q_norm, k_norm, eps, column, rest_column, is_query, is_value, LAYOUT, RULES,
        )  # fmt: skip
    turned_first = tl.where(is_value, first, first * cos - second * sin)
    turned_second = tl.where(is_value, second, second * cos + first * sin)
    if q_norm is not None and RULES.norms_turned:
        turned_first, turned_second, rest = _normed(
            turned_first, turned_second, rest, q_norm, k_norm, eps, column, rest_column, is_query, is_value, LAYOUT,
            RULES,
        )  # fmt: skip
    if growth is not None:
        turned_first *= grown
        turned_second *= grown
        if LAYOUT.rest_block:
            rest *= grown
    scale = None
    if k_scales is not None:
        largest = tl.max(tl.maximum(tl.abs(turned_first), tl.abs(turned_second)), 1)
        if LAYOUT.rest_block:
            largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))
        scale = _scale_of(
            largest[:, None], head, k_scales, v_scales, block, position % LAYOUT.page, cache_stride, LAYOUT
        )  # fmt: skip
    _store_part(turned_first, scale, head, column, mask, qkv_row, k_slot, v_slot, True, LAYOUT)
    _store_part(turned_second, scale, head, LAYOUT.half + column, mask, qkv_row, k_slot, v_slot, True, LAYOUT)
    if LAYOUT.rest_block:
        # What is neither turned nor normed nor grown is already in its place in the queries.
        _store_part(
            rest, scale, head, rest_column, rest_mask, qkv_row, k_slot, v_slot,
            (q_norm is not None) or (growth is not None), LAYOUT,
        )  # fmt: skip
