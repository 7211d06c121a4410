"""Gemma 4's vectors for each token and layer, beside the residual stream: made once a pass, before the first layer, and
let into the stream behind each layer's MLP by a gate. Nothing here waits for the device or allocates."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twostroke.backends.cuda.kernels.activation import gate_with
from twostroke.backends.cuda.kernels.layer_inputs import make_inputs
from twostroke.backends.cuda.matrix import Matrix
from twostroke.backends.cuda.products import Products, Stream
from twostroke.models.spec import LayerInput, ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class InputWeights:
    """Of all layers together."""

    embedding: torch.Tensor  # [vocab, layers * width]
    projection: Matrix  # [layers * width, hidden]
    norm: torch.Tensor  # [width]


@dataclass(frozen=True, slots=True, eq=False)
class JoinWeights:
    """Of one layer."""

    gate: Matrix  # [width, hidden]
    join: Matrix  # [hidden, width]
    norm: torch.Tensor  # [hidden]

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.gate, self.join


class InputBuffers:
    def __init__(
        self,
        own: LayerInput,
        num_layers: int,
        num_tokens: int,
        num_logits: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.made = torch.zeros(num_tokens, num_layers * own.width, dtype=dtype, device=device)
        self.gates = torch.zeros(num_tokens, own.width, dtype=dtype, device=device)
        self.selected = torch.zeros(num_logits, own.width, dtype=dtype, device=device)


class InputPath:
    def __init__(self, spec: ModelSpec, weights: InputWeights, buffers: InputBuffers, products: Products) -> None:
        assert spec.layer_input is not None
        self._own, self._weights, self._buffers, self._products = spec.layer_input, weights, buffers, products
        self._gain, self._eps = spec.hidden_size**-0.5, spec.norm_eps

    def begin(self, embedded: torch.Tensor, ids: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """Before the first layer. ids: tokens, their rows, and rows' last tokens, as `embedding.gather` takes them."""
        weights, made = self._weights, self._buffers.made[: len(embedded)]
        self._products.apply(embedded, weights.projection, made)
        make_inputs(made, weights.norm, weights.embedding, *ids, gain=self._gain, eps=self._eps)

    def join(
        self,
        index: int,
        layer: JoinWeights,
        stream: Stream,
        next_norm: torch.Tensor | None,
        scale: torch.Tensor | None,
        selected: torch.Tensor | None,
    ) -> None:
        """A layer's own input joins the stream, of all tokens or of those `selected`."""
        count, width = len(stream.residual), self._own.width
        own = self._buffers.made[:, index * width : (index + 1) * width]
        if selected is not None:
            own = torch.index_select(own, 0, selected, out=self._buffers.selected[:count])
        gates = self._buffers.gates[:count]
        self._products.multiply(stream, None, layer.gate, gates)
        gate_with(gates, own[:count], gates, kind=self._own.activation)
        self._products.join(gates, layer.join, stream, layer.norm, next_norm, scale)

    def prepare(self, layer: JoinWeights, most_rows: int) -> None:
        """Have kernels of the products compiled which no set of steps is sure to meet all of."""
        buffers, products = self._buffers, self._products
        places = ((layer.gate, buffers.gates), (self._weights.projection, buffers.made))
        for matrix, out in places:
            for rows in (rows for rows in products.long_rows(matrix) if rows <= most_rows):
                products.apply(products.found(rows), matrix, out[:rows])
