"""How a step's prefill chunks become the tiles of one launch: which programs there are, longest first, and where the
keys of a tile are shared out among several programs. Knows numbers only; the kernels that run tiles are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from twostroke.backends.cuda.kernels.paged import AttentionShape
from twostroke.backends.cuda.kernels.state_items import StateWork

Integers = Sequence[int] | npt.NDArray[np.integer]
KEY_BLOCK = 64
"""Keys a unit of work, when tiles are weighed against each other."""
SMALLEST_BLOCKS = 4
"""A tile's keys are not shared out in smaller parts than this: a part costs its start and its partial result."""
START_BLOCKS, JOIN_BLOCKS = 2, 6
"""What an item's start takes, and the launch that joins parts, in the time of a block."""
LOW_TILE, HIGH_TILE = 64, 128
"""Rows of a tile. A high one has a multiprocessor to itself, two low ones share it."""
MOST_WAVES = 2
"""Of programs, that tiles are cut for."""
ITEM_FIELDS = 8
"""Row of the block table, first token among the queries, tokens (0 in a padding item), position of the first token, end
of the segment's context, part, parts, place in the scratch (of a part). Whole, so that a program waits for memory once
before its first page."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How high tiles are, and how many programs a device runs at once."""

    tile_rows: int  # query heads of a KV head, times tokens
    group: int
    kv_heads: int
    programs: int
    tells_start: bool = False
    """Items tell where their segment starts, in place of where its context ends."""

    @property
    def tile_tokens(self) -> int:
        return self.tile_rows // self.group

    @property
    def most_parts(self) -> int:
        """Items that can be parts of tiles, at most. A tile that is cut has a chunk and a half of blocks at least, so
        that rounding gives it no more than a third of its parts."""
        return 4 * self._items_of(MOST_WAVES) // 3

    def capacity(self, num_tokens: int, num_segments: int) -> int:
        """How many items any `num_segments` segments of `num_tokens` tokens together can become at most."""
        return -(-num_tokens // self.tile_tokens) + num_segments + self.most_parts

    def parts(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Into how many parts each tile's blocks of keys are cut: whichever cuts end soonest."""
        best, end = np.ones_like(blocks), self._end(blocks, np.ones_like(blocks))
        total = int(blocks.sum())
        for waves in range(1, MOST_WAVES + 1):
            chunk = max(-(-total // self._items_of(waves)), SMALLEST_BLOCKS)
            parts = np.maximum((2 * blocks + chunk) // (2 * chunk), 1)
            if parts.max(initial=1) > 1 and (sooner := self._end(blocks, parts) + JOIN_BLOCKS) < end:
                best, end = parts, sooner
        return best

    def _items_of(self, waves: int) -> int:
        return max(1, waves * self.programs // self.kv_heads)

    def _end(self, blocks: npt.NDArray[np.int64], parts: npt.NDArray[np.int64]) -> float:
        """When the last program is done, about, in blocks: items run for every KV head, the longest first, as many at
        once as there are programs, and the next ones when the longest of these is done."""
        lengths = np.sort(np.repeat(blocks / parts, parts * self.kv_heads))[::-1]
        waves = np.arange(0, len(lengths), self.programs)
        return float((np.maximum.reduceat(lengths, waves) + START_BLOCKS).sum()) if len(lengths) else 0.0


@dataclass(frozen=True)
class PrefillTiles:
    """A launch's work items on the host. A tile is `tile_rows // group` tokens of one segment with all query heads of a
    KV head; an item is a tile, or one of the equal parts that its keys were cut into."""

    items: npt.NDArray[np.int32]  # [num_items, ITEM_FIELDS]
    tile_rows: int
    part_items: int
    """Items that are a part of a tile: a second launch joins them. 0 if no tile was cut."""
    longest_context: int  # where the longest context ends
    has_prefix: bool = True  # whether any segment has a context before it

    @classmethod
    def build(
        cls,
        first_tokens: Integers,
        counts: Integers,
        starts: Integers,
        rows: Integers,
        tiling: Tiling,
        pad_items: int | None = None,
    ) -> PrefillTiles:
        """Segment s has `counts[s]` tokens from position `starts[s]` of row `rows[s]` on, which lie among the queries
        from `first_tokens[s]` on. `pad_items` fixes the number of items, for a captured graph; `Tiling.capacity` says
        how many are always enough. Cut as if no layer had a window."""
        segments = np.array([first_tokens, counts, starts, rows], dtype=np.int64)
        tile_tokens = tiling.tile_tokens
        tiles_of = -(-segments[1] // tile_tokens)
        first, count, start, row = np.repeat(segments, tiles_of, axis=1)
        offset = (np.arange(len(row)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)) * tile_tokens
        tokens = np.minimum(tile_tokens, count - offset)
        position = start + offset
        blocks = (position + tokens - 1) // KEY_BLOCK + 1
        parts = tiling.parts(blocks)
        order = np.argsort(-blocks / parts, kind="stable")  # the longest items first
        told = start if tiling.tells_start else start + count
        tiles = np.stack([row, first + offset, tokens, position, told, parts], axis=1)[order]
        parts = parts[order]
        used = int(parts.sum())
        if pad_items is not None and used > pad_items:
            raise ValueError(f"{used} items of prefill attention do not fit {pad_items}.")
        items = np.zeros((max(used, pad_items or 0), ITEM_FIELDS), dtype=np.int32)
        items[:used, [0, 1, 2, 3, 4, 6]] = np.repeat(tiles, parts, axis=0)
        items[:used, 5] = np.arange(used) - np.repeat(np.cumsum(parts) - parts, parts)
        is_part = items[:used, 6] > 1
        items[:used, 7] = np.cumsum(is_part) - 1
        longest, has_prefix = int((start + count).max(initial=0)), bool((start > 0).any())
        return cls(items, tiling.tile_rows, int(is_part.sum()), longest, has_prefix)


@dataclass(frozen=True)
class PrefillWork:
    """`PrefillTiles` on the device."""

    items: torch.Tensor  # int32 [num_items, ITEM_FIELDS]
    tile_rows: int
    part_items: int  # items that are parts of a tile, at most; 0 saves the second launch
    longest_context: int  # no context ends behind this
    has_prefix: bool = True  # whether any segment may have a context before it
    states: StateWork | None = None  # of models with layers that keep states
    beside: PrefillWork | None = None
    """The same chunks in the tiles of another attention: of layers with other heads, or of a model that reads along."""

    def at(self, number: int) -> PrefillWork:
        """Of the attention of this number."""
        work = self
        for _ in range(number):
            assert work.beside is not None
            work = work.beside
        return work

    @classmethod
    def of(cls, tiles: PrefillTiles, device: torch.device | str) -> PrefillWork:
        """Copies the items as they are; a captured graph keeps its own items and copies into them instead."""
        items = torch.from_numpy(tiles.items).to(device)
        return cls(items, tiles.tile_rows, tiles.part_items, tiles.longest_context, tiles.has_prefix)


class PrefillScratch:
    """Where the parts of a cut tile wait to be joined; made once, shared by all layers in a row."""

    def __init__(self, tiling: Tiling, head_dim: int, device: torch.device | str) -> None:
        self.max_items = tiling.most_parts
        self.tile_rows = tiling.tile_rows
        rows = self.max_items * tiling.kv_heads * tiling.tile_rows
        self.partials = torch.empty((rows, head_dim), dtype=torch.float32, device=device)
        self.log_sums = torch.empty(rows, dtype=torch.float32, device=device)
        self.claims = torch.zeros(1, dtype=torch.int32, device=device)
        """What programs that take tiles one after another have taken; zero between launches."""

    def check(self, work: PrefillWork, shape: AttentionShape) -> None:
        """Raises where a kernel would write amiss."""
        if shape.group > work.tile_rows:
            raise ValueError(f"A tile of {work.tile_rows} rows cannot hold a group of {shape.group} heads.")
        if work.part_items * work.tile_rows > self.max_items * self.tile_rows:
            raise ValueError(
                f"Prefill scratch for {self.max_items} parts of {self.tile_rows} rows cannot hold "
                f"{work.part_items} of {work.tile_rows}."
            )
