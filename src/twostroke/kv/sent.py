"""Which beginnings of prompts the engines that write have, as far as one that reads for them can know: what it sent to
whom. Only where a router names the writer beforehand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from twostroke.kv.prefix_index import PrefixNode

MOST_BLOCKS = 50_000
"""Remembered of each writer, the latest: about as many as one has room for."""
MOST_WRITERS = 256


class SentPrefixes:
    def __init__(self, most_blocks: int = MOST_BLOCKS, most_writers: int = MOST_WRITERS) -> None:
        self._most_blocks, self._most_writers = most_blocks, most_writers
        self._blocks: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()

    def note(self, writer: str, nodes: Sequence[PrefixNode]) -> None:
        """It will have these blocks."""
        blocks = self._blocks.setdefault(writer, OrderedDict())
        self._blocks.move_to_end(writer)
        for node in reversed(nodes):  # the first are forgotten last
            blocks[node.digest] = None
            blocks.move_to_end(node.digest)
        while len(blocks) > self._most_blocks:
            blocks.popitem(last=False)
        while len(self._blocks) > self._most_writers:
            self._blocks.popitem(last=False)

    def num_blocks(self, writer: str, nodes: Sequence[PrefixNode]) -> int:
        """Of these, from the first on, that it should have."""
        blocks = self._blocks.get(writer)
        if blocks is None:
            return 0
        return next((place for place, node in enumerate(nodes) if node.digest not in blocks), len(nodes))
