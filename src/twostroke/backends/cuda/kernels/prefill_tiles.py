"""How a step's prefill chunks become the tiles of one launch: which programs there are, longest first, and where the
keys of a tile are shared out among several programs. Knows numbers only; the kernels that run tiles are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

KEY_BLOCK = 64
"""Keys a unit of work, when tiles are weighed against each other, and a copy of the kernels for Hopper."""
SMALLEST_BLOCKS = 4
"""A tile's keys are not shared out in smaller parts than this: a part costs its start and its partial result."""
ITEM_FIELDS = 8
"""Row of the block table, first token among the queries, tokens (0 in a padding item), position of the first token, end
of the segment's context, part, parts, nothing. Whole, so that a program waits for memory once before its first page."""


def unsupported_on_hopper(
    head_dim: int, block_size: int, dtype: torch.dtype, capability: tuple[int, int] | None
) -> str | None:
    """Why the kernels for Hopper do not take a model on a device, or None."""
    if capability is None or capability[0] != 9:
        return "asynchronous warp-group products need a Hopper device"
    if head_dim not in (64, 128):
        return f"head size {head_dim} is neither 64 nor 128"
    if block_size % KEY_BLOCK:
        return f"pages of {block_size} are no multiple of {KEY_BLOCK}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} is neither bfloat16 nor float16"
    return None


def target_items(kv_heads: int, num_sms: int) -> int:
    """Work items, a KV head, that fill a device: two programs an SM."""
    return max(1, 2 * num_sms // kv_heads)


@dataclass(frozen=True)
class PrefillTiles:
    """A launch's work items on the host. A tile is `tile_rows // group` tokens of one segment with all query heads of a
    KV head; an item is a tile, or one of the equal parts that its keys were cut into."""

    items: npt.NDArray[np.int32]  # [num_items, ITEM_FIELDS]
    tile_rows: int
    part_items: int
    """Items that are a part of a tile; they come first, and a second launch joins them. 0 if no tile was cut."""
    longest_context: int
    """Where the longest context ends; a window no shorter than this hides nothing."""

    @classmethod
    def build(
        cls,
        first_tokens: Sequence[int],
        counts: Sequence[int],
        starts: Sequence[int],
        rows: Sequence[int],
        *,
        tile_rows: int,
        group: int,
        kv_heads: int,
        num_sms: int,
        window: int | None = None,
        pad_items: int | None = None,
    ) -> PrefillTiles:
        """Segment s has `counts[s]` tokens from position `starts[s]` of row `rows[s]` on, which lie among the queries
        from `first_tokens[s]` on. `pad_items` fixes the number of items, for a captured graph; `capacity` says how
        many are always enough."""
        segments = np.array([first_tokens, counts, starts, rows], dtype=np.int64)
        tile_tokens = tile_rows // group
        tiles_of = -(-segments[1] // tile_tokens)
        first, count, start, row = np.repeat(segments, tiles_of, axis=1)
        offset = (np.arange(len(row)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)) * tile_tokens
        tokens = np.minimum(tile_tokens, count - offset)
        position = start + offset
        oldest = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)
        blocks = (position + tokens - 1) // KEY_BLOCK + 1 - oldest // KEY_BLOCK
        chunk = max(-(-int(blocks.sum()) // target_items(kv_heads, num_sms)), SMALLEST_BLOCKS)
        parts = np.maximum(blocks // chunk, 1)
        # Cut tiles first, so that an item's index is also its place in the scratch; then the longest.
        order = np.lexsort((-blocks, parts == 1))
        tiles = np.stack([row, first + offset, tokens, position, start + count, parts], axis=1)[order]
        parts = parts[order]
        items = np.zeros((max(int(parts.sum()), pad_items or 0), ITEM_FIELDS), dtype=np.int32)
        used = int(parts.sum())
        if pad_items is not None and used > pad_items:
            raise ValueError(f"{used} items of prefill attention do not fit {pad_items}.")
        items[:used, [0, 1, 2, 3, 4, 6]] = np.repeat(tiles, parts, axis=0)
        items[:used, 5] = np.arange(used) - np.repeat(np.cumsum(parts) - parts, parts)
        return cls(items, tile_rows, int(parts[parts > 1].sum()), int((start + count).max(initial=0)))

    @staticmethod
    def capacity(num_tokens: int, num_segments: int, *, tile_rows: int, group: int, kv_heads: int, num_sms: int) -> int:
        """How many items any `num_segments` segments of `num_tokens` tokens together can become at most."""
        tiles = -(-num_tokens // (tile_rows // group)) + num_segments
        return tiles + target_items(kv_heads, num_sms)


@dataclass(frozen=True)
class PrefillWork:
    """`PrefillTiles` on the device."""

    items: torch.Tensor  # int32 [num_items, ITEM_FIELDS]
    tile_rows: int
    part_items: int
    """At most so many items are parts of a tile; 0 saves the second launch."""
    longest_context: int
    """No context ends behind this."""

    @classmethod
    def of(cls, tiles: PrefillTiles, device: torch.device | str) -> PrefillWork:
        """Copies the items as they are; a captured graph keeps its own items and copies into them instead."""
        items = torch.from_numpy(tiles.items).to(device)
        return cls(items, tiles.tile_rows, tiles.part_items, tiles.longest_context)


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
        self.claims = torch.zeros(1, dtype=torch.int32, device=device)
        """What programs that take tiles one after another have taken; zero between launches."""
