"""Blocks of every backend as numbers, and back, by what a `BlockFormat` says of them: plain arrays with named axes, and
the order in which the CPU's kernels read a block (`backends/cpu/kernels/kv_code.py`). So one backend can take in what
another wrote. Moves nothing between engines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.kv_numbers import ELEMENTS, Numbers
from twostroke.core.kv_blocks import BlockFormat

Bytes = npt.NDArray[np.uint8]
RUN = 16
"""Tokens that lie side by side in a block of the CPU backend."""
_LANES = 16
_PACKED = re.compile(r"(f16|bf16|int8) of (?:head size (\d+)|latents of (\d+) and (\d+)), packed for cpu")
_KINDS = {"f16": "float16", "bf16": "bfloat16", "int8": "int8"}
_KEY_GROUPS = {"float16": 1, "bfloat16": 2, "int8": 4}
"""Numbers of one key that lie together."""
_VALUE_GROUPS = {"float16": 1, "bfloat16": 2, "int8": 2}
"""Values, of neighbouring tokens, whose numbers lie together."""
_BIAS = np.int8(-128)
"""Keys of 8 bits are stored as if they had no sign."""


class Codec(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Layers, parts, heads and numbers of each, whatever the block's size."""

    def unpacked(self, data: Bytes) -> Numbers:
        """Of one block's bytes."""

    def pack(self, numbers: Numbers, into: Bytes) -> None: ...


def codec_of(form: BlockFormat, block_size: int) -> Codec | None:
    """None: it is of a state, or in an order that is not known here."""
    plain = _plain_codec(form, block_size)
    return plain if plain is not None else _packed_codec(form, block_size)


# Arrays with named axes

_AXES = ("layer", "part", "position", "kv head", "number")


@dataclass(frozen=True, slots=True)
class PlainCodec:
    kind: str
    stored: tuple[int, ...]
    order: tuple[int, ...]
    """Where the axes of `Numbers.values` are among those that are stored; a latent's one head comes last."""
    shape: tuple[int, int, int, int]

    def unpacked(self, data: Bytes) -> Numbers:
        return Numbers(self.kind, self._view(data))

    def pack(self, numbers: Numbers, into: Bytes) -> None:
        self._view(into)[...] = numbers.values

    def _view(self, data: Bytes) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = data.view(ELEMENTS[self.kind])
        return found.reshape(self.stored).transpose(self.order)


def _plain_codec(form: BlockFormat, block_size: int) -> PlainCodec | None:
    names = [{"keys, values": "part", "latent": "part"}.get(name, name) for name, _ in form.axes]
    sizes = dict(zip(names, form.shape, strict=True))
    is_latent = "kv head" not in sizes
    known = {"float32", "float16", "bfloat16"}
    expected = set(_AXES) - ({"kv head"} if is_latent else set())
    if form.element not in known or len(sizes) != len(names) or set(names) != expected:
        return None
    if np.dtype(ELEMENTS[form.element]).itemsize != form.element_bytes or sizes["position"] != block_size:
        return None
    stored = (*form.shape, 1) if is_latent else form.shape
    names += ["kv head"] * is_latent
    shape = (sizes["layer"], sizes["part"], sizes.get("kv head", 1), sizes["number"])
    return PlainCodec(form.element, stored, tuple(names.index(name) for name in _AXES), shape)


# The CPU's own order


@dataclass(frozen=True, slots=True)
class PackedCodec:
    """Of each layer and head the parts one behind the other, then scales, all of keys and then all of values."""

    kind: str
    shape: tuple[int, int, int, int]
    width: int
    """Of what is kept of a token, to a multiple of a vector; the rest is zero."""
    block_size: int

    def unpacked(self, data: Bytes) -> Numbers:
        layers, parts, heads, width = self.shape
        whole, shape = self._heads(data), (layers, self.block_size, heads, self.width)
        values = np.stack([self._view(whole, part).reshape(shape)[..., :width] for part in range(parts)], axis=1)
        if self.kind != "int8":
            return Numbers(self.kind, values)
        values[:, 0] ^= _BIAS
        return Numbers(self.kind, values, self._scales(whole).transpose(0, 2, 3, 1))

    def pack(self, numbers: Numbers, into: Bytes) -> None:
        whole, lacking = self._heads(into), self.width - self.shape[3]
        for part in range(self.shape[1]):
            values = numbers.values[:, part]
            if self.kind == "int8" and part == 0:
                values = values ^ _BIAS
            if lacking:
                values = np.pad(values, ((0, 0), (0, 0), (0, 0), (0, lacking)))
            view = self._view(whole, part)
            view[...] = values.reshape(view.shape)
        if numbers.scales is not None:
            self._scales(whole)[...] = numbers.scales.transpose(0, 3, 1, 2)

    @property
    def _part_bytes(self) -> int:
        return self.block_size * self.width * int(np.dtype(ELEMENTS[self.kind]).itemsize)

    def _heads(self, data: Bytes) -> Bytes:
        """[layers, heads, bytes]"""
        return data.reshape(self.shape[0], self.shape[2], -1)

    def _view(self, whole: Bytes, part: int) -> npt.NDArray[Any]:
        """Of one part, with axes in the order of layer, position, head, number, some of them in two or three."""
        start, runs = part * self._part_bytes, self.block_size // RUN
        stored: npt.NDArray[Any] = whole[..., start : start + self._part_bytes].view(ELEMENTS[self.kind])
        outer = (*whole.shape[:2], runs)
        if part == 0:
            group = _KEY_GROUPS[self.kind]
            return stored.reshape(*outer, self.width // group, RUN, group).transpose(0, 2, 4, 1, 3, 5)
        group = _VALUE_GROUPS[self.kind]
        return stored.reshape(*outer, RUN // group, self.width, group).transpose(0, 2, 3, 5, 1, 4)

    def _scales(self, whole: Bytes) -> npt.NDArray[np.uint16]:
        """[layers, heads, parts, positions]"""
        return whole[..., 2 * self._part_bytes :].view(np.uint16).reshape(*whole.shape[:2], 2, self.block_size)


def _packed_codec(form: BlockFormat, block_size: int) -> PackedCodec | None:
    found = _PACKED.fullmatch(form.element)
    names = [name for name, _ in form.axes]
    if found is None or form.element_bytes != 1 or len(names) != 3 or names[0] != "layer" or names[2] != "byte":
        return None
    kind, head_size, *latent = _KINDS[found[1]], found[2], found[3], found[4]
    layers, heads, num_bytes = form.shape
    is_latent = head_size is None
    width = sum(map(int, latent)) if is_latent else int(head_size)
    kept = -(-width // _LANES) * _LANES
    token_bytes = (1 if is_latent else 2) * kept * np.dtype(ELEMENTS[kind]).itemsize + 4 * (kind == "int8")
    if names[1] != ("latent" if is_latent else "kv head") or block_size % RUN or num_bytes != block_size * token_bytes:
        return None
    if is_latent and (kind == "int8" or heads != 1):
        return None
    return PackedCodec(kind, (layers, 1 if is_latent else 2, heads, width), kept, block_size)
