"""What stands between the products of latent attention and its scores: the norm of a token's latent, the rotary
embedding of what it keeps beside it and of its queries, and the write to the paged cache. One pass, mathematics in
float32. Pairs stay where they are, whichever dimensions make one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.whole_numbers import cdiv, next_power_of_2

PROGRAM_ELEMENTS: Final = 2048
"""Of queries that a program takes."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentKV:
    """One layer's latents, each with its rotated numbers behind it, and the pages of each row."""

    cache: torch.Tensor  # [num_blocks + 1, page, rank + rotated], contiguous
    table: torch.Tensor  # int32 [num_rows, table_len]


@dataclass(frozen=True, slots=True, eq=False)
class Turning:
    """How a layer rotates, and what queries are multiplied by."""

    cos_sin: torch.Tensor  # float32 [max_context, rotated]: cosines of the pairs, then sines
    neighbours: bool  # pairs are 2 i and 2 i + 1; else i and i + rotated / 2
    growth: torch.Tensor | None = None  # float32 [max_context]


def turn_and_keep(
    queries: torch.Tensor,  # [num_tokens, heads, plain + rotated], heads contiguous, any token stride; turned in place
    kept: torch.Tensor,  # [num_tokens, rank + rotated], any token stride
    norm: torch.Tensor,  # [rank]
    turning: Turning,
    positions: torch.Tensor,  # int32 [num_tokens]
    rows: torch.Tensor,  # int32 [num_tokens]
    kv: LatentKV,
    latents: torch.Tensor,  # [num_tokens, rank], written, as the cache is
    rotated: torch.Tensor,  # [num_tokens, rotated], written, as the cache is
    absorbed: torch.Tensor,  # [num_tokens, heads, rank + rotated], contiguous; the rotated parts are written
    *,
    eps: float,
) -> None:
    """Turn the last dimensions of queries in place; norm and turn what a token keeps, and write it to page table[row,
    position // page], slot position % page, and to where this step's own prompts read it. What was turned of queries
    goes to `absorbed`, too, where the rest of them comes to."""
    num_tokens, heads, key_dim = queries.shape
    rotated_dim, rank = rotated.shape[1], latents.shape[1]
    if num_tokens == 0:
        return
    assert all(each.is_contiguous() for each in (kv.cache, latents, rotated, absorbed))
    plain, half = key_dim - rotated_dim, rotated_dim // 2
    program_heads = min(max(PROGRAM_ELEMENTS // next_power_of_2(key_dim), 1), next_power_of_2(heads))
    groups = 1 + cdiv(heads, program_heads)
    dependent(_turn_and_keep, (num_tokens * groups,), queries.device)(
        queries, kept, norm, turning.cos_sin, turning.growth, positions, rows, kv.table, kv.cache, latents, rotated,
        absorbed, eps, queries.stride(0), kept.stride(0), kv.table.stride(0), HEADS=heads, PLAIN=plain, HALF=half,
        RANK=rank, PAGE=kv.cache.shape[1], NEIGHBOURS=turning.neighbours, PROGRAM_HEADS=program_heads, GROUPS=groups,
        HALF_BLOCK=next_power_of_2(half), RANK_BLOCK=next_power_of_2(rank), PLAIN_BLOCK=next_power_of_2(plain),
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["positions", "rows"])
def _turn_and_keep(
    queries, kept, norm, cos_sin, growth, positions, rows, table, cache, latents, rotated, absorbed, eps, query_stride,
    kept_stride, table_stride, HEADS: tl.constexpr, PLAIN: tl.constexpr, HALF: tl.constexpr, RANK: tl.constexpr,
    PAGE: tl.constexpr, NEIGHBOURS: tl.constexpr, PROGRAM_HEADS: tl.constexpr, GROUPS: tl.constexpr,
    HALF_BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr, PLAIN_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token's first program is for what it keeps, the others for some of its queries' heads each."""
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    if PDL:
        gdc_launch_dependents()
    # Where a token stands was known before the step began.
    position = tl.load(positions + token)
    pair = tl.arange(0, HALF_BLOCK)
    angles = cos_sin + position.to(tl.int64) * (2 * HALF) + pair
    cos = tl.load(angles, mask=pair < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=pair < HALF, other=0.0)
    first_at, second_at = pair, pair + HALF
    if NEIGHBOURS:
        first_at, second_at = 2 * pair, 2 * pair + 1
    if PDL:
        gdc_wait()
    if group == 0:
        page = tl.load(table + tl.load(rows + token).to(tl.int64) * table_stride + position // PAGE).to(tl.int64)
        slot = cache + (page * PAGE + position % PAGE) * (RANK + 2 * HALF)
        own = kept + token * kept_stride
        column = tl.arange(0, RANK_BLOCK)
        mask = column < RANK
        latent = tl.load(own + column, mask=mask, other=0.0).to(tl.float32)
        latent *= tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
        latent *= tl.load(norm + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(slot + column, latent.to(cache.dtype.element_ty), mask=mask)
        tl.store(latents + token * RANK + column, latent.to(latents.dtype.element_ty), mask=mask)
        held = pair < HALF
        first = tl.load(own + RANK + first_at, mask=held, other=0.0).to(tl.float32)
        second = tl.load(own + RANK + second_at, mask=held, other=0.0).to(tl.float32)
        turned_first = (first * cos - second * sin).to(cache.dtype.element_ty)
        turned_second = (second * cos + first * sin).to(cache.dtype.element_ty)
        tl.store(slot + RANK + first_at, turned_first, mask=held)
        tl.store(slot + RANK + second_at, turned_second, mask=held)
        tl.store(rotated + token * (2 * HALF) + first_at, turned_first, mask=held)
        tl.store(rotated + token * (2 * HALF) + second_at, turned_second, mask=held)
    else:
        head = (group - 1) * PROGRAM_HEADS + tl.arange(0, PROGRAM_HEADS)[:, None]
        own_heads = queries + token * query_stride + head * (PLAIN + 2 * HALF)
        head_held = (head < HEADS) & (pair < HALF)[None, :]
        firsts = tl.load(own_heads + PLAIN + first_at[None, :], mask=head_held, other=0.0).to(tl.float32)
        seconds = tl.load(own_heads + PLAIN + second_at[None, :], mask=head_held, other=0.0).to(tl.float32)
        turned_firsts = firsts * cos[None, :] - seconds * sin[None, :]
        turned_seconds = seconds * cos[None, :] + firsts * sin[None, :]
        if growth is not None:
            grown = tl.load(growth + position)
            turned_firsts *= grown
            turned_seconds *= grown
            columns = tl.arange(0, PLAIN_BLOCK)[None, :]
            plain_held = (head < HEADS) & (columns < PLAIN)
            plain = tl.load(own_heads + columns, mask=plain_held, other=0.0).to(tl.float32) * grown
            tl.store(own_heads + columns, plain.to(queries.dtype.element_ty), mask=plain_held)
        rounded_firsts = turned_firsts.to(queries.dtype.element_ty)
        rounded_seconds = turned_seconds.to(queries.dtype.element_ty)
        tl.store(own_heads + PLAIN + first_at[None, :], rounded_firsts, mask=head_held)
        tl.store(own_heads + PLAIN + second_at[None, :], rounded_seconds, mask=head_held)
        brought = absorbed + (token * HEADS + head) * (RANK + 2 * HALF) + RANK
        tl.store(brought + first_at[None, :], rounded_firsts, mask=head_held)
        tl.store(brought + second_at[None, :], rounded_seconds, mask=head_held)
