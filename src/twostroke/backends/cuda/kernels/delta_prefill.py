"""Prefill of a gated delta net, by tiles of 64 tokens in matrix products. First, of every tile by itself: how its keys
meet, solved for what each token writes, and how queries meet keys. Then a program for some columns of a head walks over
the tiles of a sequence with its part of the matrix. `delta_decode.py` has the same rule for one token."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels import state_items as item_words
from twostroke.backends.cuda.kernels.delta_decode import DeltaVectors
from twostroke.backends.cuda.kernels.moe_routing import dot_precision
from twostroke.backends.cuda.kernels.state_items import TILE, TILE_WORDS
from twostroke.backends.cuda.kernels.state_math import LENGTH_EPS, DeltaShape, fading_of, key_head_of, product
from twostroke.backends.cuda.kernels.target import dependent, target_of
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import cdiv, next_power_of_2
from twostroke.backends.cuda.state_shape import StateShape

BLOCK = tl.constexpr(16)
"""Tokens whose meetings are solved one after another; larger squares are put together by products."""
WALKED_COLUMNS: Final = 32
"""Of a head's values, that a program walks with: fewer make more programs, which all go through queries and keys."""
SMALLEST_DOT: Final = 16
ROOM_FOR_TWO: Final = 128 * 1024
"""Bytes of shared memory that a walk takes which fetches a tile ahead, at most."""


@triton.jit
def _unit_rows(mixed, row, column, mask, mixed_stride, dtype: tl.constexpr):
    """Queries or keys of a tile, each of length 1  # [TILE, KEYS]"""
    x = tl.load(mixed + row * mixed_stride + column, mask=mask, other=0.0).to(tl.float32)
    return (x * tl.rsqrt(tl.sum(x * x, 1) + LENGTH_EPS)[:, None]).to(dtype)


@triton.jit
def _gates(x, row, is_token, vectors, x_stride, head, SHAPE: tl.constexpr):
    """Of a tile's tokens, how much is written and the logarithms of what fades; 0 where there is no token."""
    beta = tl.load(x + row * x_stride + SHAPE.betas_at + head, mask=is_token, other=0.0).to(tl.float32)
    fading = tl.load(x + row * x_stride + SHAPE.fadings_at + head, mask=is_token, other=0.0).to(tl.float32)
    fading = fading_of(fading, vectors.dt_bias, vectors.decay, head)
    return tl.where(is_token, tl.sigmoid(beta), 0.0), tl.where(is_token, fading, 0.0)


