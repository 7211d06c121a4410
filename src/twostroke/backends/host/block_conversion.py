"""Blocks that another engine wrote, turned into this one's: another size, another kind of numbers, another order of
bytes. What is no block of the same layers, heads and widths is refused, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twostroke.backends.host.block_codecs import codec_of
from twostroke.backends.host.kv_numbers import joined, of_kind
from twostroke.core.kv_blocks import BlockFormat, KVFormat


class BlockConversion:
    """Into the blocks of `own`; from any thread."""

    def __init__(self, own: KVFormat) -> None:
        self._own = own

    def misfit(self, other: KVFormat) -> str | None:
        """Why blocks of `other` cannot become blocks of this engine; None: they can."""
        if [(form.layers, form.window) for form in other.groups] != [
            (form.layers, form.window) for form in self._own.groups
        ]:
            return "the other engine keeps KV of other layers, or of other windows"
        for theirs, own in zip(other.groups, self._own.groups, strict=True):
            why = self._group_misfit(theirs, own, other.block_size)
            if why is not None:
                return why
        return None

    def _group_misfit(self, theirs: BlockFormat, own: BlockFormat, block_size: int) -> str | None:
        if theirs == own and (block_size == self._own.block_size or is_state(own)):
            return None
        if is_state(theirs) or is_state(own):
            return "the states of the other engine's layers lie in another order"
        source, target = codec_of(theirs, block_size), codec_of(own, self._own.block_size)
        if source is None or target is None:
            unknown = theirs if source is None else own
            return f"KV as {unknown.element!r} cannot be turned into another format here"
        if source.shape != target.shape:
            return f"the other engine's KV has {_said(source.shape)}, and this one's {_said(target.shape)}"
        return None

    def convert(self, other: KVFormat, group: int, sources: Sequence[memoryview], skip: int, into: memoryview) -> None:
        """One block of this engine's, from neighbouring blocks of the other's: those that hold its tokens, of which the
        first has `skip` before them. Of a state: from the one."""
        target = np.frombuffer(into, dtype=np.uint8)
        theirs, own = other.groups[group], self._own.groups[group]
        if theirs == own:
            assert len(sources) == 1 and skip == 0
            target[...] = np.frombuffer(sources[0], dtype=np.uint8)
            return
        source, codec = codec_of(theirs, other.block_size), codec_of(own, self._own.block_size)
        assert source is not None and codec is not None
        numbers = joined([source.unpacked(np.frombuffer(data, dtype=np.uint8)) for data in sources])
        codec.pack(of_kind(numbers.positions(skip, skip + self._own.block_size), codec.kind), target)


def is_state(form: BlockFormat) -> bool:
    """On a card such a form has one axis more."""
    return tuple(name for name, _ in form.axes) in (("layer", "number"), ("layer", "state", "number"))


def _said(shape: tuple[int, int, int, int]) -> str:
    layers, parts, heads, width = shape
    what = f"{heads} heads of {width} numbers" if parts == 2 else f"latents of {width} numbers"
    return f"{layers} layers with {what}"
