"""Which sizes of steps with prompts get a graph, and which of these are captured at start. Capturing takes some 30
ms while every stream stands still, so a step may meet a size not yet captured only where there are too many."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.backends.cuda.batch import CapturedShape

LONE_SLOTS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens that graphs of a lone chunk are made for."""
MIXED_SLOTS = tuple(range(128, 2048 + 1, 128))
"""Tokens, decodes and all, that graphs of other steps are made for; the scheduler's pace prefers these sizes."""
LARGE_SLOTS = tuple(range(2560, 16384 + 1, 512))
"""The same for larger steps of small models."""
LARGE_AT_START = 2
"""Where there are no more of those sizes than this, they are captured at start; a small model's dozens when they
occur."""
LAUNCH_S, FLOP_PER_S = 0.03, 6e14
"""What launching a step's kernels one by one takes a host, about, and how fast a card reads prompts, about: a step that
takes longer than that on the card gains nothing from a graph, and need not be padded."""
DECODE_SLOTS = (32, 128, 256, 512)
MAX_CHUNKS = 24
"""Of a captured step that is not a chunk alone."""


@dataclass(frozen=True, slots=True)
class CapturedSizes:
    lone: tuple[int, ...]
    mixed: tuple[int, ...]
    large: tuple[int, ...]
    decodes: tuple[int, ...]

    @staticmethod
    def of(max_tokens: int, max_rows: int, multiply_adds_per_token: int) -> CapturedSizes:
        worth = int(LAUNCH_S * FLOP_PER_S / (2 * multiply_adds_per_token))
        return CapturedSizes(
            lone=tuple(size for size in LONE_SLOTS if size <= max_tokens),
            mixed=tuple(size for size in MIXED_SLOTS if size <= max_tokens),
            large=tuple(size for size in LARGE_SLOTS if size <= min(max_tokens, worth)),
            decodes=(*(size for size in DECODE_SLOTS if size < max_rows), max_rows),
        )

    def least(self, num_tokens: int, num_decodes: int, num_chunks: int) -> CapturedShape | None:
        """The least shape that such a step fits in; None: it is too large for any. A step without decodes takes the
        graph of one with a few: a set of graphs for it alone would take longer to capture than it saves."""
        if num_decodes == 0 and num_chunks == 1 and num_tokens <= max(self.lone, default=0):
            return CapturedShape(_least(self.lone, num_tokens), 0, 1)
        decode_slots = _least(self.decodes, num_decodes)
        slots, needed = (*self.mixed, *self.large), max(num_tokens, decode_slots + 1)
        if num_chunks > MAX_CHUNKS or needed > max(slots, default=0):
            return None
        return CapturedShape(_least(slots, needed), decode_slots, MAX_CHUNKS)

    def at_start(self) -> list[CapturedShape]:
        """The largest first: what it allocates serves the others too."""
        sizes = (*self.mixed, *(self.large if len(self.large) <= LARGE_AT_START else ()))
        shapes = [CapturedShape(size, 0, 1) for size in self.lone]
        shapes += [CapturedShape(size, slots, MAX_CHUNKS) for slots in self.decodes for size in sizes if size > slots]
        return sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)


def _least(sizes: Sequence[int], needed: int) -> int:
    """The least of ascending sizes that is enough."""
    return sizes[bisect_left(sizes, needed)]
