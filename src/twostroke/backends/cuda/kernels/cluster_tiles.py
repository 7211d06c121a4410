"""How the products of hundreds of rows and more are cut, by their shape: rules, so that nothing is tuned while a user
waits. They give the best, or nearly, of what `bench/cuda/hopper_products.py` measured on an H200, and leave to cuBLAS
what that does as well."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Final

from twostroke.backends.cuda.kernels.product_tiles import DEPTH

SHARED_BYTES: Final = 226 * 1024
"""What a program on a Hopper chip may have, less its barriers."""
ALIGNMENT: Final = 1024
LEAST_ROWS: Final = 65
SHAPES: Final = {128: (1, 2, 256), 192: (1, 3, 256), 256: (2, 2, 128)}
"""By the most rows: blocks of 64 a warp group, warp groups, and the most outputs whose sums they have registers for."""
MAX_SPLIT_ROWS: Final = 256
SPLIT_ROWS: Final = range(129, MAX_SPLIT_ROWS + 1)
"""Where the depth is split. cuBLAS is a little faster at some of these, but starts when the kernel ahead has ended."""
LEAST_OUTPUTS: Final = 64
"""Of a program: with fewer it reads mostly rows, which all others read too."""
LEAST_ROUNDS: Final = 8
PARTS: Final = 2
LEAST_ROUNDS_OF_PARTS: Final = 32
"""Parts are read again by whoever adds them up: a long depth's wider tiles are worth that, a short one's are not."""
LEAST_SHARE: Final = 0.75
"""Of the multiprocessors, that a product which is split must keep busy; cuBLAS does better with less."""
LEAST_LONG_SHARE: Final = 0.8
"""The same of a long one, over all of its waves; cuBLAS has smaller tiles."""
MAX_UNEVEN_ROWS: Final = 1536
"""Beyond, a last wave that is not full is a small share of all of them."""


@dataclass(frozen=True, slots=True)
class ClusterTile:
    """How a product is cut: a program computes `outputs` outputs (with a gate: half of them gates) of `rows` rows."""

    outputs: int
    row_blocks: int
    """Blocks of 64 rows a warp group."""
    groups: int
    """Warp groups."""
    cluster: int = 2
    """Programs that fetch rows for one another, or divide the depth between them and add up."""
    is_split: bool = False
    parts: int = 1
    """Clusters that divide a split depth: the reader adds up what they leave."""

    @property
    def rows(self) -> int:
        return 64 * self.row_blocks * self.groups

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.outputs) * 2 * DEPTH

    @property
    def stages(self) -> int:
        return (SHARED_BYTES - ALIGNMENT) // self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """The ring; where the depth is split it holds the sums in the end, with rows set off against each other."""
        sums = self.rows * (self.outputs + 8) * 4 if self.is_split else 0
        return max(self.stages * self.stage_bytes, sums) + ALIGNMENT

    @property
    def pieces(self) -> int:
        """Instructions for a program's outputs. One has 256 at most, and wants all its sums in the registers that a
        launch hands out: the more warp groups, the fewer."""
        return 2 if self.outputs > {2: 256, 3: 192, 4: 128}[self.groups] else 1


LONG_TILES: Final = (
    (ClusterTile(192, 2, 2), inf, 1.0),
    (ClusterTile(224, 1, 3), MAX_UNEVEN_ROWS, 1.0),
    (ClusterTile(176, 2, 2), MAX_UNEVEN_ROWS, 1.02),
    (ClusterTile(224, 1, 2), 640, 1.02),
)
"""For gates of more rows than a tile has: up to how many, and what a tile's work costs by the first's, which reads
least from shared memory and L2. The more rows, the less does a wave that is not full matter, and the more the power."""


@cache
def choose_cluster_tile(
    rows: int, outputs: int, width: int, num_sms: int, *, gated: bool = False, may_split: bool = False
) -> ClusterTile | None:
    """None: this product is another's to compute. `may_split`: whether its reader adds up parts, in float32."""
    if rows < LEAST_ROWS or width % DEPTH or outputs % 8:
        return None
    if rows > 256:
        return _choose_long(rows, 2 * outputs, num_sms) if gated else None
    row_blocks, groups, most = next(shape for limit, shape in SHAPES.items() if rows <= limit)
    if gated:
        waves = 1
        while (block := _one_wave(2 * outputs, num_sms * waves, 16)) > most:
            waves += 1
        return ClusterTile(block, row_blocks, groups) if block >= LEAST_OUTPUTS else None
    if not may_split or rows not in SPLIT_ROWS:
        return None
    for parts in (PARTS, 1):
        splits = 2 * parts
        block, rounds = max(LEAST_OUTPUTS, _one_wave(outputs, num_sms // splits, 8)), width // DEPTH // splits
        if ClusterTile(block, row_blocks, groups).pieces > 1:
            block = -(-block // 16) * 16  # each piece is of eights
        is_long = rounds >= (LEAST_ROUNDS if parts == 1 else LEAST_ROUNDS_OF_PARTS)
        is_busy = outputs * splits >= LEAST_SHARE * num_sms * block
        if block <= most and width % (splits * DEPTH) == 0 and is_long and is_busy:
            return ClusterTile(block, row_blocks, groups, is_split=True, parts=parts)
    return None


def long_gate_tiles(outputs: int, width: int, num_sms: int) -> set[ClusterTile]:
    """Every tile that gates of more rows than one has may be cut into, however many they are."""
    if width % DEPTH or outputs % 8:
        return set()
    rows = range(256 + 1, MAX_UNEVEN_ROWS + 1)
    found = {choose_cluster_tile(number, outputs, width, num_sms, gated=True) for number in rows}
    return {tile for tile in (LONG_TILES[0][0], *found) if tile is not None}


def _choose_long(rows: int, outputs: int, num_sms: int) -> ClusterTile | None:
    """The tile with which pairs of programs have least to do, the last wave's idle ones counted as if they worked."""
    work = {}
    for tile, most_rows, cost in LONG_TILES:
        if rows <= most_rows:
            pairs = -(-rows // tile.rows) * -(-outputs // (2 * tile.outputs))
            work[tile] = -(-pairs // (num_sms // 2)) * tile.rows * tile.outputs * cost
    best = min(work, key=work.__getitem__)
    return best if rows * outputs >= LEAST_LONG_SHARE * num_sms * work[best] else None


def _one_wave(outputs: int, programs: int, step: int) -> int:
    """Outputs of a program, a multiple of `step`, with which that many programs have them all."""
    return -(-outputs // (programs * step)) * step
