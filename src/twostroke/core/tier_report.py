"""KV beyond the device, in numbers for an operator: what is there, and what has moved since the engine started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierReport:
    hit_tokens: dict[str, int]
    """Prompt tokens found in the prefix cache, by tier: `device`, `host`, `disk`."""
    bytes: dict[str, int]
    """Bytes that each tier holds."""
    blocks: dict[str, int]
    """Blocks that can be found in each tier."""
    limit_bytes: dict[str, int]
    """The most bytes that each tier may hold. A tier that is not in use has no entry."""
    moved_blocks: dict[str, int]
    """Blocks that moved, by move. `spilled`: from the device to host memory. `loaded`: from host memory to the device.
    `written`: from host memory to disk. `fetched`: from disk to host memory."""
    moved_bytes: dict[str, int]
    dropped_blocks: dict[str, int]
    """Blocks that were dropped, by reason. `busy`: not spilled, because that would have slowed decode or no slot was
    free. `unwritten`: the disk did not take it. `damaged`: its file on disk is gone, or is not what was written."""
    recomputed_tokens: int
    """Tokens that were found in a tier and computed again, because that was predicted to be faster."""
