"""Activations between the kernels of a step. Knows their sizes; what is in them is the model's."""

from __future__ import annotations

import torch

from twostroke.backends.cuda.kernels.product import padded_rows
from twostroke.backends.cuda.moe import MoeScratch
from twostroke.backends.cuda.products import ProductScratch
from twostroke.models.spec import ModelSpec


class Buffers:
    """Activations of the largest step, made once."""

    def __init__(self, spec: ModelSpec, num_tokens: int, num_logits: int, device: torch.device, dtype: torch.dtype):
        def empty(width: int) -> torch.Tensor:
            return torch.zeros(num_tokens, width, dtype=dtype, device=device)

        attention = spec.layers[0].grouped
        attention_width = attention.query_width
        self.positions = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.residual = empty(spec.hidden_size)
        self.normed = empty(spec.hidden_size)
        self.qkv = empty(attention_width + attention.kv_values)
        self.attention = empty(attention_width)
        self.activated = empty(spec.dense_width)
        self.products = ProductScratch(spec, num_tokens, dtype, device)
        self.experts = MoeScratch(spec.moe, spec.hidden_size, num_tokens, dtype, device) if spec.moe else None
        self.selected = torch.zeros(num_logits, spec.hidden_size, dtype=dtype, device=device)
        self.selected_attention = torch.zeros(num_logits, attention_width, dtype=dtype, device=device)
        self.logits = torch.zeros(num_logits, spec.vocab_size, dtype=torch.float32, device=device)

    def clear_padding(self, num_rows: int) -> None:
        """Products of `num_rows` rows multiply some behind them, too, and drop the results. Zeros take less power than
        what a larger step left there, and power is what holds back large batches of decodes."""
        for inputs in (self.normed, self.attention, self.activated):
            inputs[num_rows : padded_rows(num_rows)].zero_()

    @staticmethod
    def num_bytes(spec: ModelSpec, num_tokens: int, num_logits: int) -> int:
        """In 16-bit types."""
        attention_width = spec.layers[0].grouped.query_width
        width = 2 * spec.hidden_size + 2 * attention_width + spec.layers[0].grouped.kv_values + spec.dense_width
        blocks = ProductScratch.num_bytes(spec, num_tokens)
        blocks += MoeScratch.num_bytes(spec.moe, spec.hidden_size, num_tokens) if spec.moe else 0
        of_a_logit = 2 * (spec.hidden_size + attention_width) + 4 * spec.vocab_size
        return num_tokens * (2 * width + 4) + blocks + num_logits * of_a_logit
