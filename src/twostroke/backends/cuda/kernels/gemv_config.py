"""How the few-row products are cut, by their shape: a table, so that nothing is tuned while a user waits. The entries
are the best, or nearly, that `bench/cuda/layer.py` measured on an H200 for the matrices of a 0.6B and an 8B model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Final, Literal

MAX_ROWS: Final = 16
FMA_ROWS: Final = 8
"""Rows beyond which a thread's accumulators would not fit in its registers."""

_L2_BYTES: Final = 12 * 2**20
"""What may be asked to be brought to L2 ahead: a part of it, or it would be gone again before it is used."""

Method = Literal["fma", "dot"]


@dataclass(frozen=True)
class GemvConfig:
    method: Method
    """fma: every thread multiplies and adds in float32; its cost grows with the rows. dot: tensor cores, with the
    weights' rows as the tall side and the batch padded to 8 or 16; its cost does not."""
    block_n: int
    """Outputs a program computes."""
    block_k: int
    """Inputs taken at a time: by the whole program (fma), or by each warp of it (dot)."""
    num_warps: int
    num_stages: int = 4
    """Tiles of weights kept on their way in shared memory (dot)."""
    prefetch_tiles: int = 1
    """Tiles of weights that a program of a dependent launch holds in registers before it waits (fma)."""
    prefetch_width: int = 0
    """Inputs whose weights a program of a dependent launch asks to be brought to L2 before it waits."""
    early_trigger: bool = True
    """Whether the next kernel may start at once, to fetch weights meanwhile, or when this one has read its own."""


def choose(num_rows: int, outputs: int, width: int, gated: bool, bytes_an_element: int = 2) -> GemvConfig:
    """The configuration for weights of [outputs, width], or of twice as many outputs where gated."""
    return fit(_preferred(num_rows, outputs, width, gated), width, bytes_an_element)


def l2_width(outputs: int, width: int, gated: bool) -> int:
    """How many inputs' weights of every output may be on their way to L2 at a time; 0 if it is not worth a line."""
    rows = outputs * (2 if gated else 1)
    prefetch_width = width
    while prefetch_width * rows * 2 > _L2_BYTES:
        prefetch_width //= 2
    return prefetch_width if prefetch_width >= 64 else 0


@cache
def _preferred(num_rows: int, outputs: int, width: int, gated: bool) -> GemvConfig:
    """Small matrices let the next kernel start early, to fetch its weights meanwhile; for large ones that takes
    bandwidth from the one that is running."""
    is_large = outputs * width >= 2**24
    is_vocabulary = outputs >= 2**15
    if num_rows > 2:
        return replace(_for_several_rows(num_rows, outputs, width, gated), early_trigger=not is_large)
    if is_vocabulary:
        two_rows = GemvConfig("fma", 8, 1024, 4)
        one_row = GemvConfig("fma", 4, 2048, 8) if width >= 2048 else GemvConfig("fma", 4, 1024, 4)
        return (
            replace(one_row, early_trigger=width >= 2048) if num_rows == 1 else replace(two_rows, early_trigger=False)
        )
    if gated:
        config = GemvConfig("fma", 8 if num_rows == 2 and not is_large else 4, 1024, 4)
    elif outputs >= width:  # qkv
        config = GemvConfig("fma", 4, 2048, 8, prefetch_tiles=2) if is_large else GemvConfig("fma", 8, 1024, 4)
        if is_large and num_rows == 2:
            config = GemvConfig("fma", 8, 1024, 4)
    elif not is_large:  # o and down of a small model: few programs, each to be soon done
        config = GemvConfig("fma", 2, 1024, 4, prefetch_tiles=2)
        if num_rows == 2:
            config = GemvConfig("fma", 4, 2048, 8) if width <= 2048 else replace(config, prefetch_tiles=3)
    elif outputs == width:  # o of a large one
        config = GemvConfig("fma", 2, 1024, 4, prefetch_tiles=3) if num_rows == 1 else GemvConfig("fma", 4, 2048, 8)
    else:  # its down
        config = GemvConfig("fma", 4, 2048, 8) if num_rows == 1 else GemvConfig("fma", 4, 1024, 4, prefetch_tiles=2)
    return replace(config, early_trigger=not is_large)


def _for_several_rows(num_rows: int, outputs: int, width: int, gated: bool) -> GemvConfig:
    """Every program reads all inputs: tall blocks read them less often, but there must be a program for every SM."""
    if gated:
        return GemvConfig("dot", 16, 64, 4)
    if outputs >= 4096:
        if num_rows <= 4 and width <= 1024:
            return GemvConfig("fma", 8, 1024, 4)
        return GemvConfig("dot", 32, 64, 4)
    return GemvConfig("dot", 16, 128, 4)


@cache
def fit(config: GemvConfig, width: int, bytes_an_element: int = 2) -> GemvConfig:
    """The configuration with its block cut down until it divides the width, or leaves little of the last one masked."""
    warps = config.num_warps
    block_k = config.block_k
    if config.method == "dot":
        block_k = max(block_k * 2 // max(bytes_an_element, 2), 16)  # stages of wide elements must fit, too
        while block_k > 16 and -width % (block_k * warps) > width // 8:
            block_k //= 2
    else:
        while block_k > 256 and -width % block_k > width // 8:
            block_k //= 2
        # A warp reads 256 inputs at a time. Where inputs and weights lie in the same threads, nothing is exchanged.
        warps = min(warps, max(block_k // 256, 1))
    prefetch_tiles = min(config.prefetch_tiles, -(-width // block_k))
    return replace(config, block_k=block_k, num_warps=warps, prefetch_tiles=prefetch_tiles)
