"""Which states a step works on. An item is some tokens of one sequence, side by side: where its state lies, where that
goes behind them, and where they stand. Rows know their slots and lengths, so the device makes the items itself; also
copies of whole states. Knows nothing of what a state is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.compile_ahead import launcher
from twostroke.backends.cuda.kernels import sampling_state as state
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import wait_and_start_next
from twostroke.backends.cuda.kernels.whole_numbers import cdiv

TILE: Final = 64
"""Tokens of a prompt that meet each other in one product."""
ITEM_WORDS: Final = 8
SEGMENT_WORDS, TILE_WORDS = 4, 2
NO_TILE: Final = 1 << 30
"""The offset of a tile that is none: no segment is as long."""
ANY_LENGTH: Final = -1
COPIES_AT_ONCE: Final = 1024
_COPIED: Final = 4096

# The words of an item.
SOURCE = tl.constexpr(0)
"""The slot that holds the state before its tokens."""
TARGET = tl.constexpr(1)
"""The slot that the state behind them goes to."""
FIRST = tl.constexpr(2)
"""Of its tokens, the first, among a step's."""
NUMBER = tl.constexpr(3)
"""Of its tokens; 0 where there is nothing to do."""
POSITION = tl.constexpr(4)
"""Where the first stands. At 0 there is no state before it, whatever the slot holds."""
WORDS = tl.constexpr(8)


