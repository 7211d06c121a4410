"""Keys and values on the device: for each layer two tensors of blocks, one block more than the ledger hands out.
The last one takes what padding writes, and is never read for a real token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twostroke.core.kv_blocks import BlockFormat
from twostroke.core.kv_layout import KVLayout
from twostroke.models.spec import ModelSpec


class KVStore:
    def __init__(self, spec: ModelSpec, layout: KVLayout, device: torch.device, dtype: torch.dtype) -> None:
        self.block_size, self.dtype, self._groups = layout.block_size, dtype, layout.groups
        layers: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}
        for index, group in enumerate(layout.groups):
            for layer in group.layers:
                attention = spec.layers[layer].grouped
                shape = (group.num_blocks + 1, attention.num_kv_heads, layout.block_size, attention.head_dim)
                # Zeroes, not whatever memory held: a masked weight of 0 times a stray NaN would be NaN.
                keys = torch.zeros(shape, dtype=dtype, device=device)
                layers[layer] = (index, keys, torch.zeros(shape, dtype=dtype, device=device))
        self.group_of = tuple(layers[layer][0] for layer in range(spec.num_layers))
        self.keys = tuple(
            layers[layer][1] for layer in range(spec.num_layers)
        )  # [blocks, kv_heads, block_size, head_dim]
        self.values = tuple(layers[layer][2] for layer in range(spec.num_layers))
        self._places = {layer: place for group in layout.groups for place, layer in enumerate(group.layers)}

    # Blocks as bytes

    def block_formats(self) -> tuple[BlockFormat, ...]:
        """One a KV group."""
        names = ("layer", "keys, values", "kv head", "position", "number")
        element = str(self.dtype).removeprefix("torch.")
        return tuple(
            BlockFormat(
                own.layers,
                own.window,
                element,
                self.dtype.itemsize,
                tuple(zip(names, self.block_shape(group), strict=True)),
            )
            for group, own in enumerate(self._groups)
        )

    def layers_of(self, group: int) -> tuple[int, ...]:
        return self._groups[group].layers

    def place_of(self, layer: int) -> int:
        """Among the layers of its group."""
        return self._places[layer]

    def block_shape(self, group: int) -> tuple[int, ...]:
        """[layers, keys or values, kv_heads, block_size, head_dim]"""
        layers = self._groups[group].layers
        return (len(layers), 2, *self.keys[layers[0]].shape[1:])

    def gather(self, group: int, blocks: Sequence[int]) -> torch.Tensor:
        """[blocks, layers, keys or values, kv_heads, block_size, head_dim], on the device."""
        layers = self._groups[group].layers
        places = torch.tensor(blocks, device=self.keys[layers[0]].device)
        parts = [part[places] for layer in layers for part in (self.keys[layer], self.values[layer])]
        return torch.stack(parts, dim=1).unflatten(1, (len(layers), 2))

    def scatter(self, group: int, layers: Sequence[int], blocks: Sequence[int], data: torch.Tensor) -> None:
        """The same the other way, for some of the layers."""
        assert set(layers) <= set(self._groups[group].layers)
        places = torch.tensor(blocks, device=data.device)
        for place, layer in enumerate(layers):
            self.keys[layer].index_copy_(0, places, data[:, place, 0])
            self.values[layer].index_copy_(0, places, data[:, place, 1])
