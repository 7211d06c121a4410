"""Keys and values on the device, for each layer two tensors of blocks, or latents, one: one block more than the ledger
hands out. The last one takes what padding writes, and is never read for a real token. States of layers that keep them
are one tensor, with a slot in place of a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twostroke.backends.cuda.kernels.paged import PagedKV
from twostroke.backends.cuda.one_byte_kv import OneByteKV
from twostroke.backends.cuda.state_shape import StateShape
from twostroke.core.kv_blocks import BlockFormat
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.models.spec import Attention, GroupedAttention, LatentAttention, ModelSpec, Recurrent

NO_GROUP = -1
"""Of a layer that leaves nothing behind."""


class KVStore:
    def __init__(
        self,
        spec: ModelSpec,
        layout: KVLayout,
        device: torch.device,
        dtype: torch.dtype,
        one_byte: OneByteKV | None = None,
    ) -> None:
        """`one_byte`: how numbers of keys and values are kept in a byte each; None: they are of `dtype`."""
        self.block_size, self._groups, self._one_byte = layout.block_size, layout.groups, one_byte
        self.dtype = dtype = dtype if one_byte is None else torch.uint8
        layers: dict[int, tuple[int, tuple[torch.Tensor, ...]]] = {}
        self.states: tuple[int, torch.Tensor] | None = None
        """The group of states, if there is one, and these, float32 [layers, slots, values]"""
        for index, group in enumerate(layout.groups):
            if group.is_state:
                own_states = _states_of(spec, group, device)
                self.states = index, own_states
                layers |= {layer: (index, (own_states[place],)) for place, layer in enumerate(group.layers)}
                continue
            for layer in group.layers:
                number, own = _kept(spec.layers[layer].attention, layout.block_size, one_byte)
                shape = (group.num_blocks + 1, *own)
                # Zeroes, not whatever memory held: a masked weight of 0 times a stray NaN would be NaN.
                layers[layer] = index, tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(number))
        self._sources = tuple(map(spec.kv_source, range(spec.num_layers)))
        held = [layers.get(source, (NO_GROUP, ())) for source in self._sources]
        self.group_of = tuple(group for group, _ in held)
        self.parts = tuple(parts for _, parts in held)
        """Of each layer, its keys and values, or those that it reads of another, [blocks, kv_heads, block_size,
        head_dim] each, or as bytes [blocks, kv_heads, bytes]; or its latents, [blocks, block_size, rank + rotated]; or
        its states, [slots, values]; or nothing."""
        self._places = {layer: place for group in layout.groups for place, layer in enumerate(group.layers)}

    @property
    def keys(self) -> tuple[torch.Tensor, ...]:
        return tuple(parts[0] for parts in self.parts)

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        return tuple(parts[1] for parts in self.parts)

    def paged(self, layer: int, table: torch.Tensor) -> PagedKV:
        """A layer's keys and values for kernels, with the pages of its group."""
        keys, values = self.parts[layer]
        if self._one_byte is None:
            return PagedKV(keys, values, table)
        return self._one_byte.paged(self._sources[layer], keys, values, self.block_size, table)

    # Blocks as bytes

    def block_formats(self) -> tuple[BlockFormat, ...]:
        """One a KV group."""
        return tuple(
            BlockFormat(
                own.layers,
                own.window,
                self._element(own),
                self.dtype_of(group).itemsize,
                tuple(zip(self._axes(group), self.block_shape(group), strict=True)),
            )
            for group, own in enumerate(self._groups)
        )

    def _element(self, group: KVGroup) -> str:
        if group.is_state:
            return "float32 of a state, with a ring"
        return str(self.dtype).removeprefix("torch.") if self._one_byte is None else self._one_byte.element

    def dtype_of(self, group: int) -> torch.dtype:
        return torch.float32 if self._groups[group].is_state else self.dtype

    def layers_of(self, group: int) -> tuple[int, ...]:
        return self._groups[group].layers

    def place_of(self, layer: int) -> int:
        """Among the layers of its group; of one that reads another's, which is there by then, the first."""
        return self._places.get(layer, 0)

    def _axes(self, group: int) -> tuple[str, ...]:
        if self._groups[group].is_state:
            return ("layer", "state", "number")
        if self._one_byte is not None:
            return ("layer", "keys, values", "kv head", "byte")
        if len(self.block_shape(group)) == 5:
            return ("layer", "keys, values", "kv head", "position", "number")
        return ("layer", "latent", "position", "number")

    def block_shape(self, group: int) -> tuple[int, ...]:
        """[layers, keys or values, kv_heads, block_size, head_dim], [layers, keys or values, kv_heads, bytes],
        [layers, 1, block_size, rank + rotated], or [layers, 1, values]"""
        layers = self._groups[group].layers
        parts = self.parts[layers[0]]
        return (len(layers), len(parts), *parts[0].shape[1:])

    def gather(self, group: int, blocks: Sequence[int]) -> torch.Tensor:
        """[blocks, *block_shape], on the device."""
        layers = self._groups[group].layers
        places = torch.tensor(blocks, device=self.parts[layers[0]][0].device)
        parts = [part[places] for layer in layers for part in self.parts[layer]]
        return torch.stack(parts, dim=1).unflatten(1, (len(layers), -1))

    def scatter(self, group: int, layers: Sequence[int], blocks: Sequence[int], data: torch.Tensor) -> None:
        """The same the other way, for some of the layers."""
        assert set(layers) <= set(self._groups[group].layers)
        places = torch.tensor(blocks, device=data.device)
        for place, layer in enumerate(layers):
            for number, part in enumerate(self.parts[layer]):
                part.index_copy_(0, places, data[:, place, number])


def _states_of(spec: ModelSpec, group: KVGroup, device: torch.device) -> torch.Tensor:
    mixer = spec.layers[group.layers[0]].attention
    assert isinstance(mixer, Recurrent)
    shape = (len(group.layers), group.num_blocks + 1, StateShape.of(mixer).values)
    return torch.zeros(shape, dtype=torch.float32, device=device)


def _kept(attention: Attention | None, block_size: int, one_byte: OneByteKV | None) -> tuple[int, tuple[int, ...]]:
    """How many tensors of a layer there are, and the shape of a block in each."""
    if isinstance(attention, LatentAttention):
        return 1, (block_size, attention.kv_values)
    assert isinstance(attention, GroupedAttention)
    if one_byte is not None:
        return 2, (attention.num_kv_heads, one_byte.head_bytes(attention, block_size))
    return 2, (attention.num_kv_heads, block_size, attention.head_dim)
