"""Decode of a gated delta net, one fused step: convolution, gates, the delta rule and the norm behind it. A program
takes a head of a stream, and has its whole matrix in registers. Of drafts several tokens follow each other, and the
state stays; it is changed when it is known how many hold, by the same arithmetic."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels import state_items as item_words
from twostroke.backends.cuda.kernels.convolution import convolve, load_ring, put_in, write_entry
from twostroke.backends.cuda.kernels.state_math import LENGTH_EPS, DeltaShape, fading_of, key_head_of
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2
from twostroke.backends.cuda.state_shape import StateShape


class DeltaVectors(NamedTuple):
    """What a layer has beside its matrices, in float32, on the host and in kernels."""

    conv: torch.Tensor  # [conv width, taps]
    dt_bias: torch.Tensor  # [value heads]
    decay: torch.Tensor  # [value heads], below 0
    norm: torch.Tensor  # [value dim]


@triton.jit
def _normalised(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + LENGTH_EPS)


@triton.jit
def _delta_step(
    x, vectors, states, items, out, eps, x_stride, out_stride,
    SHAPE: tl.constexpr, STATE: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, ANSWERS: tl.constexpr,
    WRITES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """KEYS and COLUMNS: a head's dimensions, up to powers of two."""
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
    key, column = tl.arange(0, KEYS), tl.arange(0, COLUMNS)
    in_key, in_value = key < SHAPE.key_dim, column < SHAPE.value_dim
    query_at = key_head_of(head, SHAPE) * SHAPE.key_dim + key
    key_at = SHAPE.keys_at + query_at
    value_at = SHAPE.values_at + head * SHAPE.value_dim + column
    cell = STATE.conv_values + (head * SHAPE.key_dim + key[:, None]) * SHAPE.value_dim + column[None, :]
    in_matrix = in_key[:, None] & in_value[None, :]
    matrix = tl.load(ring + cell, mask=in_matrix & (position > 0), other=0.0)
    keys = load_ring(ring, position, key_at, in_key, WIDTH, TAPS, RING)
    values = load_ring(ring, position, value_at, in_value, WIDTH, TAPS, RING)
    if ANSWERS:
        queries = load_ring(ring, position, query_at, in_key, WIDTH, TAPS, RING)
        norm = tl.load(vectors.norm + column, mask=in_value, other=0.0)
    for index in range(number):
        row, place = x + (first + index).to(tl.int64) * x_stride, position + index
        key_input = tl.load(row + key_at, mask=in_key, other=0.0).to(tl.float32)
        value_input = tl.load(row + value_at, mask=in_value, other=0.0).to(tl.float32)
        beta = tl.sigmoid(tl.load(row + SHAPE.betas_at + head).to(tl.float32))
        fading = fading_of(tl.load(row + SHAPE.fadings_at + head).to(tl.float32), vectors.dt_bias, vectors.decay, head)
        keys, values = put_in(keys, place, key_input, RING), put_in(values, place, value_input, RING)
        k = convolve(keys, place, vectors.conv, key_at, in_key, TAPS, RING)
        v = convolve(values, place, vectors.conv, value_at, in_value, TAPS, RING)
        k, v = _normalised(k * tl.sigmoid(k)), v * tl.sigmoid(v)
        matrix *= tl.exp(fading)
        written = beta * (v - tl.sum(k[:, None] * matrix, 0))
        matrix += k[:, None] * written[None, :]
        if ANSWERS:
            query_input = tl.load(row + query_at, mask=in_key, other=0.0).to(tl.float32)
            queries = put_in(queries, place, query_input, RING)
            q = convolve(queries, place, vectors.conv, query_at, in_key, TAPS, RING)
            q = _normalised(q * tl.sigmoid(q)) * SHAPE.scale
            found = tl.sum(q[:, None] * matrix, 0)
            found *= tl.rsqrt(tl.sum(found * found, 0) / SHAPE.value_dim + eps) * norm
            gate_at = SHAPE.gates_at + head * SHAPE.value_dim + column
            gate = tl.load(row + gate_at, mask=in_value, other=0.0).to(tl.float32)
            found *= gate * tl.sigmoid(gate)
            answer = out + (first + index).to(tl.int64) * out_stride + head * SHAPE.value_dim + column
            tl.store(answer, found.to(out.dtype.element_ty), mask=in_value)
            if WRITES:
                # Programs that share keys write the same; what is read of the ring is in other entries.
                write_entry(ring, place, query_input, query_at, in_key, WIDTH, RING)
                write_entry(ring, place, key_input, key_at, in_key, WIDTH, RING)
                write_entry(ring, place, value_input, value_at, in_value, WIDTH, RING)
    if WRITES:
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
) -> None:
    """Of decodes. `writes`: the state behind an item's tokens goes to its target, with the ring where there is one
    token and an answer to it; of others `keep_inputs` writes the ring, behind this."""
    answers = out is not None
    key_block, value_block = next_power_of_2(shape.key_dim), next_power_of_2(shape.value_dim)
    dependent(_delta_step, (len(items), shape.value_heads), x.device)(
        x, vectors, states, items, out, eps, x.stride(0), 0 if out is None else out.stride(0), SHAPE=shape,
        STATE=state, KEYS=key_block, COLUMNS=value_block, ANSWERS=answers, WRITES=writes,
        num_warps=min(max(key_block * value_block // 2048, 1), 8),
    )  # fmt: skip
