"""Decode of a Mamba-2 layer: convolution, the length of a token's step, the state and what is read of it, in one
kernel; the norm behind it spans heads, and follows. A program takes a head of a stream, and walks over its matrix some
rows at a time, as `delta_decode.py` does over columns. Of drafts several tokens follow each other, as there."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels import state_items as item_words
from twostroke.backends.cuda.kernels.convolution import (
    convolve,
    convolve_inputs,
    load_inputs,
    load_ring,
    load_taps,
    none_yet,
    put_in,
    write_entry,
)
from twostroke.backends.cuda.kernels.delta_decode import StepTile, draft_warps
from twostroke.backends.cuda.kernels.state_math import MambaShape, softplus
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import cdiv, next_power_of_2
from twostroke.backends.cuda.state_shape import StateShape


class MambaVectors(NamedTuple):
    """What a layer has beside its matrices, in float32, on the host and in kernels."""

    conv: torch.Tensor  # [conv width, taps]
    conv_bias: torch.Tensor | None  # [conv width]
    dt_bias: torch.Tensor  # [heads]
    decay: torch.Tensor  # [heads], below 0
    skip: torch.Tensor  # [heads]: how much of x is found without the state


STEP: Final = StepTile(8, 4, 4)
DRAFTED_ROWS: Final = 32
"""Of a head's matrix, that a program holds over several tokens."""


@triton.jit
def step_length(x, dt_bias, head, SHAPE: tl.constexpr):
    length = softplus(x + tl.load(dt_bias + head))
    return tl.minimum(tl.maximum(length, SHAPE.shortest_step), SHAPE.longest_step)


@triton.jit
def _biased_silu(found, vectors, column, mask):
    if vectors.conv_bias is not None:
        found += tl.load(vectors.conv_bias + column, mask=mask, other=0.0)
    return found * tl.sigmoid(found)


