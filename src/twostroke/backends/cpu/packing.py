"""Stored weights to the layouts that tiles read. An output tile is 16 rows of the matrix, group of inputs after group;
within a group the 16 rows lie side by side, four bytes each, so that one vector holds four inputs of 16 outputs.
Kinds without a tile of their own are brought to the nearest one that has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.arguments import PANEL_OUTPUTS, TILE_OUTPUTS
from twostroke.backends.cpu.memory import Arena, Bytes, Scalar, padded
from twostroke.backends.cpu.parts_packing import block_kind, parts_note, repacked
from twostroke.backends.cpu.row_numbers import RowNumbers, q4_k_as_q4_1, row_numbers
from twostroke.backends.cpu.tile_kinds import STEPS, TileKind, TileLayout
from twostroke.models.weights.quantisation import dequantise, quantise
from twostroke.models.weights.quantise_parts import quantise_parts
from twostroke.models.weights.stored_forms import ScaledTensor
from twostroke.models.weights.tensor import WeightKind, WeightTensor

_OTHER_TILES = {
    WeightKind.Q4_K: TileKind.Q4_1,
    WeightKind.Q5_1: TileKind.Q5_K,
    WeightKind.IQ4_XS: TileKind.IQ4_NL,
    WeightKind.IQ2_XXS: TileKind.IQ2_S,
    WeightKind.IQ2_XS: TileKind.IQ2_S,
    WeightKind.IQ1_S: TileKind.IQ1_M,
    WeightKind.TQ1_0: TileKind.TQ2_0,
}
"""Kinds without a tile of their name. Each of their numbers has a place in this one: none is rounded."""
_ROUNDED = {WeightKind.Q4_K, WeightKind.Q5_K, WeightKind.Q6_K, WeightKind.IQ4_XS, WeightKind.IQ3_XXS, WeightKind.IQ3_S}
_ROUNDED |= {WeightKind.IQ2_XXS, WeightKind.IQ2_XS, WeightKind.IQ2_S, WeightKind.IQ1_S, WeightKind.IQ1_M}
"""Kinds whose scales are products, and kept as one f16: off by 2^-11 of itself at most."""
_ON_LOAD = {WeightKind.INT4: WeightKind.Q4_0, WeightKind.FP8: WeightKind.Q8_0}
"""What floats may be brought to that has no tile of its own, and the block that is packed of it."""
ROUNDED_TO = WeightKind.Q8_0
"""The block of matrices that are rounded since those that they are one product with lie in tiles of another kind."""
_SLAB_BYTES = 1 << 18
"""Packed at a time: source and destination stay in the cache over the few passes each needs."""


def tile_kind(kind: WeightKind) -> TileKind:
    return _OTHER_TILES.get(kind) or TileKind[kind.name]


def tensor_note(tensor: WeightTensor, quantise_to: WeightKind | None) -> str | None:
    """What a user should know of how a tensor is held; None when it is used as it is stored, to the bit and in as few
    bits."""
    held = held_block(tensor, quantise_to)
    if isinstance(tensor, ScaledTensor):
        return parts_note(tensor, _tile_bits(tile_kind(held)))
    if quantise_to is None or tensor.kind is held:
        change = repacking_note(tensor.kind)
        return None if change is None else f"{tensor.kind.name} {change}"
    packed = f", packed as {held.name}" if held is not quantise_to else ""
    return f"{tensor.kind.name} quantised to {quantise_to.name}{packed}"


def rounded_note(tensor: WeightTensor) -> str:
    """The same of one that is rounded since its partner lies in tiles of another kind."""
    bits = _tile_bits(tile_kind(ROUNDED_TO))
    return f"{tensor.kind.name} beside another kind rounded to {ROUNDED_TO.name} ({bits:.5g} bits a weight)"


def _tile_bits(tile: TileKind) -> float:
    return 8 * tile.tile_bytes(256) / (256 * TILE_OUTPUTS)


def repacking_note(kind: WeightKind) -> str | None:
    """What a user should know of weights of this kind; None when they are used as they are stored, to the bit and in as
    few bits."""
    tile = tile_kind(kind)
    held, stored = _tile_bits(tile), kind.bits_per_weight
    if held == stored and kind not in _ROUNDED:
        return None
    size = f"{held:.5g} bits a weight instead of {stored:.5g}, " if held != stored else ""
    what = size + ("scales rounded to f16" if kind in _ROUNDED else "exactly")
    return f"in {what}" if tile.name == kind.name else f"repacked to {tile.name} ({what})"


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    kind: TileKind
    outputs: int
    depth: int
    data: npt.NDArray[np.uint8]  # [tiles, bytes a tile]

    @property
    def num_tiles(self) -> int:
        return len(self.data)


def packed_bytes(kind: TileKind, outputs: int, depth: int) -> int:
    tiles = padded(outputs, PANEL_OUTPUTS) // TILE_OUTPUTS
    return tiles * kind.tile_bytes(depth)


def place(kind: TileKind, outputs: int, depth: int, arena: Arena) -> PackedMatrix:
    """Where a matrix lies, or is to be packed."""
    data = arena.take(packed_bytes(kind, outputs, depth)).reshape(-1, kind.tile_bytes(depth))
    return PackedMatrix(kind, outputs, depth, data)


def fill(matrix: PackedMatrix, tensors: Sequence[WeightTensor], quantise_to: WeightKind | None = None) -> None:
    """Matrices, stacked; all but the last have whole panels of outputs. Those of floats are brought to `quantise_to`
    first, if it is given, and quantised ones to the matrix's kind, where theirs has other tiles."""
    first = 0
    for tensor in tensors:
        tiles = -(-tensor.shape[0] // TILE_OUTPUTS)
        target = None if tensor.kind.is_quantised else quantise_to
        _pack_rows(tensor, target, matrix.kind, matrix.data[first : first + tiles])
        first += tiles


def pack(tensors: Sequence[WeightTensor], arena: Arena, quantise_to: WeightKind | None = None) -> PackedMatrix:
    """`place` and `fill` in one."""
    kind = tile_kind(held_block(tensors[0], quantise_to))
    matrix = place(kind, sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1], arena)
    fill(matrix, tensors, quantise_to)
    return matrix


