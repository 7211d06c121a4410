"""How a step's prefill chunks become the tiles of one launch: which programs there are, longest first, and where the
keys of a tile are shared out among several programs. Knows numbers only; the kernels that run tiles are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

KEY_BLOCK = 64
"""Keys a unit of work, when tiles are weighed against each other."""
SMALLEST_BLOCKS = 4
"""A tile's keys are not shared out in smaller parts than this: a part costs its start and its partial result."""
ITEM_FIELDS = 4


def target_items(kv_heads: int, num_sms: int) -> int:
    """Work items, a KV head, that fill a device: two programs an SM."""
    return max(1, 2 * num_sms // kv_heads)


@dataclass(frozen=True)
class PrefillTiles:
    """A launch's work items on the host. A tile is `tile_rows // group` tokens of one segment with all query heads of a
    KV head; an item is a tile, or one of the equal parts that its keys were cut into."""

    items: npt.NDArray[np.int32]  # [num_items, 4]: segment, tile, part, parts; segment -1 is padding
    tile_rows: int
    group: int
    part_items: int
    """Items that are a part of a tile; they come first, and a second launch joins them. 0 if no tile was cut."""

    @classmethod
    def build(
        cls,
        counts: Sequence[int],
        starts: Sequence[int],
        *,
        tile_rows: int,
        group: int,
        kv_heads: int,
        num_sms: int,
        window: int | None = None,
        pad_items: int | None = None,
    ) -> PrefillTiles:
        """Segment s has `counts[s]` tokens from position `starts[s]` on. `pad_items` fixes the number of items, for a
        captured graph; `capacity` says how many are always enough."""
        tokens = tile_rows // group
        tiles_of = -(-np.asarray(counts, dtype=np.int64) // tokens)
        segment = np.repeat(np.arange(len(counts)), tiles_of)
        tile = np.arange(len(segment)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
        start, count = np.asarray(starts, dtype=np.int64)[segment], np.asarray(counts, dtype=np.int64)[segment]
        last = start + np.minimum((tile + 1) * tokens, count) - 1
        first = np.zeros_like(last) if window is None else np.maximum(start + tile * tokens - window + 1, 0)
        blocks = last // KEY_BLOCK + 1 - first // KEY_BLOCK
        chunk = max(-(-int(blocks.sum()) // target_items(kv_heads, num_sms)), SMALLEST_BLOCKS)
        parts = np.maximum(blocks // chunk, 1)
        # Cut tiles first, so that an item's index is also its place in the scratch; then the longest.
        order = np.lexsort((tile, segment, -blocks, parts == 1))
        segment, tile, parts = segment[order], tile[order], parts[order]
        part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        items = np.stack([np.repeat(segment, parts), np.repeat(tile, parts), part, np.repeat(parts, parts)], axis=1)
        if pad_items is not None:
            if len(items) > pad_items:
                raise ValueError(f"{len(items)} items of prefill attention do not fit {pad_items}.")
            items = np.concatenate([items, np.full((pad_items - len(items), ITEM_FIELDS), -1)])
        return cls(np.ascontiguousarray(items, dtype=np.int32), tile_rows, group, int(parts[parts > 1].sum()))

    @staticmethod
    def capacity(num_tokens: int, num_segments: int, *, tile_rows: int, group: int, kv_heads: int, num_sms: int) -> int:
        """How many items any `num_segments` segments of `num_tokens` tokens together can become at most."""
        tiles = -(-num_tokens // (tile_rows // group)) + num_segments
        return tiles + target_items(kv_heads, num_sms)


@dataclass(frozen=True)
class PrefillSegments:
    """A step's prefill chunks on the device; `items` is a `PrefillTiles`' of the same tile height."""

    first_tokens: torch.Tensor  # int32 [num_segments]: where a segment begins among the queries
    counts: torch.Tensor  # int32 [num_segments]: its tokens
    starts: torch.Tensor  # int32 [num_segments]: the position of its first token
    rows: torch.Tensor  # int32 [num_segments]: its row of the block table
    items: torch.Tensor  # int32 [num_items, 4]
    tile_rows: int
    part_items: int
    """At most so many items are parts of a tile; 0 saves the second launch."""


class PrefillScratch:
    """Where the parts of a cut tile wait to be joined; made once, shared by all layers in a row."""

    def __init__(
        self, kv_heads: int, head_dim: int, device: torch.device | str, num_sms: int, tile_rows: int = 128
    ) -> None:
        self.max_items = target_items(kv_heads, num_sms)
        self.tile_rows = tile_rows
        rows = self.max_items * kv_heads * tile_rows
        self.partials = torch.empty((rows, head_dim), dtype=torch.float32, device=device)
        self.log_sums = torch.empty(rows, dtype=torch.float32, device=device)
