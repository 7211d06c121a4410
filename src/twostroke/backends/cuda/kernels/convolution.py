"""Short convolutions, each channel over its last tokens: of prompts by tiles, of decodes a token at a time, and what is
kept of their inputs. What came before a step's tokens lies in a ring, an entry for each position modulo its length.
Sums are in float32. `state_items.py` says which tokens are whose."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels import state_items as item_words
from twostroke.backends.cuda.kernels.state_items import TILE, TILE_WORDS
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import cdiv, next_power_of_2
from twostroke.backends.cuda.state_shape import StateShape

TILE_CHANNELS: Final = 64
STEP_CHANNELS: Final = 256


@triton.jit
def ring_entries(RING: tl.constexpr):
    return tl.arange(0, RING)[:, None]


@triton.jit
def load_ring(ring, position, column, mask, WIDTH: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr):
    """Inputs before `position` that it reads, by entries; zeros before the sequence's first token
    # float32 [RING, columns]"""
    entry = ring_entries(RING)
    back = 1 + ((position - 1 - entry) & (RING - 1))
    known = (back < TAPS) & (back <= position)
    return tl.load(ring + entry * WIDTH + column[None, :], mask=known & mask[None, :], other=0.0)


@triton.jit
def convolve(window, position, weight, column, mask, TAPS: tl.constexpr, RING: tl.constexpr):
    """Of the token at `position`, whose own input is in the window  # float32 [columns]"""
    age = (position - ring_entries(RING)) & (RING - 1)
    factors = tl.load(weight + column[None, :] * TAPS + (TAPS - 1 - age), mask=(age < TAPS) & mask[None, :], other=0.0)
    return tl.sum(window * factors, 0)


@triton.jit
def put_in(window, position, value, RING: tl.constexpr):
    return tl.where(ring_entries(RING) == (position & (RING - 1)), value[None, :], window)


@triton.jit
def write_entry(ring, position, value, column, mask, WIDTH: tl.constexpr, RING: tl.constexpr):
    tl.store(ring + (position & (RING - 1)) * WIDTH + column, value, mask=mask)


@triton.jit
def none_yet():
    """A tuple that loops add to."""
    return ()


@triton.jit
def load_taps(weight, column, mask, TAPS: tl.constexpr):
    """The factors of channels, the token's own first."""
    taps = none_yet()
    for back in tl.static_range(TAPS):
        factors = tl.load(weight + column * TAPS + (TAPS - 1 - back), mask=mask, other=0.0)
        taps = taps + (factors,)
    return taps


@triton.jit
def load_inputs(row, ring, position, column, mask, WIDTH: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr):
    """Of a token that comes alone, its own input and those before it, the last first  # float32 [columns] each"""
    inputs = none_yet() + (tl.load(row + column, mask=mask, other=0.0).to(tl.float32),)
    for back in tl.static_range(1, TAPS):
        entry = ring + ((position - back) & (RING - 1)) * WIDTH
        inputs = inputs + (tl.load(entry + column, mask=mask & (back <= position), other=0.0),)
    return inputs


@triton.jit
def convolve_inputs(inputs, taps, TAPS: tl.constexpr):
    """A thread has all that a channel needs, so none waits for another  # float32 [columns]"""
    found = inputs[0] * taps[0]
    for back in tl.static_range(1, TAPS):
        found += inputs[back] * taps[back]
    return found


