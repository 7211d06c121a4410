"""Packed tiles back to float32, written from the description of the layouts alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.packing import PackedMatrix
from twostroke.backends.cpu.tile_kinds import Scales, TileKind, TileLayout


def unpack(matrix: PackedMatrix) -> npt.NDArray[np.float32]:
    """[tiles * 16, depth], padding included"""
    values = np.zeros((matrix.num_tiles * 16, matrix.depth), dtype=np.float32)
    size = matrix.kind.group_values
    for tile, (groups, shared) in enumerate(_groups(matrix)):
        for row in range(16):
            for index, group in enumerate(groups):
                block = shared[index // 8] if len(shared) else None
                values[16 * tile + row, size * index : size * (index + 1)] = _group(matrix.kind, group, block, row)
    return values


def middles(matrix: PackedMatrix) -> npt.NDArray[np.float32]:
    """[tiles * 16, groups] what each group's weights are in the middle of their range, of kinds that have minimums;
    0 for others"""
    if not matrix.kind.layout.has_minimums:
        return np.zeros((16 * matrix.num_tiles, matrix.depth // matrix.kind.group_values), dtype=np.float32)
    groups = matrix.data.reshape(matrix.num_tiles, -1, matrix.kind.group_bytes)
    numbers = np.ascontiguousarray(groups[..., -64:]).view("<f2").astype(np.float64)
    found = matrix.kind.layout.middle * numbers[..., :16] + numbers[..., 16:]  # [tiles, groups, 16]
    return np.ascontiguousarray(found.transpose(0, 2, 1)).reshape(16 * matrix.num_tiles, -1).astype(np.float32)


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """To the nearest, halves away from zero."""
    return ((values.view(np.uint32) + np.uint32(0x8000)) >> 16).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _groups(
    matrix: PackedMatrix,
) -> list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]]:
    """Of each tile: its groups [groups, bytes], and what blocks of eight of them share [blocks, numbers, 16]."""
    size, shared = matrix.kind.group_bytes, matrix.kind.shared_bytes
    found = []
    for tile in matrix.data:
        if not shared:
            found.append((tile.reshape(-1, size), np.zeros((0,), np.float32)))
            continue
        blocks = tile.reshape(-1, 8 * size + shared)
        numbers = np.ascontiguousarray(blocks[:, 8 * size :]).view("<f2").astype(np.float32)
        found.append((blocks[:, : 8 * size].reshape(-1, size), numbers.reshape(len(blocks), -1, 16)))
    return found


def _group(
    kind: TileKind, group: npt.NDArray[np.uint8], block: npt.NDArray[np.float32] | None, row: int
) -> npt.NDArray[np.float32]:
    if kind is TileKind.BF16:
        return (group.view("<u2")[row : row + 1].astype(np.uint32) << 16).view(np.float32)
    if not kind.is_quantised:
        return group.view("<f4" if kind is TileKind.F32 else "<f2")[row : row + 1].astype(np.float32)
    layout = kind.layout
    numbers = np.array([_number(layout, group, row, value) for value in range(32)])
    if layout.levels:
        numbers = np.array(layout.levels)[numbers]
    scales, minimums = _scales(layout, group[layout.number_bytes :], block, row)
    runs = (numbers - layout.middle if not layout.has_minimums else numbers).astype(np.float32)
    return (runs * np.repeat(scales, 32 // len(scales)) + np.repeat(minimums, 32 // len(minimums))).astype(np.float32)


def _number(layout: TileLayout, group: npt.NDArray[np.uint8], row: int, value: int) -> int:
    if layout.planes == (8,):
        return int(group[64 * (value // 4) + 4 * row + value % 4])
    step, number, first, below = 2 * (value % 16 // 4) + value // 16, 0, 0, 0
    for width in layout.planes:
        bit = width * step
        held = int(group[first + 64 * (bit // 8) + 4 * row + value % 4])
        number |= (held >> bit % 8 & (1 << width) - 1) << below
        first, below = first + 64 * width, below + width
    return number


def _scales(
    layout: TileLayout, rest: npt.NDArray[np.uint8], block: npt.NDArray[np.float32] | None, row: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Scales, and what is added: one of each for the group, or one for each half."""
    nothing = np.zeros(1, np.float32)
    if layout.scales is Scales.HALVES:
        numbers = np.ascontiguousarray(rest).view("<f2").reshape(-1, 16)[:, row].astype(np.float32)
        return (numbers[:1], numbers[1:]) if layout.has_minimums else (numbers, nothing)
    own = rest.reshape(-1, 16)[:, row]
    if layout.scales is Scales.POWERS:
        return np.array([2.0 ** (int(own[0]) - 128)], np.float32), nothing
    assert block is not None
    if layout.scales is Scales.SIGNED_BYTES:
        return own.view(np.int8) * block[0, row], nothing
    return (own & 15) * block[0, row], -((own >> 4) * block[1, row])
