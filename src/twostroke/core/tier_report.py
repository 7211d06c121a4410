"""KV beyond the device, as numbers for whoever watches: what is there, and what moved since the engine started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierReport:
    hit_tokens: dict[str, int]
    """Prompt tokens found in the prefix cache, by tier: `device`, `host`, `disk`."""
    bytes: dict[str, int]
    """That a tier holds."""
    blocks: dict[str, int]
    """That can be found there."""
    limit_bytes: dict[str, int]
    """That it may hold; a tier that there is not has none."""
    moved_blocks: dict[str, int]
    """By move. `spilled`: from the device to host memory. `loaded`: back. `written`: from there to disk. `fetched`:
    back."""
    moved_bytes: dict[str, int]
    dropped_blocks: dict[str, int]
    """By why. `busy`: not spilled, since that would have slowed decode or no slot was free. `unwritten`: not taken by
    the disk. `damaged`: on disk, and not what was written, or gone."""
    recomputed_tokens: int
    """Found in a tier, and computed again, which was predicted to be faster."""
