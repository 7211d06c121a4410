"""How the few-row products are cut: what a configuration needs, and which are worth measuring. Which one a product gets
is a table's to say."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product as all_of
from typing import Final, Literal

from twostroke.backends.cuda.kernels.product import Card, Product, Settings, settings_of

GEMV_ROWS: Final = 8
"""Beyond, a thread's accumulators would not fit in its registers (fma), and other kernels are faster (dot)."""

Method = Literal["fma", "dot"]


@dataclass(frozen=True, slots=True)
class GemvConfig:
    method: Method
    """fma: every thread multiplies and adds in float32; its cost grows with the rows. dot: tensor cores, with the
    weights' rows as the tall side and the batch padded to 8; its cost does not."""
    block_n: int  # outputs a program computes
    block_k: int  # inputs taken at a time: by the whole program (fma), or by each warp of it (dot)
    num_warps: int
    num_stages: int = 4  # tiles of weights kept on their way in shared memory (dot)
    prefetch_tiles: int = 1
    """Tiles of weights that a program of a dependent launch holds in registers before it waits (fma)."""
    early_trigger: bool = True
    """Whether the next kernel may start at once, to fetch weights meanwhile, or when this one has read its own."""
    sums: int = 0


class GemvProducts:
    name, form, fuses = "gemv", "plain", True

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> GemvConfig | str:
        if rows > GEMV_ROWS:
            return f"it takes {GEMV_ROWS} rows at most"
        if product.role == "sandwich":
            return "it adds to the residual what has no norm of its own"
        return "it takes one matrix" if product.experts else GemvConfig(**settings)

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        """Threads' own sums for a few rows, tensor cores for some more; the next kernel starts early or late."""
        found = []
        if rows <= 4:
            blocks = ((2, 1024, 4), (4, 1024, 4), (4, 2048, 8), (8, 1024, 4))[0 if rows <= 2 else 2 :]
            ahead = (1, 3) if rows == 1 else (1,)
            found += [GemvConfig("fma", *block, prefetch_tiles=tiles) for block, tiles in all_of(blocks, ahead)]
        if 1 < rows <= GEMV_ROWS:
            found += [GemvConfig("dot", *block) for block in ((16, 64, 4), (16, 128, 4), (32, 64, 4))]
        both = [replace(config, early_trigger=is_early) for config in found for is_early in (True, False)]
        return [
            settings_of(config)
            for config in both
            if isinstance(self.tile(product, rows, card, asdict(config)), GemvConfig)
        ]


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