@dataclass(frozen=True, slots=True)
class StateTiles:
    """A step's prompt chunks on the host: its segments, and these cut into tiles."""

    segments: npt.NDArray[np.int32]  # [segments, SEGMENT_WORDS]: first token, tokens, position of the first, row
    tiles: npt.NDArray[np.int32]  # [tiles, TILE_WORDS]: segment, tokens of it before the tile

    @staticmethod
    def build(
        segments: tuple[npt.NDArray[np.int32], ...], padding_row: int, room: tuple[int, int] | None = None
    ) -> StateTiles:
        """`segments`: first tokens, counts, starts and rows. `room`: tokens and segments that a captured graph is made
        for."""
        found = np.stack(segments, axis=1).astype(np.int32)
        tiles_of = -(-found[:, 1] // TILE)
        owners = np.repeat(np.arange(len(found), dtype=np.int32), tiles_of)
        offsets = (np.arange(len(owners)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)) * TILE
        tiles = np.stack([owners, offsets.astype(np.int32)], axis=1)
        if room is None:
            return StateTiles(found, tiles)
        num_tokens, num_segments = room
        nobody = np.array([[0, 0, 0, padding_row]], dtype=np.int32)
        found = np.concatenate([found, np.repeat(nobody, num_segments - len(found), axis=0)])
        missing = cdiv(num_tokens, TILE) + num_segments - len(tiles)
        none = np.array([[0, NO_TILE]], dtype=np.int32)
        return StateTiles(found, np.concatenate([tiles, np.repeat(none, missing, axis=0)]))


@dataclass(frozen=True, slots=True, eq=False)
class StateWork:
    """The same on the device."""

    segments: torch.Tensor  # int32 [segments, SEGMENT_WORDS]
    tiles: torch.Tensor  # int32 [tiles, TILE_WORDS]


class Lengths(NamedTuple):
    """What rows know of themselves, on the host and in kernels."""

    records: torch.Tensor  # int64 [max rows + 1, words]
    table: torch.Tensor  # int32 [max rows + 1, blocks]: of the group of states; a row's slot comes first


@triton.jit
def length_of(lengths, row):
    """Tokens of a row that are known, the last one not yet computed."""
    return state.last_position(lengths.records + row.to(tl.int64) * state.NUM_WORDS) + 1


@triton.jit
def slot_of(lengths, row, table_stride):
    return tl.load(lengths.table + row.to(tl.int64) * table_stride)


@triton.jit
def _write_item(items, index, source, target, first, number, position):
    item = items + index * WORDS
    tl.store(item + SOURCE, source)
    tl.store(item + TARGET, target)
    tl.store(item + FIRST, first)
    tl.store(item + NUMBER, number)
    tl.store(item + POSITION, position)


@triton.jit(do_not_specialize=["table_stride"])
def _decode_items(rows, positions, lengths, items, count, table_stride, WIDTH: tl.constexpr, PDL: tl.constexpr):
    wait_and_start_next(PDL)
    stream = tl.program_id(0)
    row = tl.load(rows + stream * WIDTH)
    slot = slot_of(lengths, row, table_stride)
    number = slot * 0 + WIDTH
    if count is not None:
        number = tl.where(stream < tl.load(count), number, 0)
    _write_item(items, stream, slot, slot, stream * WIDTH, number, tl.load(positions + stream * WIDTH))


def decode_items(
    rows: torch.Tensor,  # int32 [streams * width]
    positions: torch.Tensor,  # int32 [streams * width]
    lengths: Lengths,
    items: torch.Tensor,  # int32 [at least streams, ITEM_WORDS], written
    count: torch.Tensor | None,  # int32 [1]: how many of the streams, the first, are decodes; None: all
    *,
    width: int = 1,
) -> torch.Tensor:
    """Of each stream its token, and drafts behind it. Returns the items."""
    streams = len(rows) // width
    dependent(_decode_items, (streams,), rows.device)(
        rows, positions, lengths, items, count, lengths.table.stride(0), WIDTH=width, num_warps=1
    )
    return items[:streams]


@triton.jit(do_not_specialize=["table_stride"])
def _segment_items(segments, lengths, items, table_stride, FIELDS: tl.constexpr, PDL: tl.constexpr):
    wait_and_start_next(PDL)
    index = tl.program_id(0)
    segment = segments + index * FIELDS
    slot = slot_of(lengths, tl.load(segment + 3), table_stride)
    _write_item(items, index, slot, slot, tl.load(segment), tl.load(segment + 1), tl.load(segment + 2))


def segment_items(segments: torch.Tensor, lengths: Lengths, items: torch.Tensor) -> torch.Tensor:
    """Of each segment; those that pad have no tokens."""
    dependent(_segment_items, (len(segments),), segments.device)(
        segments, lengths, items, lengths.table.stride(0), FIELDS=SEGMENT_WORDS, num_warps=1
    )
    return items[: len(segments)]


@triton.jit(do_not_specialize=["table_stride"])
def _settled_items(rows, counts, saves, lengths, items, table_stride, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """As a row is told of what came, it stood by one token less than that before, and its last token entered."""
    wait_and_start_next(PDL)
    index = tl.program_id(0)
    stream = index
    if saves is not None:
        stream = tl.load(saves + index * 3)
    row = tl.load(rows + stream * WIDTH)
    count = tl.load(counts + stream)
    slot = slot_of(lengths, row, table_stride)
    position = length_of(lengths, row) - 1 - count
    target = slot
    number = count
    if saves is not None:
        target = tl.load(saves + index * 3 + 1)
        number = tl.load(saves + index * 3 + 2) - position
        number = tl.where((number >= 1) & (number <= count), number, 0)
    _write_item(items, index, slot, target, stream * WIDTH, number, tl.maximum(position, 0))


def settled_items(
    rows: torch.Tensor,  # int32 [streams * width]
    counts: torch.Tensor,  # int32 [streams]: tokens that came
    lengths: Lengths,
    items: torch.Tensor,
    *,
    width: int,
    saves: torch.Tensor | None = None,  # int32 [saves, 3]: stream, slot, length
) -> torch.Tensor:
    """Of each stream, as many tokens as came, whose states it has not seen yet; or of each save, up to its length, if
    the stream came as far."""
    number = len(rows) // width if saves is None else len(saves)
    dependent(_settled_items, (number,), rows.device)(
        rows, counts, saves, lengths, items, lengths.table.stride(0), WIDTH=width, num_warps=1
    )
    return items[:number]


@triton.jit(do_not_specialize=["slots"])
def _copy(states, pairs, slots, VALUES: tl.constexpr, BLOCK: tl.constexpr):
    pair = pairs + tl.program_id(0) * 2
    source, target = tl.load(pair).to(tl.int64), tl.load(pair + 1).to(tl.int64)
    layer = states + tl.program_id(1).to(tl.int64) * slots * VALUES
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < VALUES
    tl.store(layer + target * VALUES + columns, tl.load(layer + source * VALUES + columns, mask=mask), mask=mask)


def copy_states(states: torch.Tensor, pairs: torch.Tensor) -> None:
    """states float32 [layers, slots, values]; pairs int32 [pairs, 2]: from a slot to another, in all layers. No slot is
    written to that another pair reads."""
    layers, slots, values = states.shape
    launcher(_copy, (len(pairs), layers, cdiv(values, _COPIED)))(
        states, pairs, slots, VALUES=values, BLOCK=_COPIED, num_warps=8
    )


@triton.jit(do_not_specialize=["slots", "table_stride"])
def _keep(states, saves, lengths, slots, table_stride, VALUES: tl.constexpr, BLOCK: tl.constexpr):
    save = saves + tl.program_id(0) * 3
    row, target, length = tl.load(save), tl.load(save + 1).to(tl.int64), tl.load(save + 2)
    if (length < 0) | (length == length_of(lengths, row) - 1):
        source = slot_of(lengths, row, table_stride).to(tl.int64)
        layer = states + tl.program_id(1).to(tl.int64) * slots * VALUES
        columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        mask = columns < VALUES
        tl.store(layer + target * VALUES + columns, tl.load(layer + source * VALUES + columns, mask=mask), mask=mask)


def keep_states(states: torch.Tensor, saves: torch.Tensor, lengths: Lengths) -> None:
    """saves int32 [saves, 3]: row, slot, length. The row's state goes to the slot, if it has computed this many tokens,
    and in any case where the length is ANY_LENGTH."""
    layers, slots, values = states.shape
    launcher(_keep, (len(saves), layers, cdiv(values, _COPIED)))(
        states, saves, lengths, slots, lengths.table.stride(0), VALUES=values, BLOCK=_COPIED, num_warps=8
    )
