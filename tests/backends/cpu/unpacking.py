"""Packed tiles back to float32, written from the description of the layouts alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.arguments import TileKind
from twostroke.backends.cpu.packing import PackedMatrix


def unpack(matrix: PackedMatrix) -> npt.NDArray[np.float32]:
    """[tiles * 16, depth], padding included"""
    values = np.zeros((matrix.num_tiles * 16, matrix.depth), dtype=np.float32)
    for tile, groups in enumerate(matrix.data):
        for row in range(16):
            for index, group in enumerate(groups):
                size = matrix.kind.group_values
                values[16 * tile + row, size * index : size * (index + 1)] = _group(matrix.kind, group, row)
    return values


def middles(matrix: PackedMatrix) -> npt.NDArray[np.float32]:
    """[tiles * 16, groups] what each group's weights are in the middle of their range, of kinds that have minimums;
    0 for others"""
    centre = {TileKind.Q4_1: 8, TileKind.Q5_K: 16}.get(matrix.kind)
    if centre is None:
        return np.zeros((16 * matrix.num_tiles, matrix.depth // matrix.kind.group_values), dtype=np.float32)
    numbers = matrix.data[..., -64:].reshape(matrix.num_tiles, -1, 64).view("<f2").astype(np.float64)
    found = centre * numbers[..., :16] + numbers[..., 16:]  # [tiles, groups, 16]
    return np.ascontiguousarray(found.transpose(0, 2, 1)).reshape(16 * matrix.num_tiles, -1).astype(np.float32)


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """To the nearest, halves away from zero."""
    return ((values.view(np.uint32) + np.uint32(0x8000)) >> 16).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _group(kind: TileKind, group: npt.NDArray[np.uint8], row: int) -> npt.NDArray[np.float32]:
    if kind is TileKind.Q4_1:
        own = group[:256].reshape(4, 16, 4)[:, row].reshape(16)  # 16 bytes: value i low, value i + 16 high
        scale, minimum = group[256:].view("<f2").reshape(2, 16)[:, row].astype(np.float32)
        quants = np.concatenate([own & 15, own >> 4]).astype(np.float32)
        return (quants * scale + minimum).astype(np.float32)
    if kind is TileKind.Q4_0:
        own = group[:256].reshape(4, 16, 4)[:, row].reshape(16)
        scale = group[256:].view("<f2")[row].astype(np.float32)
        return ((np.concatenate([own & 15, own >> 4]).astype(np.float32) - 8) * scale).astype(np.float32)
    if kind in (TileKind.Q5_K, TileKind.Q6_K):
        return _planes(kind, group, row)
    if kind is TileKind.Q8_0:
        own = group[:512].reshape(8, 16, 4)[:, row].reshape(32)
        scale = group[512:].view("<f2")[row].astype(np.float32)
        return ((own.astype(np.float32) - 128) * scale).astype(np.float32)
    if kind is TileKind.BF16:
        return (group.view("<u2")[row : row + 1].astype(np.uint32) << 16).view(np.float32)
    return group.view("<f4" if kind is TileKind.F32 else "<f2")[row : row + 1].astype(np.float32)


def _planes(kind: TileKind, group: npt.NDArray[np.uint8], row: int) -> npt.NDArray[np.float32]:
    bits, values = (1, []) if kind is TileKind.Q5_K else (2, [])
    for value in range(32):
        half, quarter, byte = value // 16, value % 16 // 4, value % 4
        low = int(group[64 * quarter + 4 * row + byte]) >> (4 * half) & 15
        place = bits * (2 * quarter + half)  # among the bits of all planes
        plane = int(group[256 + 64 * (place // 8) + 4 * row + byte])
        values.append(low | ((plane >> place % 8) & ((1 << bits) - 1)) << 4)
    first, second = group[-64:].view("<f2").reshape(2, 16)[:, row].astype(np.float32)
    numbers = np.array(values, dtype=np.float32)
    if kind is TileKind.Q5_K:
        return numbers * first + second
    return (numbers - 32) * np.repeat([first, second], 16)
