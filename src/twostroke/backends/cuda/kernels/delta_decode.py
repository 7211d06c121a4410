"""Decode of a gated delta net, one fused step: convolution, gates, the delta rule and the norm behind it. A program
takes a head of a stream, and walks over its matrix some columns at a time, each read once, ahead of its turn, and
written once. Of drafts several tokens follow each other, a program holds its columns over all of them, the norm is a
kernel of its own, and the state stays; it is changed when it is known how many hold, by the same arithmetic."""

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
from twostroke.backends.cuda.kernels.gated_norm import gated_norm
from twostroke.backends.cuda.kernels.state_math import LENGTH_EPS, DeltaShape, fading_of, key_head_of
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import cdiv, next_power_of_2
from twostroke.backends.cuda.state_shape import StateShape


class DeltaVectors(NamedTuple):
    """What a layer has beside its matrices, in float32, on the host and in kernels."""

    conv: torch.Tensor  # [conv width, taps]
    dt_bias: torch.Tensor  # [value heads]
    decay: torch.Tensor  # [value heads], below 0
    norm: torch.Tensor  # [value dim]


class StepTile(NamedTuple):
    """How a program walks over a matrix."""

    part: int
    """Columns of a delta net's matrix, or rows of a Mamba-2 layer's, that it takes at a time."""
    ahead: int
    """Parts that are on their way at once."""
    num_warps: int


STEP: Final = StepTile(64, 1, 4)
"""More programs fit an SM than with whole matrices, and some of them wait for memory at any time."""
DRAFTED_COLUMNS: Final = 32
"""Of a head's matrix, that a program holds over several tokens."""


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _gate_inputs(row, vectors, head, SHAPE: tl.constexpr):
    """How much is written, and how much of the state is left."""
    beta = tl.sigmoid(tl.load(row + SHAPE.betas_at + head).to(tl.float32))
    fading = tl.load(row + SHAPE.fadings_at + head).to(tl.float32)
    return beta, tl.exp(fading_of(fading, vectors.dt_bias, vectors.decay, head))


