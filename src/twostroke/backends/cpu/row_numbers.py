"""What rows hold, as they are stored, in the form that tiles have it: numbers for the planes of bits, and scales. Kinds
that have scales of scales and a tile without have the products rounded to f16."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.memory import Bytes
from twostroke.backends.cpu.tile_kinds import GROUP_VALUES, Scales, TileLayout
from twostroke.models.weights.block_numbers import BlockNumbers, block_numbers, q3_k_scales
from twostroke.models.weights.tensor import WeightKind

Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class RowNumbers:
    numbers: Bytes  # [rows, groups, 32]
    scales: Halves | Bytes  # [rows, groups, numbers a group]: as the layout has them, minimums behind
    shared: Halves | None = None  # [rows, blocks, numbers a block]


def row_numbers(kind: WeightKind, layout: TileLayout, source: Bytes) -> RowNumbers:
    """# source [rows, bytes a row], contiguous"""
    rows, blocks = len(source), source.reshape(-1, kind.block_bytes)
    if kind is WeightKind.Q5_K:
        return _q5_k(source)
    if kind is WeightKind.Q6_K:
        return _q6_k(source)
    with np.errstate(over="ignore", invalid="ignore"):
        found = block_numbers(kind, blocks)
        numbers = _held(layout, found.integers).reshape(rows, -1, GROUP_VALUES)
        groups = numbers.shape[1]
        match layout.scales:
            case Scales.HALVES:
                return RowNumbers(numbers, _halves(layout, found, rows * groups).reshape(rows, groups, -1))
            case Scales.POWERS:
                return RowNumbers(numbers, blocks[:, :1].reshape(rows, groups, 1))
            case Scales.SIGNED_BYTES:
                scales, shared = q3_k_scales(blocks).view(np.uint8), blocks[:, 108:]
            case Scales.NIBBLES:
                scales, shared = blocks[:, :16], blocks[:, 80:]
    whole = np.ascontiguousarray(shared).view("<f2").reshape(rows, len(blocks) // rows, -1)
    return RowNumbers(numbers, scales.reshape(rows, groups, 2), whole)


def _held(layout: TileLayout, integers: npt.NDArray[np.int8]) -> Bytes:
    """What stands for each integer in a tile."""
    if layout.levels:
        return _codes(layout.levels)[integers.view(np.uint8)]
    held: Bytes = (integers if layout.has_minimums else integers + np.int8(layout.middle)).view(np.uint8)
    return held


@cache
def _codes(levels: tuple[int, ...]) -> Bytes:
    """[256] by the bits of a level: the first code that stands for it."""
    codes = np.zeros(256, dtype=np.uint8)
    for code in range(len(levels) - 1, -1, -1):
        codes[levels[code] & 255] = code
    return codes


def _halves(layout: TileLayout, found: BlockNumbers, groups: int) -> Halves:
    """[groups, scales and minimums]: those of a run longer than a group, or than a half of one, are repeated."""
    parts = [found.scales] if found.minimums is None else [found.scales, found.minimums]
    assert found.minimums is None or layout.has_minimums
    spread = [np.repeat(part.reshape(-1), layout.scale_sets * groups // part.size) for part in parts]
    return (
        np.stack([part.reshape(groups, layout.scale_sets) for part in spread], axis=1).reshape(groups, -1).astype("<f2")
    )


def q4_k_as_q4_1(source: Bytes) -> Bytes:
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


def _q5_k(source: Bytes) -> RowNumbers:
    blocks = source.reshape(len(source), -1, 176)
    scales, minimums = _q4_k_scales(blocks)
    high, nibbles = blocks[..., 16:48], blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)
    numbers = np.empty((*blocks.shape[:2], 8, 32), dtype=np.uint8)
    for index in range(8):  # bit `index` of each high byte is the fifth bit of sub-block `index`
        low = (nibbles[:, :, index // 2] >> (4 * (index % 2))) & 15
        numbers[:, :, index] = low | (((high >> index) & 1) << 4)
    with np.errstate(over="ignore", invalid="ignore"):
        halves = np.stack([scales, -minimums], axis=-1).astype(np.float16)
    return RowNumbers(numbers.reshape(len(source), -1, 32), halves.reshape(len(source), -1, 2))


def _q6_k(source: Bytes) -> RowNumbers:
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
    return RowNumbers(numbers.reshape(len(source), -1, 32), scales.reshape(len(source), -1, 2))
