"""Stored weights to the layouts that tiles read. An output tile is 16 rows of the matrix, group of inputs after group;
within a group the 16 rows lie side by side, four bytes each, so that one vector holds four inputs of 16 outputs.
Kinds without a tile of their own are brought to the nearest one that has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.arguments import PANEL_OUTPUTS, TILE_OUTPUTS, TileKind
from twostroke.backends.cpu.memory import Arena, Bytes, padded
from twostroke.models.weights.quantisation import dequantise, quantise
from twostroke.models.weights.tensor import WeightKind, WeightTensor

_TILE_KINDS = {
    WeightKind.F32: TileKind.F32,
    WeightKind.F16: TileKind.F16,
    WeightKind.BF16: TileKind.BF16,
    WeightKind.Q8_0: TileKind.Q8_0,
    WeightKind.Q4_1: TileKind.Q4_1,
    WeightKind.Q4_0: TileKind.Q4_0,
    WeightKind.Q4_K: TileKind.Q4_1,  # as of all K kinds, the products of its scales rounded to f16
    WeightKind.Q5_K: TileKind.Q5_K,
    WeightKind.Q6_K: TileKind.Q6_K,
}
_SLAB_BYTES = 1 << 18
"""Packed at a time: source and destination stay in the cache over the few passes each needs."""


def tile_kind(kind: WeightKind) -> TileKind:
    return _TILE_KINDS[kind]


def repacking_note(kind: WeightKind) -> str | None:
    """What a user should know of weights of this kind; None when they are used as they are stored."""
    match kind:
        case WeightKind.Q4_K:
            return "repacked to Q4_1 (scales rounded to f16)"
        case WeightKind.Q5_K | WeightKind.Q6_K:
            return "with their scales rounded to f16"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    kind: TileKind
    outputs: int
    depth: int
    data: npt.NDArray[np.uint8]  # [tiles, groups, bytes a group]

    @property
    def num_tiles(self) -> int:
        return len(self.data)


def packed_bytes(kind: TileKind, outputs: int, depth: int) -> int:
    tiles = padded(outputs, PANEL_OUTPUTS) // TILE_OUTPUTS
    return tiles * (depth // kind.group_values) * kind.group_bytes


def place(kind: TileKind, outputs: int, depth: int, arena: Arena) -> PackedMatrix:
    """Where a matrix lies, or is to be packed."""
    shape = (-1, depth // kind.group_values, kind.group_bytes)
    return PackedMatrix(kind, outputs, depth, arena.take(packed_bytes(kind, outputs, depth)).reshape(shape))


def fill(matrix: PackedMatrix, tensors: Sequence[WeightTensor], quantise_to: WeightKind | None = None) -> None:
    """Matrices of one tile kind, stacked; all but the last have whole panels of outputs. Those of floats are brought
    to `quantise_to` first, if it is given."""
    first = 0
    for tensor in tensors:
        tiles = -(-tensor.shape[0] // TILE_OUTPUTS)
        target = None if tensor.kind.is_quantised else quantise_to
        _pack_rows(tensor.kind, target or tensor.kind, tensor.data, matrix.data[first : first + tiles])
        first += tiles


def pack(tensors: Sequence[WeightTensor], arena: Arena, quantise_to: WeightKind | None = None) -> PackedMatrix:
    """`place` and `fill` in one."""
    kind = quantise_to if quantise_to is not None and not tensors[0].kind.is_quantised else tensors[0].kind
    matrix = place(tile_kind(kind), sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1], arena)
    fill(matrix, tensors, quantise_to)
    return matrix


def _pack_rows(stored: WeightKind, held: WeightKind, rows: Bytes, tiles: npt.NDArray[np.uint8]) -> None:
    """rows [outputs, bytes a row] to tiles [tiles, groups, bytes a group], slab by slab."""
    slab = max(1, _SLAB_BYTES // max(1, tiles[0].nbytes))
    for first in range(0, len(tiles), slab):
        target = tiles[first : first + slab]
        source = rows[first * TILE_OUTPUTS : (first + len(target)) * TILE_OUTPUTS]
        missing = len(target) * TILE_OUTPUTS - len(source)
        if missing:
            source = np.concatenate([source, np.zeros((missing, rows.shape[1]), dtype=np.uint8)])
        if held is not stored:
            source = quantise(held, dequantise(stored, source))
        match held:
            case WeightKind.Q4_1:
                _pack_q4_1(source, target)
            case WeightKind.Q4_0:
                _pack_q4_0(source, target)
            case WeightKind.Q4_K:
                _pack_q4_1(_q4_k_as_q4_1(source), target)
            case WeightKind.Q8_0:
                _pack_q8_0(source, target)
            case WeightKind.Q5_K:
                _pack_planes(*_q5_k_numbers(source), 1, target)
            case WeightKind.Q6_K:
                _pack_planes(*_q6_k_numbers(source), 2, target)
            case _:
                _pack_floats(source, target, 4 if held is WeightKind.F32 else 2)


def _pack_q4_1(source: Bytes, target: npt.NDArray[np.uint8]) -> None:
    """A block is a scale, a minimum and 16 bytes of nibbles: five words. The byte order within a word stays, and the
    tiles read nibbles in that order (value i low, value i + 16 high)."""
    count, groups, _ = target.shape
    source = np.ascontiguousarray(source)
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
    values = np.ascontiguousarray(source).view(kind).reshape(count, TILE_OUTPUTS, depth)
    target.view(kind)[:] = values.transpose(0, 2, 1)


def _q4_k_as_q4_1(source: Bytes) -> Bytes:
    """A super-block of 256 is eight blocks of Q4_1 whose scale and minimum are products: these are rounded to f16."""
    blocks = source.reshape(len(source), -1, 144)
    scales, minimums = _q4_k_scales(blocks)
    result = np.empty((*blocks.shape[:2], 8, 20), dtype=np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        result[..., :2] = scales.astype("<f2")[..., None].view(np.uint8)
        result[..., 2:4] = (-minimums).astype("<f2")[..., None].view(np.uint8)
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)  # two sub-blocks: low nibbles, then high ones
    for which, nibbles in enumerate((pairs & 15, pairs >> 4)):
        result[:, :, which::2, 4:] = nibbles[..., :16] | (nibbles[..., 16:] << 4)
    return result.reshape(len(source), -1)


def _q4_k_scales(blocks: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Six bits each, of eight scales and eight minimums, in twelve bytes; times the super-block's own two."""
    first, second, last = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    whole = np.ascontiguousarray(blocks[..., :4]).view("<f2").astype(np.float32)
    scales = np.concatenate([first & 63, (last & 15) | ((first >> 6) << 4)], axis=-1)
    minimums = np.concatenate([second & 63, (last >> 4) | ((second >> 6) << 4)], axis=-1)
    return scales * whole[..., :1], minimums * whole[..., 1:]


