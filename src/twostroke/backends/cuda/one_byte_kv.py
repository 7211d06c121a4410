"""Keys and values of one byte a number, as kernels see them: a head's numbers of a block, and behind them, where every
token has scales of its own, those. All of it is one tensor of bytes, so that a block moves as it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from twostroke.backends.cuda.kernels.paged import HEAD_SCALES, SCALE_BYTES, TOKEN_SCALES, PagedKV
from twostroke.backends.cuda.kv_codes import kv_code
from twostroke.core.formats import Formats
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import GroupedAttention

NUMBERS: Final = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}

Scales = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class OneByteKV:
    name: str
    """Of `Formats.kv`."""
    of_heads: Mapping[int, Scales] = field(default_factory=dict)
    """By layer, scales of keys and of values, float32 [kv_heads] each; none: every token has its own."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, formats: Formats, device: torch.device) -> OneByteKV | None:
        """None: KV is kept in 16 bits."""
        code, scales = kv_code(checkpoint, formats), checkpoint.kv_scales
        if not code.is_one_byte:
            return None
        if code.has_token_scales:
            return cls(code.name)
        assert scales is not None
        of_heads = {}
        for layer, spec in enumerate(checkpoint.spec.layers):
            heads = spec.grouped.num_kv_heads
            each = (np.broadcast_to(one[layer], (heads,)) for one in (scales.keys, scales.values))
            keys, values = (torch.from_numpy(one.astype(np.float32)).to(device) for one in each)
            of_heads[layer] = (keys, values)
        return cls(code.name, of_heads)

    @property
    def scaled(self) -> str:
        return HEAD_SCALES if self.of_heads else TOKEN_SCALES

    @property
    def element(self) -> str:
        """What a block's bytes are, for who compares formats."""
        return f"{self.name} and a scale of {self.scaled}"

    def head_bytes(self, attention: GroupedAttention, block_size: int) -> int:
        """Of keys or values in one block."""
        return block_size * (attention.head_dim + (0 if self.of_heads else SCALE_BYTES))

    def paged(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, block_size: int, table: torch.Tensor
    ) -> PagedKV:
        """Views of the bytes of a layer  # [blocks, kv_heads, head bytes]"""
        found = self.of_heads.get(layer)
        if found is None:
            found = (self._token_scales(keys, block_size), self._token_scales(values, block_size))
        return PagedKV(self._numbers(keys, block_size), self._numbers(values, block_size), table, found[0], found[1])

    def _head_dim(self, part: torch.Tensor, block_size: int) -> int:
        return part.shape[2] // block_size - (0 if self.of_heads else SCALE_BYTES)

    def _numbers(self, part: torch.Tensor, block_size: int) -> torch.Tensor:
        """[blocks, kv_heads, block_size, head_dim]"""
        used = block_size * self._head_dim(part, block_size)
        return part.view(NUMBERS[self.name])[:, :, :used].unflatten(2, (block_size, -1))

    def _token_scales(self, part: torch.Tensor, block_size: int) -> torch.Tensor:
        """[blocks, kv_heads, block_size] float32"""
        return part[:, :, block_size * self._head_dim(part, block_size) :].view(torch.float32)
