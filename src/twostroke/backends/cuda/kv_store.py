"""Keys and values on the device: for each layer two tensors of blocks, one block more than the ledger hands out.
The last one takes what padding writes, and is never read for a real token."""

from __future__ import annotations

import torch

from twostroke.core.kv_layout import KVLayout
from twostroke.models.spec import ModelSpec


class KVStore:
    def __init__(self, spec: ModelSpec, layout: KVLayout, device: torch.device, dtype: torch.dtype) -> None:
        self.block_size = layout.block_size
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