def _q5_k_numbers(source: Bytes) -> tuple[Bytes, npt.NDArray[np.float16]]:
    """What a slab of rows holds: numbers of five bits [rows, groups, 32], and [rows, groups, (scale, minimum)]."""
    blocks = source.reshape(len(source), -1, 176)
    scales, minimums = _q4_k_scales(blocks)
    high, nibbles = blocks[..., 16:48], blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)
    numbers = np.empty((*blocks.shape[:2], 8, 32), dtype=np.uint8)
    for index in range(8):  # bit `index` of each high byte is the fifth bit of sub-block `index`
        low = (nibbles[:, :, index // 2] >> (4 * (index % 2))) & 15
        numbers[:, :, index] = low | (((high >> index) & 1) << 4)
    with np.errstate(over="ignore", invalid="ignore"):
        halves = np.stack([scales, -minimums], axis=-1).astype(np.float16)
    return numbers.reshape(len(source), -1, 32), halves.reshape(len(source), -1, 2)


def _q6_k_numbers(source: Bytes) -> tuple[Bytes, npt.NDArray[np.float16]]:
    """Numbers of six bits [rows, groups, 32], and the scales of their halves [rows, groups, 2]."""
    blocks = source.reshape(len(source), -1, 210)
    nibbles = blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32)
    numbers = np.empty((*blocks.shape[:2], 2, 4, 32), dtype=np.uint8)
    for index in range(4):
        first = 32 * (index % 2)
        low = (nibbles[..., first : first + 32] >> (4 * (index // 2))) & 15
        numbers[:, :, :, index] = low | (((high >> (2 * index)) & 3) << 4)
    whole = np.ascontiguousarray(blocks[..., 208:]).view("<f2").astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        scales = (blocks[..., 192:208].view(np.int8) * whole).astype(np.float16)
    return numbers.reshape(len(source), -1, 32), scales.reshape(len(source), -1, 2)


def _pack_planes(numbers: Bytes, halves: npt.NDArray[np.float16], bits: int, target: npt.NDArray[np.uint8]) -> None:
    """Nibbles as Q4_1's, then planes of the `bits` above them. A step takes four values of each output (of low nibbles
    4j to 4j + 3, of high ones 16 more), and those of step s lie from bit s * bits on, eight bits a plane."""
    count, groups, _ = target.shape
    numbers = numbers.reshape(count, TILE_OUTPUTS, groups, 32).transpose(0, 2, 1, 3)  # [tiles, groups, outputs, 32]
    low = numbers & 15
    nibbles = (low[..., :16] | (low[..., 16:] << 4)).reshape(count, groups, TILE_OUTPUTS, 4, 4)
    target[:, :, :256] = nibbles.transpose(0, 1, 3, 2, 4).reshape(count, groups, 256)
    steps_a_plane = 8 // bits
    for plane in range(bits):
        held = np.zeros((count, groups, TILE_OUTPUTS, 4), dtype=np.uint8)
        for place in range(steps_a_plane):
            step = plane * steps_a_plane + place
            first = 4 * (step // 2) + 16 * (step % 2)
            held |= (numbers[..., first : first + 4] >> 4) << (bits * place)
        first = 256 + 64 * plane
        target[:, :, first : first + 64] = held.reshape(count, groups, 64)
    ordered = halves.astype("<f2").reshape(count, TILE_OUTPUTS, groups, 2).transpose(0, 2, 3, 1)
    target.view("<f2")[:, :, -32:] = ordered.reshape(count, groups, 32)
