"""Whether moving KV pays: loading against computing again, by measured rates and predicted seconds; and spilling, only
as much as leaves decode alone. Knows seconds and bytes, no blocks."""

from __future__ import annotations

from collections.abc import Callable

PrefillSeconds = Callable[[int, int], float]
"""Predicted seconds to read this many tokens from a position on."""

FIRST_DISK_BYTES_PER_S = 1e9
"""Until the disk was measured."""
SHARE_BESIDE_DECODES, SHARE_ALONE = 0.005, 0.05
"""Of the time of steps, what spills may take: in steps that hold decode slots, and in those that hold none."""
MOST_SAVED_S = 0.2
"""Allowance that is kept for a burst."""
LOAD_ADVANTAGE = 0.9
"""Loading is chosen where it takes no more than this share of computing: what was predicted may be off."""
WEIGHT_OF_LATEST = 0.3


class Worth:
    def __init__(self, prefill_seconds: PrefillSeconds | None = None) -> None:
        """None: nobody can predict; then what is there is loaded."""
        self._prefill_seconds = prefill_seconds
        self.disk_bytes_per_s = FIRST_DISK_BYTES_PER_S
        self._allowance_s = MOST_SAVED_S

    # Loading

    def loads(self, start: int, num_tokens: int, load_s: float) -> bool:
        """Whether these tokens' KV had better be loaded, in these seconds, than computed."""
        if self._prefill_seconds is None:
            return True
        return load_s < LOAD_ADVANTAGE * self._prefill_seconds(start, num_tokens)

    def disk_seconds(self, num_bytes: int) -> float:
        return num_bytes / self.disk_bytes_per_s

    def disk_took(self, num_bytes: int, seconds: float) -> None:
        if seconds > 0.0 and num_bytes:
            self.disk_bytes_per_s += WEIGHT_OF_LATEST * (num_bytes / seconds - self.disk_bytes_per_s)

    # Spilling

    def step_took(self, seconds: float, *, has_decodes: bool) -> None:
        """A step came back: spills may take a share of its time."""
        share = SHARE_BESIDE_DECODES if has_decodes else SHARE_ALONE
        self._allowance_s = min(MOST_SAVED_S, self._allowance_s + share * seconds)

    def may_spill(self, seconds: float) -> bool:
        """Whether a copy of so long may be made now; it counts as made."""
        if self._allowance_s <= 0.0:
            return False
        self._allowance_s -= seconds
        return True
