"""Decode of a Mamba-2 layer: convolution, the length of a token's step, the state and what is read of it, in one
kernel; the norm behind it spans heads, and follows. A program takes a head of a stream, and has its whole matrix in
registers. Of drafts several tokens follow each other, as in `delta_decode.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels import state_items as item_words
from twostroke.backends.cuda.kernels.convolution import convolve, load_ring, put_in, write_entry
from twostroke.backends.cuda.kernels.state_math import MambaShape, softplus
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2
from twostroke.backends.cuda.state_shape import StateShape


class MambaVectors(NamedTuple):
    """What a layer has beside its matrices, in float32, on the host and in kernels."""

    conv: torch.Tensor  # [conv width, taps]
    conv_bias: torch.Tensor | None  # [conv width]
    dt_bias: torch.Tensor  # [heads]
    decay: torch.Tensor  # [heads], below 0
    skip: torch.Tensor  # [heads]: how much of x is found without the state


@triton.jit
def step_length(x, dt_bias, head, SHAPE: tl.constexpr):
    length = softplus(x + tl.load(dt_bias + head))
    return tl.minimum(tl.maximum(length, SHAPE.shortest_step), SHAPE.longest_step)


@triton.jit
def _activated(window, place, vectors, column, mask, TAPS: tl.constexpr, RING: tl.constexpr):
    found = convolve(window, place, vectors.conv, column, mask, TAPS, RING)
    if vectors.conv_bias is not None:
        found += tl.load(vectors.conv_bias + column, mask=mask, other=0.0)
    return found * tl.sigmoid(found)


@triton.jit
def _scan_step(
    x, vectors, states, items, out, x_stride, out_stride,
    SHAPE: tl.constexpr, STATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ANSWERS: tl.constexpr,
    WRITES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS and COLUMNS: a head's numbers and its state's size, up to powers of two."""
    RING: tl.constexpr = STATE.ring
    TAPS: tl.constexpr = STATE.taps
    WIDTH: tl.constexpr = STATE.conv_width
    head = tl.program_id(1)
    start_next_and_wait(PDL)
    item = items + tl.program_id(0) * item_words.WORDS
    number = tl.load(item + item_words.NUMBER)
    if number == 0:
        return
    first, position = tl.load(item + item_words.FIRST), tl.load(item + item_words.POSITION)
    ring = states + tl.load(item + item_words.SOURCE).to(tl.int64) * STATE.values
    line, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    in_head, in_state = line < SHAPE.head_dim, column < SHAPE.state_size
    x_at = head * SHAPE.head_dim + line
    into_at = SHAPE.into_at + (head // SHAPE.group_heads) * SHAPE.state_size + column
    along_at = into_at + SHAPE.group_width
    cell = STATE.conv_values + (head * SHAPE.head_dim + line[:, None]) * SHAPE.state_size + column[None, :]
    in_matrix = in_head[:, None] & in_state[None, :]
    matrix = tl.load(ring + cell, mask=in_matrix & (position > 0), other=0.0)
    numbers = load_ring(ring, position, x_at, in_head, WIDTH, TAPS, RING)
    intos = load_ring(ring, position, into_at, in_state, WIDTH, TAPS, RING)
    if ANSWERS:
        alongs = load_ring(ring, position, along_at, in_state, WIDTH, TAPS, RING)
    for index in range(number):
        row, place = x + (first + index).to(tl.int64) * x_stride, position + index
        x_input = tl.load(row + x_at, mask=in_head, other=0.0).to(tl.float32)
        into_input = tl.load(row + into_at, mask=in_state, other=0.0).to(tl.float32)
        length = step_length(tl.load(row + SHAPE.lengths_at + head).to(tl.float32), vectors.dt_bias, head, SHAPE)
        numbers, intos = put_in(numbers, place, x_input, RING), put_in(intos, place, into_input, RING)
        own = _activated(numbers, place, vectors, x_at, in_head, TAPS, RING)
        into = _activated(intos, place, vectors, into_at, in_state, TAPS, RING)
        matrix = matrix * tl.exp(tl.load(vectors.decay + head) * length) + (own * length)[:, None] * into[None, :]
        if ANSWERS:
            along_input = tl.load(row + along_at, mask=in_state, other=0.0).to(tl.float32)
            alongs = put_in(alongs, place, along_input, RING)
            along = _activated(alongs, place, vectors, along_at, in_state, TAPS, RING)
            found = tl.sum(matrix * along[None, :], 1) + tl.load(vectors.skip + head) * own
            answer = out + (first + index).to(tl.int64) * out_stride + x_at
            tl.store(answer, found.to(out.dtype.element_ty), mask=in_head)
            if WRITES:
                # Heads of a group write the same; what is read of the ring is in other entries.
                write_entry(ring, place, x_input, x_at, in_head, WIDTH, RING)
                write_entry(ring, place, into_input, into_at, in_state, WIDTH, RING)
                write_entry(ring, place, along_input, along_at, in_state, WIDTH, RING)
    if WRITES:
        target = states + tl.load(item + item_words.TARGET).to(tl.int64) * STATE.values
        tl.store(target + cell, matrix, mask=in_matrix)


def scan_step(
    x: torch.Tensor,  # [num_tokens, width]: all that tokens were projected to
    vectors: MambaVectors,
    states: torch.Tensor,  # float32 [slots, values]
    items: torch.Tensor,
    out: torch.Tensor | None,  # [num_tokens, heads * head dim], before the norm; None: states alone are wanted
    shape: MambaShape,
    state: StateShape,
    *,
    writes: bool,
) -> None:
    """Of decodes; `writes` as of `delta_step`."""
    answers = out is not None
    rows, columns = next_power_of_2(shape.head_dim), next_power_of_2(shape.state_size)
    dependent(_scan_step, (len(items), shape.num_heads), x.device)(
        x, vectors, states, items, out, x.stride(0), 0 if out is None else out.stride(0), SHAPE=shape, STATE=state,
        ROWS=rows, COLUMNS=columns, ANSWERS=answers, WRITES=writes, num_warps=min(max(rows * columns // 2048, 1), 8),
    )  # fmt: skip