@triton.jit
def _scan_step(
    x, vectors, states, items, out, x_stride, out_stride,
    SHAPE: tl.constexpr, STATE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of one token a stream, whose state replaces the one before. PARTS: of a head's matrix, of ROWS each; COLUMNS:
    its state's size, up to a power of two."""
    RING: tl.constexpr = STATE.ring
    TAPS: tl.constexpr = STATE.taps
    WIDTH: tl.constexpr = STATE.conv_width
    head = tl.program_id(0)
    number, line, column = tl.arange(0, PARTS * ROWS), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    in_head, in_state = number < SHAPE.head_dim, column < SHAPE.state_size
    x_at = head * SHAPE.head_dim + number
    into_at = SHAPE.into_at + (head // SHAPE.group_heads) * SHAPE.state_size + column
    along_at = into_at + SHAPE.group_width
    cell = line[:, None] * SHAPE.state_size + column[None, :]
    x_taps = load_taps(vectors.conv, x_at, in_head, TAPS)
    into_taps = load_taps(vectors.conv, into_at, in_state, TAPS)
    along_taps = load_taps(vectors.conv, along_at, in_state, TAPS)
    start_next_and_wait(PDL)
    item = items + tl.program_id(1) * item_words.WORDS
    if tl.load(item + item_words.NUMBER) == 0:
        return
    first, place = tl.load(item + item_words.FIRST), tl.load(item + item_words.POSITION)
    ring = states + tl.load(item + item_words.SOURCE).to(tl.int64) * STATE.values
    row = x + first.to(tl.int64) * x_stride
    block = ring + STATE.conv_values + head * SHAPE.head_dim * SHAPE.state_size

    parts = none_yet()
    for part in tl.static_range(AHEAD):
        held = (line + part * ROWS < SHAPE.head_dim)[:, None] & in_state[None, :] & (place > 0)
        parts = parts + (tl.load(block + part * ROWS * SHAPE.state_size + cell, mask=held, other=0.0),)
    tl.debug_barrier()  # as in `_delta_step`
    numbers = load_inputs(row, ring, place, x_at, in_head, WIDTH, TAPS, RING)
    intos = load_inputs(row, ring, place, into_at, in_state, WIDTH, TAPS, RING)
    alongs = load_inputs(row, ring, place, along_at, in_state, WIDTH, TAPS, RING)
    length = step_length(tl.load(row + SHAPE.lengths_at + head).to(tl.float32), vectors.dt_bias, head, SHAPE)
    left, skip = tl.exp(tl.load(vectors.decay + head) * length), tl.load(vectors.skip + head)
    # Heads of a group write the same; what is read of the ring is in other entries.
    write_entry(ring, place, numbers[0], x_at, in_head, WIDTH, RING)
    write_entry(ring, place, intos[0], into_at, in_state, WIDTH, RING)
    write_entry(ring, place, alongs[0], along_at, in_state, WIDTH, RING)
    own = _biased_silu(convolve_inputs(numbers, x_taps, TAPS), vectors, x_at, in_head)
    into = _biased_silu(convolve_inputs(intos, into_taps, TAPS), vectors, into_at, in_state)
    along = _biased_silu(convolve_inputs(alongs, along_taps, TAPS), vectors, along_at, in_state)
    meeting = tl.sum(into * along, 0)

    for part in tl.static_range(PARTS):
        in_part = line + part * ROWS < SHAPE.head_dim
        held = in_part[:, None] & in_state[None, :]
        matrix = parts[part]
        if part + AHEAD < PARTS:
            later = held & (line + (part + AHEAD) * ROWS < SHAPE.head_dim)[:, None] & (place > 0)
            loaded = tl.load(block + (part + AHEAD) * ROWS * SHAPE.state_size + cell, mask=later, other=0.0)
            parts = parts + (loaded,)
        number = tl.gather(own, line + part * ROWS, 0)
        behind = left * matrix + (number * length)[:, None] * into[None, :]
        tl.store(block + part * ROWS * SHAPE.state_size + cell, behind, mask=held)
        # What is read along meets the state before, and what is written.
        found = left * tl.sum(matrix * along[None, :], 1) + (length * meeting + skip) * number
        answer = out + first.to(tl.int64) * out_stride + head * SHAPE.head_dim + part * ROWS + line
        tl.store(answer, found.to(out.dtype.element_ty), mask=in_part)


@triton.jit
def _scan_drafts(
    x, vectors, states, items, out, x_stride, out_stride,
    SHAPE: tl.constexpr, STATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of several tokens: they are answered, or, where there is no `out`, the state behind them is written. A program
    has some rows of a head's matrix. COLUMNS: its state's size, up to a power of two."""
    RING: tl.constexpr = STATE.ring
    TAPS: tl.constexpr = STATE.taps
    WIDTH: tl.constexpr = STATE.conv_width
    head = tl.program_id(0)
    line, column = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    in_head, in_state = line < SHAPE.head_dim, column < SHAPE.state_size
    x_at = head * SHAPE.head_dim + line
    into_at = SHAPE.into_at + (head // SHAPE.group_heads) * SHAPE.state_size + column
    along_at = into_at + SHAPE.group_width
    cell = STATE.conv_values + (head * SHAPE.head_dim + line[:, None]) * SHAPE.state_size + column[None, :]
    in_matrix = in_head[:, None] & in_state[None, :]
    start_next_and_wait(PDL)
    item = items + tl.program_id(1) * item_words.WORDS
    number = tl.load(item + item_words.NUMBER)
    if number == 0:
        return
    first, position = tl.load(item + item_words.FIRST), tl.load(item + item_words.POSITION)
    ring = states + tl.load(item + item_words.SOURCE).to(tl.int64) * STATE.values
    matrix = tl.load(ring + cell, mask=in_matrix & (position > 0), other=0.0)
    numbers = load_ring(ring, position, x_at, in_head, WIDTH, TAPS, RING)
    intos = load_ring(ring, position, into_at, in_state, WIDTH, TAPS, RING)
    if out is not None:
        alongs = load_ring(ring, position, along_at, in_state, WIDTH, TAPS, RING)
    for index in range(number):
        row, place = x + (first + index).to(tl.int64) * x_stride, position + index
        numbers = put_in(numbers, place, tl.load(row + x_at, mask=in_head, other=0.0).to(tl.float32), RING)
        intos = put_in(intos, place, tl.load(row + into_at, mask=in_state, other=0.0).to(tl.float32), RING)
        if out is not None:
            alongs = put_in(alongs, place, tl.load(row + along_at, mask=in_state, other=0.0).to(tl.float32), RING)
        length = step_length(tl.load(row + SHAPE.lengths_at + head).to(tl.float32), vectors.dt_bias, head, SHAPE)
        own = convolve(numbers, place, vectors.conv, x_at, in_head, TAPS, RING)
        into = convolve(intos, place, vectors.conv, into_at, in_state, TAPS, RING)
        own, into = _biased_silu(own, vectors, x_at, in_head), _biased_silu(into, vectors, into_at, in_state)
        matrix = matrix * tl.exp(tl.load(vectors.decay + head) * length) + (own * length)[:, None] * into[None, :]
        if out is not None:
            along = convolve(alongs, place, vectors.conv, along_at, in_state, TAPS, RING)
            along = _biased_silu(along, vectors, along_at, in_state)
            found = tl.sum(matrix * along[None, :], 1) + tl.load(vectors.skip + head) * own
            answer = out + (first + index).to(tl.int64) * out_stride + x_at
            tl.store(answer, found.to(out.dtype.element_ty), mask=in_head)
    if out is None:
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
    tile: StepTile = STEP,
) -> None:
    """Of decodes; `writes` as of `delta_step`."""
    rows, columns = next_power_of_2(shape.head_dim), next_power_of_2(shape.state_size)
    if out is not None and writes:
        own = min(tile.part, rows)
        parts = rows // own
        dependent(_scan_step, (shape.num_heads, len(items)), x.device)(
            x, vectors, states, items, out, x.stride(0), out.stride(0), SHAPE=shape, STATE=state, PARTS=parts, ROWS=own,
            COLUMNS=columns, AHEAD=min(tile.ahead, parts), num_warps=tile.num_warps,
        )  # fmt: skip
        return
    own = min(DRAFTED_ROWS, rows)
    dependent(_scan_drafts, (shape.num_heads, len(items), cdiv(shape.head_dim, own)), x.device)(
        x, vectors, states, items, out, x.stride(0), 0 if out is None else out.stride(0), SHAPE=shape, STATE=state,
        ROWS=own, COLUMNS=columns, num_warps=draft_warps(own * columns),
    )  # fmt: skip