def _pack_rows(
    tensor: WeightTensor, quantise_to: WeightKind | None, kind: TileKind, tiles: npt.NDArray[np.uint8]
) -> None:
    """To tiles [tiles, bytes a tile], slab by slab."""
    held = held_block(tensor, quantise_to)
    is_rounded = tile_kind(held) is not kind
    if is_rounded:
        held = ROUNDED_TO
        assert tile_kind(held) is kind, "a matrix has tiles of one kind"
    slab = max(1, _SLAB_BYTES // max(1, tiles[0].nbytes))
    for first in range(0, len(tiles), slab):
        target = tiles[first : first + slab]
        start, stop = first * TILE_OUTPUTS, (first + len(target)) * TILE_OUTPUTS
        rows = tensor.rows(start, min(stop, tensor.shape[0]))
        source = quantise(held, rows.to_float32()) if is_rounded else _held_rows(rows, quantise_to)
        _pack_slab(held, _with_rows(source, len(target) * TILE_OUTPUTS), target)


def held_block(tensor: WeightTensor, quantise_to: WeightKind | None) -> WeightKind:
    """The kind of block that a tensor's rows are packed from; `quantise_to`: what floats are brought to."""
    if isinstance(tensor, ScaledTensor):
        return block_kind(tensor.outline)
    if quantise_to is None or tensor.kind.is_quantised:
        return tensor.kind
    return _ON_LOAD.get(quantise_to, quantise_to)


def _held_rows(tensor: WeightTensor, quantise_to: WeightKind | None) -> Bytes | RowNumbers:
    if isinstance(tensor, ScaledTensor):
        return repacked(tensor.parts())
    if quantise_to in _ON_LOAD:
        return repacked(quantise_parts(quantise_to, tensor.to_float32()))
    if quantise_to is None or quantise_to is tensor.kind:
        return tensor.data
    return quantise(quantise_to, dequantise(tensor.kind, tensor.data))


def _with_rows(source: Bytes | RowNumbers, count: int) -> Bytes | RowNumbers:
    """Filled up with rows of zeros."""
    if isinstance(source, RowNumbers):
        scales: Any = source.scales
        return RowNumbers(_filled(source.numbers, count), _filled(scales, count))
    return _filled(source, count)


def _filled(rows: npt.NDArray[Scalar], count: int) -> npt.NDArray[Scalar]:
    missing = count - len(rows)
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), dtype=rows.dtype)])
    return np.ascontiguousarray(rows)


def _pack_slab(held: WeightKind, source: Bytes | RowNumbers, target: npt.NDArray[np.uint8]) -> None:
    kind = tile_kind(held)
    if isinstance(source, RowNumbers):
        _pack_numbers(source, kind.layout, target)
        return
    if kind.is_quantised and kind not in (TileKind.Q4_1, TileKind.Q4_0, TileKind.Q8_0):
        _pack_numbers(row_numbers(held, kind.layout, source), kind.layout, target)
        return
    groups = target.reshape(len(target), -1, kind.group_bytes)
    match held:
        case WeightKind.Q4_1:
            _pack_q4_1(source, groups)
        case WeightKind.Q4_K:
            _pack_q4_1(q4_k_as_q4_1(source), groups)
        case WeightKind.Q4_0:
            _pack_q4_0(source, groups)
        case WeightKind.Q8_0:
            _pack_q8_0(source, groups)
        case _:
            _pack_floats(source, groups, 4 if held is WeightKind.F32 else 2)