@triton.jit
def _input(row, column, mask, CHANNELS: tl.constexpr, GATED: tl.constexpr):
    if GATED:  # b, c and x, one behind the other
        gate = tl.load(row + column, mask=mask, other=0.0).to(tl.float32)
        return gate * tl.load(row + 2 * CHANNELS + column, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.load(row + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _step(
    x, weight, states, items, out, x_stride, out_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
    WRITES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next_and_wait(PDL)
    item = items + tl.program_id(0) * item_words.WORDS
    number = tl.load(item + item_words.NUMBER)
    if number == 0:
        return
    first, position = tl.load(item + item_words.FIRST), tl.load(item + item_words.POSITION)
    ring = states + tl.load(item + item_words.SOURCE).to(tl.int64) * VALUES
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < CHANNELS
    window = load_ring(ring, position, column, mask, CHANNELS, TAPS, RING)
    for index in range(number):
        row = x + (first + index).to(tl.int64) * x_stride
        value = _input(row, column, mask, CHANNELS, True)
        window = put_in(window, position + index, value, RING)
        found = convolve(window, position + index, weight, column, mask, TAPS, RING)
        found *= tl.load(row + CHANNELS + column, mask=mask, other=0.0).to(tl.float32)
        place = out + (first + index).to(tl.int64) * out_stride + column
        tl.store(place, found.to(out.dtype.element_ty), mask=mask)
        if WRITES:
            write_entry(ring, position + index, value, column, mask, CHANNELS, RING)


def convolve_gated_step(
    x: torch.Tensor,  # [num_tokens, 3 * channels]: what gates inputs, what gates outputs, and inputs
    weight: torch.Tensor,  # float32 [channels, taps]
    states: torch.Tensor,  # float32 [slots, values]
    items: torch.Tensor,
    out: torch.Tensor,  # [num_tokens, channels]
    shape: StateShape,
    *,
    writes: bool,
) -> None:
    """Of decodes, between two gates. `writes`: the state behind them replaces what was there; else it stays."""
    block = min(STEP_CHANNELS, next_power_of_2(shape.conv_width))
    dependent(_step, (len(items), cdiv(shape.conv_width, block)), x.device)(
        x, weight, states, items, out, x.stride(0), out.stride(0), CHANNELS=shape.conv_width, TAPS=shape.taps,
        RING=shape.ring, VALUES=shape.values, BLOCK=block, WRITES=writes, num_warps=2,
    )  # fmt: skip


@triton.jit
def _tiles(
    x, weight, bias, states, items, tiles, out, x_stride, out_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr, VALUES: tl.constexpr, GATED: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next_and_wait(PDL)
    tile = tiles + tl.program_id(0) * FIELDS
    item = items + tl.load(tile) * item_words.WORDS
    number, offset = tl.load(item + item_words.NUMBER), tl.load(tile + 1)
    if offset >= number:
        return
    first, position = tl.load(item + item_words.FIRST).to(tl.int64), tl.load(item + item_words.POSITION)
    ring = states + tl.load(item + item_words.SOURCE).to(tl.int64) * VALUES
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    in_width = column < CHANNELS
    place = offset + tl.arange(0, TILE)[:, None]
    is_token = (place < number) & in_width
    sums = tl.zeros([TILE, BLOCK], tl.float32)
    for back in tl.static_range(TAPS):
        before = place - back
        own = x + (first + before) * x_stride
        value = _input(own, column, is_token & (before >= 0), CHANNELS, GATED)
        if back > 0:
            kept = is_token & (before < 0) & (position + before >= 0)
            entry = (position + before) & (RING - 1)
            value += tl.load(ring + entry * CHANNELS + column, mask=kept, other=0.0)
        sums += value * tl.load(weight + column * TAPS + (TAPS - 1 - back), mask=in_width, other=0.0)
    if GATED:
        sums *= tl.load(x + (first + place) * x_stride + CHANNELS + column, mask=is_token, other=0.0).to(tl.float32)
    else:
        if bias is not None:
            sums += tl.load(bias + column, mask=in_width, other=0.0)
        sums *= tl.sigmoid(sums)
    tl.store(out + (first + place) * out_stride + column, sums.to(out.dtype.element_ty), mask=is_token)


def convolve_tiles(
    x: torch.Tensor,  # [num_tokens, width]; the convolution's inputs come first
    weight: torch.Tensor,  # float32 [channels, taps]
    bias: torch.Tensor | None,  # float32 [channels]
    states: torch.Tensor,  # float32 [slots, values], read
    items: torch.Tensor,  # of the segments
    tiles: torch.Tensor,
    out: torch.Tensor,  # [num_tokens, channels]
    shape: StateShape,
    *,
    gated: bool,
) -> None:
    """Of prompt chunks. `gated`: between two gates, as `convolve_gated_step`; else through SiLU."""
    block = min(TILE_CHANNELS, next_power_of_2(shape.conv_width))
    dependent(_tiles, (len(tiles), cdiv(shape.conv_width, block)), x.device)(
        x, weight, bias, states, items, tiles, out, x.stride(0), out.stride(0), CHANNELS=shape.conv_width,
        TAPS=shape.taps, RING=shape.ring, VALUES=shape.values, GATED=gated, TILE=TILE, BLOCK=block, FIELDS=TILE_WORDS,
        num_warps=8,
    )  # fmt: skip


@triton.jit
def _keep_inputs(
    x, states, items, x_stride,
    CHANNELS: tl.constexpr, RING: tl.constexpr, VALUES: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start_next_and_wait(PDL)
    item = items + tl.program_id(0) * item_words.WORDS
    number = tl.load(item + item_words.NUMBER)
    if number == 0:
        return
    first, position = tl.load(item + item_words.FIRST).to(tl.int64), tl.load(item + item_words.POSITION)
    source, target = tl.load(item + item_words.SOURCE), tl.load(item + item_words.TARGET)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = column < CHANNELS
    entry = ring_entries(RING)
    last = position + number - 1
    stands_at = last - ((last - entry) & (RING - 1))
    is_new = (stands_at >= position) & mask
    value = _input(x + (first + stands_at - position) * x_stride, column, is_new, CHANNELS, GATED)
    is_old = (stands_at < position) & mask & (source != target)
    place = entry * CHANNELS + column
    value += tl.load(states + source.to(tl.int64) * VALUES + place, mask=is_old & (stands_at >= 0), other=0.0)
    tl.store(states + target.to(tl.int64) * VALUES + place, value, mask=is_new | is_old)


def keep_inputs(
    x: torch.Tensor,  # [num_tokens, width]
    states: torch.Tensor,  # float32 [slots, values]
    items: torch.Tensor,
    shape: StateShape,
    *,
    gated: bool,
) -> None:
    """The ring behind the items' tokens, to their targets. Whoever reads what was there comes before this."""
    block = min(STEP_CHANNELS, next_power_of_2(shape.conv_width))
    dependent(_keep_inputs, (len(items), cdiv(shape.conv_width, block)), x.device)(
        x, states, items, x.stride(0), CHANNELS=shape.conv_width, RING=shape.ring, VALUES=shape.values, GATED=gated,
        BLOCK=block, num_warps=2,
    )  # fmt: skip
