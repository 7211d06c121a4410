"""Prefill of a Mamba-2 layer, by tiles of 64 tokens in matrix products: a program walks over the tiles of a sequence
with one head's matrix. `mamba_decode.py` has the same rule for one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels import state_items as item_words
from twostroke.backends.cuda.kernels.delta_prefill import SMALLEST_DOT, walk_stages
from twostroke.backends.cuda.kernels.mamba_decode import MambaVectors, step_length
from twostroke.backends.cuda.kernels.moe_routing import dot_precision
from twostroke.backends.cuda.kernels.state_items import TILE
from twostroke.backends.cuda.kernels.state_math import MambaShape, product
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2
from twostroke.backends.cuda.state_shape import StateShape


@triton.jit
def _scan_tiles(
    x, mixed, vectors, states, items, found, x_stride, mixed_stride, found_stride,
    SHAPE: tl.constexpr, STATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    start_next_and_wait(PDL)
    item = items + tl.program_id(0) * item_words.WORDS
    number = tl.load(item + item_words.NUMBER)
    if number == 0:
        return
    first, position = tl.load(item + item_words.FIRST), tl.load(item + item_words.POSITION)
    token, line, column = tl.arange(0, TILE), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    in_head, in_state = line < SHAPE.head_dim, column < SHAPE.state_size
    cell = STATE.conv_values + (head * SHAPE.head_dim + line[:, None]) * SHAPE.state_size + column[None, :]
    in_matrix = in_head[:, None] & in_state[None, :]
    slot = states + tl.load(item + item_words.SOURCE).to(tl.int64) * STATE.values
    matrix = tl.load(slot + cell, mask=in_matrix & (position > 0), other=0.0)
    x_at = (head * SHAPE.head_dim + line)[None, :]
    into_at = (SHAPE.into_at + (head // SHAPE.group_heads) * SHAPE.state_size + column)[None, :]
    decay, skip = tl.load(vectors.decay + head), tl.load(vectors.skip + head)
    dtype: tl.constexpr = mixed.dtype.element_ty
    for offset in range(0, number, TILE):
        is_token = offset + token < number
        row = (first + offset + token).to(tl.int64)
        held, in_group = is_token[:, None] & in_head[None, :], is_token[:, None] & in_state[None, :]
        own = tl.load(mixed + row[:, None] * mixed_stride + x_at, mask=held, other=0.0)
        into = tl.load(mixed + row[:, None] * mixed_stride + into_at, mask=in_group, other=0.0)
        along = tl.load(mixed + row[:, None] * mixed_stride + SHAPE.group_width + into_at, mask=in_group, other=0.0)
        length = tl.load(x + row * x_stride + SHAPE.lengths_at + head, mask=is_token, other=0.0).to(tl.float32)
        length = tl.where(is_token, step_length(length, vectors.dt_bias, head, SHAPE), 0.0)
        sums, total = tl.cumsum(decay * length, 0), tl.sum(decay * length, 0)
        between = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0)) * length[None, :]
        scores = product(along, tl.trans(into), PRECISION) * between
        scores = tl.where(token[:, None] >= token[None, :], scores, 0.0)
        answer = tl.exp(sums)[:, None] * product(along, tl.trans(matrix.to(dtype)), PRECISION)
        answer += product(scores.to(dtype), own, PRECISION) + skip * own
        tl.store(found + row[:, None] * found_stride + x_at, answer.to(found.dtype.element_ty), mask=held)
        left = (own * (length * tl.exp(total - sums))[:, None]).to(dtype)
        matrix = tl.exp(total) * matrix + product(tl.trans(left), into, PRECISION)
    target = states + tl.load(item + item_words.TARGET).to(tl.int64) * STATE.values
    tl.store(target + cell, matrix, mask=in_matrix)


def scan_tiles(
    x: torch.Tensor,  # [num_tokens, width]: all that tokens were projected to
    mixed: torch.Tensor,  # [num_tokens, conv width]: x, b and c, convolved
    vectors: MambaVectors,
    states: torch.Tensor,  # float32 [slots, values]
    items: torch.Tensor,  # of the segments
    found: torch.Tensor,  # [num_tokens, heads * head dim], written, before the norm
    shape: MambaShape,
    state: StateShape,
) -> None:
    """Of prompt chunks: what was read, and the matrices behind the chunks."""
    rows, columns = (max(SMALLEST_DOT, next_power_of_2(size)) for size in (shape.head_dim, shape.state_size))
    dependent(_scan_tiles, (len(items), shape.num_heads), x.device)(
        x, mixed, vectors, states, items, found, x.stride(0), mixed.stride(0), found.stride(0), SHAPE=shape,
        STATE=state, ROWS=rows, COLUMNS=columns, TILE=TILE, PRECISION=dot_precision(mixed.dtype), num_warps=8,
        num_stages=walk_stages(x.device),
    )  # fmt: skip