@triton.jit
def solve_triangle(meetings, TILE: tl.constexpr):
    """The inverse of 1 + meetings, whose rows meet earlier ones alone  # float32 [TILE, TILE]

    Squares along the diagonal row by row; then two neighbours at a time become one, by what lies below the first. A
    series of powers would be shorter, and lose all digits where many keys are alike."""
    BLOCKS: tl.constexpr = TILE // BLOCK
    number = tl.arange(0, BLOCKS)
    on_diagonal = number[:, None, None, None] == number[None, None, :, None]
    squares = tl.sum(tl.where(on_diagonal, tl.reshape(meetings, [BLOCKS, BLOCK, BLOCKS, BLOCK]), 0.0), 2)
    line = tl.arange(0, BLOCK)[None, :, None]
    solved = tl.zeros([BLOCKS, BLOCK, BLOCK], tl.float32)  # less the diagonal of ones
    for index in tl.static_range(1, BLOCK):
        own = tl.sum(tl.where(line == index, squares, 0.0), 1)  # [BLOCKS, BLOCK]
        found = -own - tl.sum(own[:, :, None] * solved, 1)
        solved = tl.where(line == index, found[:, None, :], solved)
    whole = tl.reshape(tl.where(on_diagonal, solved[:, :, None, :], 0.0), [TILE, TILE])
    row, column = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    whole += tl.where(row == column, 1.0, 0.0)
    for double in tl.static_range(0, 2):
        size = BLOCK << double
        is_below = (row // size == column // size + 1) & ((row // size) % 2 == 1)
        below = tl.dot(whole, tl.where(is_below, meetings, 0.0), input_precision="tf32x3")
        whole -= tl.dot(below, whole, input_precision="tf32x3")
    return whole


@triton.jit
def _meet(
    x, mixed, vectors, items, tiles, solved, scores, x_stride, mixed_stride,
    SHAPE: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr, FIELDS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    start_next_and_wait(PDL)
    tile = tiles + tl.program_id(0) * FIELDS
    item = items + tl.load(tile) * item_words.WORDS
    number, offset = tl.load(item + item_words.NUMBER), tl.load(tile + 1)
    if offset >= number:
        return
    line = tl.arange(0, TILE)
    is_token = offset + line < number
    row = (tl.load(item + item_words.FIRST) + offset + line).to(tl.int64)
    key = tl.arange(0, KEYS)
    mask = is_token[:, None] & (key < SHAPE.key_dim)[None, :]
    query_at = (key_head_of(head, SHAPE) * SHAPE.key_dim + key)[None, :]
    dtype: tl.constexpr = mixed.dtype.element_ty
    queries = _unit_rows(mixed, row[:, None], query_at, mask, mixed_stride, dtype)
    keys = _unit_rows(mixed, row[:, None], SHAPE.keys_at + query_at, mask, mixed_stride, dtype)
    beta, fading = _gates(x, row, is_token, vectors, x_stride, head, SHAPE)
    sums = tl.cumsum(fading, 0)
    between = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
    turned = tl.trans(keys)
    meetings = beta[:, None] * product(keys, turned, PRECISION) * between
    whole = solve_triangle(tl.where(line[:, None] > line[None, :], meetings, 0.0), TILE)
    score = product(queries, turned, PRECISION) * between * SHAPE.scale
    score = tl.where(line[:, None] >= line[None, :], score, 0.0)
    place = (row[:, None] * SHAPE.value_heads + head) * TILE + line[None, :]
    tl.store(solved + place, whole.to(dtype), mask=is_token[:, None])
    tl.store(scores + place, score.to(dtype), mask=is_token[:, None])


@triton.jit
def _walk(
    x, mixed, vectors, states, items, solved, scores, found, x_stride, mixed_stride, found_stride,
    SHAPE: tl.constexpr, STATE: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    start_next_and_wait(PDL)
    item = items + tl.program_id(0) * item_words.WORDS
    number = tl.load(item + item_words.NUMBER)
    if number == 0:
        return
    first, position = tl.load(item + item_words.FIRST), tl.load(item + item_words.POSITION)
    line, key = tl.arange(0, TILE), tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_value = column < SHAPE.value_dim
    cell = STATE.conv_values + (head * SHAPE.key_dim + key[:, None]) * SHAPE.value_dim + column[None, :]
    in_matrix = (key < SHAPE.key_dim)[:, None] & in_value[None, :]
    slot = states + tl.load(item + item_words.SOURCE).to(tl.int64) * STATE.values
    matrix = tl.load(slot + cell, mask=in_matrix & (position > 0), other=0.0)
    query_at = (key_head_of(head, SHAPE) * SHAPE.key_dim + key)[None, :]
    value_at = (head * SHAPE.value_dim + column)[None, :]
    dtype: tl.constexpr = mixed.dtype.element_ty
    for offset in range(0, number, TILE):
        is_token = offset + line < number
        row = (first + offset + line).to(tl.int64)
        mask = is_token[:, None] & (key < SHAPE.key_dim)[None, :]
        queries = _unit_rows(mixed, row[:, None], query_at, mask, mixed_stride, dtype)
        keys = _unit_rows(mixed, row[:, None], SHAPE.keys_at + query_at, mask, mixed_stride, dtype)
        held = is_token[:, None] & in_value[None, :]
        values = tl.load(mixed + row[:, None] * mixed_stride + SHAPE.values_at + value_at, mask=held, other=0.0)
        beta, fading = _gates(x, row, is_token, vectors, x_stride, head, SHAPE)
        sums, total = tl.cumsum(fading, 0), tl.sum(fading, 0)
        since_start = tl.exp(sums)[:, None]
        place = (row[:, None] * SHAPE.value_heads + head) * TILE + line[None, :]
        inverse = tl.load(solved + place, mask=is_token[:, None], other=0.0)
        score = tl.load(scores + place, mask=is_token[:, None], other=0.0)
        known = matrix.to(dtype)
        lacking = beta[:, None] * (values - since_start * product(keys, known, PRECISION))
        writes = product(inverse, lacking.to(dtype), PRECISION).to(dtype)
        answer = since_start * SHAPE.scale * product(queries, known, PRECISION)
        answer += product(score, writes, PRECISION)
        tl.store(found + row[:, None] * found_stride + value_at, answer.to(found.dtype.element_ty), mask=held)
        left = (keys * tl.exp(total - sums)[:, None]).to(dtype)
        matrix = tl.exp(total) * matrix + product(tl.trans(left), writes, PRECISION)
    target = states + tl.load(item + item_words.TARGET).to(tl.int64) * STATE.values
    tl.store(target + cell, matrix, mask=in_matrix)


def delta_tiles(
    x: torch.Tensor,  # [num_tokens, width]: all that tokens were projected to
    mixed: torch.Tensor,  # [num_tokens, conv width]: queries, keys and values, convolved
    vectors: DeltaVectors,
    states: torch.Tensor,  # float32 [slots, values]
    items: torch.Tensor,  # of the segments
    tiles: torch.Tensor,
    solved: torch.Tensor,  # [num_tokens, value heads, TILE], between the two kernels
    scores: torch.Tensor,  # the same
    found: torch.Tensor,  # [num_tokens, value heads * value dim], written, before the norm
    shape: DeltaShape,
    state: StateShape,
) -> None:
    """Of prompt chunks: what queries found, and the matrices behind the chunks."""
    meet_in_tiles(x, mixed, vectors, items, tiles, solved, scores, shape)
    walk_over_tiles(x, mixed, vectors, states, items, solved, scores, found, shape, state)


def meet_in_tiles(
    x: torch.Tensor,
    mixed: torch.Tensor,
    vectors: DeltaVectors,
    items: torch.Tensor,
    tiles: torch.Tensor,
    solved: torch.Tensor,  # written
    scores: torch.Tensor,  # written
    shape: DeltaShape,
) -> None:
    dependent(_meet, (len(tiles), shape.value_heads), x.device)(
        x, mixed, vectors, items, tiles, solved, scores, x.stride(0), mixed.stride(0), SHAPE=shape,
        KEYS=_key_block(shape), TILE=TILE, FIELDS=TILE_WORDS, PRECISION=dot_precision(mixed.dtype), num_warps=4,
    )  # fmt: skip


def walk_over_tiles(
    x: torch.Tensor,
    mixed: torch.Tensor,
    vectors: DeltaVectors,
    states: torch.Tensor,
    items: torch.Tensor,
    solved: torch.Tensor,
    scores: torch.Tensor,
    found: torch.Tensor,  # written
    shape: DeltaShape,
    state: StateShape,
) -> None:
    columns = max(SMALLEST_DOT, min(WALKED_COLUMNS, next_power_of_2(shape.value_dim)))
    dependent(_walk, (len(items), shape.value_heads, cdiv(shape.value_dim, columns)), x.device)(
        x, mixed, vectors, states, items, solved, scores, found, x.stride(0), mixed.stride(0), found.stride(0),
        SHAPE=shape, STATE=state, KEYS=_key_block(shape), COLUMNS=columns, TILE=TILE,
        PRECISION=dot_precision(mixed.dtype), num_warps=4, num_stages=walk_stages(x.device),
    )  # fmt: skip


def _key_block(shape: DeltaShape) -> int:
    return max(SMALLEST_DOT, next_power_of_2(shape.key_dim))


def walk_stages(device: torch.device) -> int:
    return target_of(device).stages(2, ROOM_FOR_TWO // 2)
