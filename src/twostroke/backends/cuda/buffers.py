"""Activations between the kernels of a step. Knows their sizes; what is in them is the model's."""

from __future__ import annotations

from typing import Any

import torch

from twostroke.backends.cuda.kernels.product import padded_rows
from twostroke.backends.cuda.latent import LatentBuffers
from twostroke.backends.cuda.layer_inputs import InputBuffers
from twostroke.backends.cuda.layer_matrices import attention_of, matrices_of, widest_mlp
from twostroke.backends.cuda.model_matrices import unpacked_weights
from twostroke.backends.cuda.moe import MoeScratch
from twostroke.backends.cuda.product_launches import ProductScratch
from twostroke.backends.cuda.recurrent import RecurrentBuffers
from twostroke.backends.cuda.state_shape import mixer_of
from twostroke.backends.cuda.stored_codes import AS_COMPUTED, Held
from twostroke.backends.cuda.tuned_table import Choices
from twostroke.models.spec import LatentAttention, ModelSpec


class Buffers:
    """Activations of the largest step, made once."""

    def __init__(
        self,
        spec: ModelSpec,
        num_tokens: int,
        num_logits: int,
        device: torch.device,
        dtype: torch.dtype,
        held: Held = AS_COMPUTED,
        num_queries: int = 0,
        choices: Choices | None = None,
    ) -> None:
        """`held`: how layers' matrices are held. `num_queries`: of a step that verifies drafts, at most. `choices`: of
        kernels, as far as room depends on them."""

        def empty(width: int) -> torch.Tensor:
            return torch.zeros(num_tokens, width, dtype=dtype, device=device)

        attention, mixer = attention_of(spec), mixer_of(spec)
        self.latent = self.recurrent = self.inputs = None
        if (own := spec.layer_input) is not None:
            self.inputs = InputBuffers(own, spec.num_layers, num_tokens, num_logits, dtype, device)
        if isinstance(attention, LatentAttention):
            self.latent = LatentBuffers(attention, num_tokens, dtype, device)
        if mixer is not None:
            self.recurrent = RecurrentBuffers(spec, mixer, num_tokens, num_queries, dtype, device)
        matrices = {(matrix.kind, matrix.product) for matrix in matrices_of(spec)}
        self.positions = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.residual = empty(spec.hidden_size)
        self.normed = empty(spec.hidden_size)
        self.qkv = empty(max(product.outputs for kind, product in matrices if kind == "qkv"))
        self.attention = empty(max(product.width for kind, product in matrices if kind == "o"))
        self.activated = empty(widest_mlp(spec))
        self.products = ProductScratch(spec, num_tokens, dtype, device, held)
        self.experts = None
        if spec.moe is not None:
            unpacked = unpacked_weights(spec, held, num_tokens, choices)
            in_float8 = not held.in_float8.isdisjoint(held.experts)
            self.experts = MoeScratch(
                spec.moe, spec.hidden_size, num_tokens, dtype, device, unpacked, in_float8=in_float8
            )
        self.selected = torch.zeros(num_logits, spec.hidden_size, dtype=dtype, device=device)
        self.selected_attention = torch.zeros(num_logits, self.attention.shape[1], dtype=dtype, device=device)
        scored = spec.vocab_size if spec.has_output else 0
        self.logits = torch.zeros(num_logits, scored, dtype=torch.float32, device=device)

    def activated_of(self, num_rows: int, width: int) -> torch.Tensor:
        """Of an MLP of this width, which may be less than the widest  # [num_rows, width]"""
        return _narrow(self.activated, num_rows, width)

    def qkv_of(self, num_rows: int, width: int) -> torch.Tensor:
        """What a layer's first product gives  # [num_rows, width]"""
        return _narrow(self.qkv, num_rows, width)

    def attention_of(self, num_rows: int, width: int) -> torch.Tensor:
        """What its last one before the MLP reads  # [num_rows, width]"""
        return _narrow(self.attention, num_rows, width)

    def selected_of(self, num_rows: int, width: int) -> torch.Tensor:
        return _narrow(self.selected_attention, num_rows, width)

    def clear_padding(self, num_rows: int) -> None:
        """Products of `num_rows` rows multiply some behind them, too, and drop the results. Zeros take less power than
        what a larger step left there, and power is what holds back large batches of decodes."""
        for inputs in (self.normed, self.attention, self.activated):
            inputs[num_rows : padded_rows(num_rows)].zero_()


def _narrow(room: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
    """Rows one behind the other, as wide as they are, in room for wider ones."""
    return room.view(-1)[: num_rows * width].view(num_rows, width)


def tensor_bytes(value: Any) -> int:
    """Of all tensors that an object of ours holds, and the objects in it. On torch's device `meta` one is made that
    takes nothing, and tells what another would."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, tuple):
        return sum(map(tensor_bytes, value))
    is_ours = type(value).__module__.startswith("twostroke.") and hasattr(value, "__dict__")
    return sum(map(tensor_bytes, vars(value).values())) if is_ours else 0
