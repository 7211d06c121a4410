"""Blocks of whoever drafts on the device, beside those of the model that answers: what tiers move. A head's block holds
what it keeps of each token, and what it keeps of the last one. Every row is read along, so none is ever missing."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch

from twostroke.backends.cuda.kv_store import KVStore
from twostroke.core.kv_blocks import BlockFormat
from twostroke.core.kv_layout import KVLayout


class DeviceBlocks(Protocol):
    """Tensors behind block ids, by KV group."""

    def block_formats(self) -> tuple[BlockFormat, ...]:
        """One a KV group."""

    def dtype_of(self, group: int) -> torch.dtype: ...

    def layers_of(self, group: int) -> tuple[int, ...]: ...

    def block_shape(self, group: int) -> tuple[int, ...]:
        """The layers' number first."""

    def gather(self, group: int, blocks: Sequence[int]) -> torch.Tensor:
        """[blocks, *block_shape], on the device."""

    def scatter(self, group: int, layers: Sequence[int], blocks: Sequence[int], data: torch.Tensor) -> None:
        """The same the other way, for some of the layers."""


class HeadBlocks:
    """`DeviceBlocks` of a head: one group of one layer."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        """`parts` [num_blocks, ...] each, all of one type; the last holds what is kept of a block's last token."""
        self._parts = tuple(parts)

    def block_formats(self) -> tuple[BlockFormat, ...]:
        dtype, shapes = self.dtype_of(0), [" x ".join(map(str, part.shape[1:])) for part in self._parts]
        element = f"{str(dtype).removeprefix('torch.')} of a head ({', '.join(shapes)})"
        axes = tuple(zip(("layer", "number"), self.block_shape(0), strict=True))
        return (BlockFormat(self.layers_of(0), None, element, dtype.itemsize, axes),)

    def dtype_of(self, group: int) -> torch.dtype:
        return self._parts[0].dtype

    def layers_of(self, group: int) -> tuple[int, ...]:
        return (0,)

    def block_shape(self, group: int) -> tuple[int, ...]:
        return (1, sum(prod(part.shape[1:]) for part in self._parts))

    def gather(self, group: int, blocks: Sequence[int]) -> torch.Tensor:
        places = torch.tensor(blocks, device=self._parts[0].device)
        return torch.cat([part[places].flatten(1) for part in self._parts], dim=1)[:, None]

    def scatter(self, group: int, layers: Sequence[int], blocks: Sequence[int], data: torch.Tensor) -> None:
        places = torch.tensor(blocks, device=data.device)
        own = data[:, 0].split([prod(part.shape[1:]) for part in self._parts], dim=1)
        for part, found in zip(self._parts, own, strict=True):
            part.index_copy_(0, places, found.reshape(-1, *part.shape[1:]))


class AllBlocks:
    """`DeviceBlocks` of an engine: groups of the model that answers, then of whoever drafts for it."""

    def __init__(self, layout: KVLayout, target: KVStore, drafter: DeviceBlocks | None) -> None:
        self._target = target
        self._owners: list[tuple[DeviceBlocks, int]] = []
        for place, group in enumerate(layout.groups):
            store = drafter if group.model and drafter is not None else target
            self._owners.append((store, layout.places_of(group.model).index(place)))
        self._formats = tuple(store.block_formats()[number] for store, number in self._owners)

    def block_formats(self) -> tuple[BlockFormat, ...]:
        return self._formats

    def dtype_of(self, group: int) -> torch.dtype:
        store, number = self._owners[group]
        return store.dtype_of(number)

    def layers_of(self, group: int) -> tuple[int, ...]:
        store, number = self._owners[group]
        return store.layers_of(number)

    def block_shape(self, group: int) -> tuple[int, ...]:
        store, number = self._owners[group]
        return store.block_shape(number)

    def gather(self, group: int, blocks: Sequence[int]) -> torch.Tensor:
        store, number = self._owners[group]
        return store.gather(number, blocks)

    def scatter(self, group: int, layers: Sequence[int], blocks: Sequence[int], data: torch.Tensor) -> None:
        store, number = self._owners[group]
        store.scatter(number, layers, blocks, data)

    def place_of(self, layer: int) -> int:
        """Of the model that answers: among the layers of its group."""
        return self._target.place_of(layer)
