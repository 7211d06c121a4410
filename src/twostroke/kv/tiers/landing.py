"""Where another engine's blocks land that are no blocks here: of another size, or in another format. When all bytes are
there, the transport's thread turns them into blocks, in slots that were taken for these."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from twostroke.core.kv_blocks import BlockConverter, KVFormat


class Conversion(NamedTuple):
    """How one block here comes from another engine's."""

    group: int
    sources: tuple[int, ...]
    """The other's blocks that hold its tokens, as places in what lands."""
    skip: int
    """Tokens of the first of them that come before it."""


class Landing:
    def __init__(
        self,
        converter: BlockConverter,
        formats: KVFormat,
        groups: Sequence[int],
        conversions: Sequence[tuple[Conversion, memoryview]],
    ) -> None:
        """`formats`: the other engine's. `groups`: of each block that lands, whose it is. `conversions`: each with the
        slot that it fills."""
        self._converter, self._formats, self._conversions = converter, formats, tuple(conversions)
        sizes = [formats.groups[group].num_bytes for group in groups]
        memory, start = memoryview(bytearray(sum(sizes))), 0
        self.views: list[memoryview] = []
        for size in sizes:
            self.views.append(memory[start : start + size])
            start += size

    def land(self, deadline_s: float) -> None:
        """Raises TimeoutError when it is not done by then."""
        for conversion, into in self._conversions:
            if time.monotonic() > deadline_s:
                raise TimeoutError("its blocks were not turned into this engine's by the deadline")
            sources = [self.views[place] for place in conversion.sources]
            self._converter.convert(self._formats, conversion.group, sources, conversion.skip, into)
