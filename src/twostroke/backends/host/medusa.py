"""The arithmetic of Medusa's heads in numpy, float32: each reads the target's last hidden state alone, so all of them
guess at once and none needs a memory."""

from __future__ import annotations

import numpy as np

from twostroke.backends.host.arithmetic import Array, linear, silu
from twostroke.models.heads.medusa import MedusaHeads


class MedusaNetwork:
    def __init__(self, heads: MedusaHeads) -> None:
        self.spec = heads.spec
        self._weights = {name: tensor.to_float32() for name, tensor in heads.tensors.items()}

    def scores(self, hidden: Array, num_heads: int) -> Array:
        """hidden [n, hidden]: after the target's final norm, at the last token that it has read. Returns what the first
        heads think of the tokens behind the next one  # [heads, n, draft vocab]"""
        found = []
        for head in range(min(num_heads, self.spec.num_heads)):
            state = hidden
            for block in range(self.spec.num_blocks):
                name = self.spec.block_name(head, block)
                state = state + silu(linear(state, self._weights[name], self._weights.get(f"{name}_bias")))
            found.append(linear(state, self._weights[self.spec.output_name(head)]))
        return np.stack(found)