@triton.jit
def _delta_step(
    x, vectors, states, items, out, eps, x_stride, out_stride,
    SHAPE: tl.constexpr, STATE: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of one token a stream, whose state replaces the one before. KEYS: a head's dimensions, up to a power of two;
    PARTS: of its matrix, of COLUMNS each."""
    RING: tl.constexpr = STATE.ring
    TAPS: tl.constexpr = STATE.taps
    WIDTH: tl.constexpr = STATE.conv_width
    head = tl.program_id(0)
    key, column = tl.arange(0, KEYS), tl.arange(0, COLUMNS)
    in_key = key < SHAPE.key_dim
    query_at = key_head_of(head, SHAPE) * SHAPE.key_dim + key
    key_at = SHAPE.keys_at + query_at
    value = tl.arange(0, PARTS * COLUMNS)
    in_row, value_at = value < SHAPE.value_dim, SHAPE.values_at + head * SHAPE.value_dim + value
    cell = key[:, None] * SHAPE.value_dim + column[None, :]
    query_taps = load_taps(vectors.conv, query_at, in_key, TAPS)
    key_taps = load_taps(vectors.conv, key_at, in_key, TAPS)
    value_taps = load_taps(vectors.conv, value_at, in_row, TAPS)
    start_next_and_wait(PDL)
    item = items + tl.program_id(1) * item_words.WORDS
    if tl.load(item + item_words.NUMBER) == 0:
        return
    first, place = tl.load(item + item_words.FIRST), tl.load(item + item_words.POSITION)
    ring = states + tl.load(item + item_words.SOURCE).to(tl.int64) * STATE.values
    row = x + first.to(tl.int64) * x_stride
    block = ring + STATE.conv_values + head * SHAPE.key_dim * SHAPE.value_dim

    parts = none_yet()
    for part in tl.static_range(AHEAD):
        held = in_key[:, None] & (column + part * COLUMNS < SHAPE.value_dim)[None, :] & (place > 0)
        parts = parts + (tl.load(block + part * COLUMNS + cell, mask=held, other=0.0),)
    tl.debug_barrier()  # else the compiler has the matrix wait for the convolution
    values = load_inputs(row, ring, place, value_at, in_row, WIDTH, TAPS, RING)
    queries = load_inputs(row, ring, place, query_at, in_key, WIDTH, TAPS, RING)
    keys = load_inputs(row, ring, place, key_at, in_key, WIDTH, TAPS, RING)
    beta, left = _gate_inputs(row, vectors, head, SHAPE)
    # Programs that share keys write the same; what is read of the ring is in other entries.
    write_entry(ring, place, queries[0], query_at, in_key, WIDTH, RING)
    write_entry(ring, place, keys[0], key_at, in_key, WIDTH, RING)
    write_entry(ring, place, values[0], value_at, in_row, WIDTH, RING)
    q = _silu(convolve_inputs(queries, query_taps, TAPS))
    k = _silu(convolve_inputs(keys, key_taps, TAPS))
    v = _silu(convolve_inputs(values, value_taps, TAPS))
    q *= tl.rsqrt(tl.sum(q * q, 0) + LENGTH_EPS) * SHAPE.scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + LENGTH_EPS)
    meeting = tl.sum(q * k, 0)

    answers, gates, squares = none_yet(), none_yet(), tl.zeros([COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        in_value, at = column + part * COLUMNS < SHAPE.value_dim, head * SHAPE.value_dim + part * COLUMNS + column
        held = in_key[:, None] & in_value[None, :]
        matrix = parts[part]
        if part + AHEAD < PARTS:
            later = held & (column + (part + AHEAD) * COLUMNS < SHAPE.value_dim)[None, :] & (place > 0)
            loaded = tl.load(block + (part + AHEAD) * COLUMNS + cell, mask=later, other=0.0)
            parts = parts + (loaded,)
        gate = tl.load(row + SHAPE.gates_at + at, mask=in_value, other=0.0)
        # The query meets the state before, and what is written: nothing waits for the state behind.
        known = left * tl.sum(k[:, None] * matrix, 0)
        seen = left * tl.sum(q[:, None] * matrix, 0)
        written = beta * (tl.gather(v, column + part * COLUMNS, 0) - known)
        tl.store(block + part * COLUMNS + cell, left * matrix + k[:, None] * written[None, :], mask=held)
        found = seen + meeting * written
        squares += found * found
        answers, gates = answers + (found,), gates + (gate,)
    scale = tl.rsqrt(tl.sum(squares, 0) / SHAPE.value_dim + eps)
    for part in tl.static_range(PARTS):
        in_value, at = column + part * COLUMNS < SHAPE.value_dim, head * SHAPE.value_dim + part * COLUMNS + column
        factor = scale * tl.load(vectors.norm + column + part * COLUMNS, mask=in_value, other=0.0)
        found = answers[part] * factor * _silu(gates[part].to(tl.float32))
        tl.store(out + first.to(tl.int64) * out_stride + at, found.to(out.dtype.element_ty), mask=in_value)


@triton.jit
def _delta_drafts(
    x, vectors, states, items, out, x_stride, out_stride,
    SHAPE: tl.constexpr, STATE: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of several tokens: what they find, before the norm, or, where there is no `out`, the state behind them. A program
    has some columns of a head's matrix. KEYS: a head's dimensions, up to a power of two."""
    RING: tl.constexpr = STATE.ring
    TAPS: tl.constexpr = STATE.taps
    WIDTH: tl.constexpr = STATE.conv_width
    head = tl.program_id(0)
    key, column = tl.arange(0, KEYS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_key, in_value = key < SHAPE.key_dim, column < SHAPE.value_dim
    query_at = key_head_of(head, SHAPE) * SHAPE.key_dim + key
    key_at = SHAPE.keys_at + query_at
    value_at = SHAPE.values_at + head * SHAPE.value_dim + column
    cell = STATE.conv_values + (head * SHAPE.key_dim + key[:, None]) * SHAPE.value_dim + column[None, :]
    in_matrix = in_key[:, None] & in_value[None, :]
    start_next_and_wait(PDL)
    item = items + tl.program_id(1) * item_words.WORDS
    number = tl.load(item + item_words.NUMBER)
    if number == 0:
        return
    first, position = tl.load(item + item_words.FIRST), tl.load(item + item_words.POSITION)
    ring = states + tl.load(item + item_words.SOURCE).to(tl.int64) * STATE.values
    matrix = tl.load(ring + cell, mask=in_matrix & (position > 0), other=0.0)
    keys = load_ring(ring, position, key_at, in_key, WIDTH, TAPS, RING)
    values = load_ring(ring, position, value_at, in_value, WIDTH, TAPS, RING)
    if out is not None:
        queries = load_ring(ring, position, query_at, in_key, WIDTH, TAPS, RING)
    for index in range(number):
        row, place = x + (first + index).to(tl.int64) * x_stride, position + index
        keys = put_in(keys, place, tl.load(row + key_at, mask=in_key, other=0.0).to(tl.float32), RING)
        values = put_in(values, place, tl.load(row + value_at, mask=in_value, other=0.0).to(tl.float32), RING)
        if out is not None:
            queries = put_in(queries, place, tl.load(row + query_at, mask=in_key, other=0.0).to(tl.float32), RING)
        k = convolve(keys, place, vectors.conv, key_at, in_key, TAPS, RING)
        v = convolve(values, place, vectors.conv, value_at, in_value, TAPS, RING)
        if out is not None:
            q = convolve(queries, place, vectors.conv, query_at, in_key, TAPS, RING)
        beta, left = _gate_inputs(row, vectors, head, SHAPE)
        k = _silu(k)
        k *= tl.rsqrt(tl.sum(k * k, 0) + LENGTH_EPS)
        matrix *= left
        written = beta * (_silu(v) - tl.sum(k[:, None] * matrix, 0))
        matrix += k[:, None] * written[None, :]
        if out is not None:
            q = _silu(q)
            q *= tl.rsqrt(tl.sum(q * q, 0) + LENGTH_EPS) * SHAPE.scale
            found = tl.sum(q[:, None] * matrix, 0)
            answer = out + (first + index).to(tl.int64) * out_stride + head * SHAPE.value_dim + column
            tl.store(answer, found.to(out.dtype.element_ty), mask=in_value)
    if out is None:
        target = states + tl.load(item + item_words.TARGET).to(tl.int64) * STATE.values
        tl.store(target + cell, matrix, mask=in_matrix)


def delta_step(
    x: torch.Tensor,  # [num_tokens, width]: all that tokens were projected to
    vectors: DeltaVectors,
    states: torch.Tensor,  # float32 [slots, values]
    items: torch.Tensor,
    out: torch.Tensor | None,  # [num_tokens, value heads * value dim]; None: states alone are wanted
    shape: DeltaShape,
    state: StateShape,
    *,
    eps: float,
    writes: bool,
    tile: StepTile = STEP,
) -> None:
    """Of decodes. `writes`: the state behind an item's tokens goes to its target, with the ring where there is one
    token and an answer to it; of others `keep_inputs` writes the ring, behind this."""
    keys, values = next_power_of_2(shape.key_dim), next_power_of_2(shape.value_dim)
    if out is not None and writes:
        columns = min(tile.part, values)
        parts = values // columns
        dependent(_delta_step, (shape.value_heads, len(items)), x.device)(
            x, vectors, states, items, out, eps, x.stride(0), out.stride(0), SHAPE=shape, STATE=state, KEYS=keys,
            PARTS=parts, COLUMNS=columns, AHEAD=min(tile.ahead, parts), num_warps=tile.num_warps,
        )  # fmt: skip
        return
    columns = min(DRAFTED_COLUMNS, values)
    grid = (shape.value_heads, len(items), cdiv(shape.value_dim, columns))
    dependent(_delta_drafts, grid, x.device)(
        x, vectors, states, items, out, x.stride(0), 0 if out is None else out.stride(0), SHAPE=shape, STATE=state,
        KEYS=keys, COLUMNS=columns, num_warps=draft_warps(keys * columns),
    )  # fmt: skip
    if out is not None:
        gates = x[:, shape.gates_at : shape.betas_at]
        gated_norm(out, gates, vectors.norm, out, parts=shape.value_heads, eps=eps, gate_first=False)


def draft_warps(held: int) -> int:
    """Of programs that hold this many numbers of a state over their tokens."""
    return min(max(held // 512, 1), 8)