def _pack_q4_1(source: Bytes, target: npt.NDArray[np.uint8]) -> None:
    """A block is a scale, a minimum and 16 bytes of nibbles: five words. The byte order within a word stays, and the
    tiles read nibbles in that order (value i low, value i + 16 high)."""
    count, groups, _ = target.shape
    words = source.view("<u4").reshape(count, TILE_OUTPUTS, groups, 5)
    halves = source.view("<u2").reshape(count, TILE_OUTPUTS, groups, 10)
    target_words, target_halves = target.view("<u4"), target.view("<u2")
    for word in range(4):
        target_words[:, :, 16 * word : 16 * word + 16] = words[:, :, :, 1 + word].transpose(0, 2, 1)
    for which in range(2):
        first = 128 + 16 * which
        target_halves[:, :, first : first + 16] = halves[:, :, :, which].transpose(0, 2, 1)


def _pack_q4_0(source: Bytes, target: npt.NDArray[np.uint8]) -> None:
    """A block is a scale and 16 bytes of nibbles, as Q4_1's."""
    count, groups, _ = target.shape
    blocks = source.reshape(count, TILE_OUTPUTS, groups, 18)
    words, scales = blocks[..., 2:].view("<u4"), blocks[..., :2].view("<u2")[..., 0]
    for word in range(4):
        target.view("<u4")[:, :, 16 * word : 16 * word + 16] = words[..., word].transpose(0, 2, 1)
    target.view("<u2")[:, :, 128:] = scales.transpose(0, 2, 1)


def _pack_q8_0(source: Bytes, target: npt.NDArray[np.uint8]) -> None:
    """A block is a scale and 32 signed bytes, which become unsigned by a flip of the sign bit."""
    count, groups, _ = target.shape
    blocks = source.reshape(count, TILE_OUTPUTS, groups, 34)
    words, scales = blocks[..., 2:].view("<u4"), blocks[..., :2].view("<u2")[..., 0]
    target_words = target.view("<u4")
    for word in range(8):
        target_words[:, :, 16 * word : 16 * word + 16] = words[..., word].transpose(0, 2, 1)
    target_words[:, :, :128] ^= np.uint32(0x80808080)
    target.view("<u2")[:, :, 256:] = scales.transpose(0, 2, 1)


def _pack_floats(source: Bytes, target: npt.NDArray[np.uint8], value_bytes: int) -> None:
    count, depth, _ = target.shape
    kind = f"<u{value_bytes}"
    values = source.view(kind).reshape(count, TILE_OUTPUTS, depth)
    target.view(kind)[:] = values.transpose(0, 2, 1)


def _pack_numbers(rows: RowNumbers, layout: TileLayout, target: npt.NDArray[np.uint8]) -> None:
    """As `TileLayout` says. Four values of an output are a word: bits are moved in four at a time."""
    count, blocks = len(target), 1 if rows.shared is None else rows.shared.shape[1]
    whole = target.reshape(count, blocks, -1)
    last = whole.shape[2] - layout.shared_bytes
    groups = whole[..., :last].reshape(count, blocks, -1, layout.group_bytes)
    words = rows.numbers.view("<u4").reshape(count, TILE_OUTPUTS, -1, STEPS).transpose(3, 0, 2, 1)
    words = np.ascontiguousarray(words).reshape(STEPS, *groups.shape[:3], TILE_OUTPUTS)
    first, below = 0, 0
    for width in layout.planes:
        mask = np.uint32(((1 << width) - 1) * 0x01010101)
        for vector in range(width):
            held = np.zeros(words.shape[1:], dtype="<u4")
            for place in range(0, 8, width):
                step = (8 * vector + place) // width
                held |= ((words[4 * (step % 2) + step // 2] >> np.uint32(below)) & mask) << np.uint32(place)
            groups[..., first : first + 64] = held.view(np.uint8)
            first += 64
        below += width
    scales = _side_by_side(rows.scales, (count, TILE_OUTPUTS, *groups.shape[1:3], -1))
    groups[..., first:] = scales
    if rows.shared is not None:
        whole[..., last:] = _side_by_side(rows.shared, (count, TILE_OUTPUTS, blocks, -1))


def _side_by_side(numbers: npt.NDArray[np.generic], shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Of each of 16 outputs a few numbers, to each of the numbers of 16 outputs.  # [tiles, 16, ..., few], as bytes"""
    shaped = numbers.reshape(shape)
    moved = np.ascontiguousarray(np.moveaxis(shaped, 1, -1))  # [tiles, ..., few, 16]
    return moved.view(np.uint8).reshape(*moved.shape[:-2], -1)
