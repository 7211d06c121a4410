"""Gemma 4's vectors for each token and layer, on the tape: made before the first layer, and let into the residual
behind each layer's MLP by a gate. What tokens are is looked up in numpy before a step: it is once a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.arguments import MOST_LACKING_ROWS, NormField, OperandField, Wait
from twostroke.backends.cpu.layer_weights import LayerInputs, LayerInputWeights
from twostroke.backends.cpu.memory import Floats, address_of, float_zeros
from twostroke.backends.cpu.mlp_program import MlpOperations
from twostroke.backends.cpu.operand import Operand
from twostroke.backends.cpu.row_operations import Columns
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.quantisation import dequantise


def looked_up(spec: ModelSpec, weights: LayerInputs, token_ids: npt.NDArray[np.int32]) -> Floats:
    """The half of them that a token gives  # [num_tokens, layers * width]"""
    assert spec.layer_input is not None
    table = weights.embedding
    return dequantise(table.kind, table.data[token_ids]) * np.float32((spec.layer_input.width / 2) ** 0.5)


@dataclass(frozen=True, slots=True, eq=False)
class _Buffers:
    """`vectors` begins as what was looked up, and moves together where rows are left out."""

    vectors: Floats  # [rows, layers * width]
    projected: Floats  # [rows, layers * width]
    narrow: Floats  # [rows whose logits are wanted, layers * width]
    gates: Floats  # [rows, width]
    gated: Operand

    @staticmethod
    def of(spec: ModelSpec, width: int, max_tokens: int, narrow_rows: int, threads: int) -> _Buffers:
        rows, whole = max_tokens + MOST_LACKING_ROWS, spec.num_layers * width
        gated = Operand(max_tokens, width, threads=threads)
        shapes = ((rows, whole), (rows, whole), (narrow_rows, whole), (rows, width))
        vectors, projected, narrow, gates = (float_zeros(*shape) for shape in shapes)
        return _Buffers(vectors, projected, narrow, gates, gated)


class LayerInputOperations(MlpOperations):
    """Adds them to a tape; of a model that has none, nothing."""

    _inputs_of_layers: _Buffers | None
    _are_narrow: bool = False

    def _make_layer_inputs(self, max_tokens: int, narrow_rows: int, threads: int) -> None:
        own = self._spec.layer_input
        self._inputs_of_layers = (
            None if own is None else _Buffers.of(self._spec, own.width, max_tokens, narrow_rows, threads)
        )

    def look_up(self, weights: LayerInputs | None, token_ids: npt.NDArray[np.int32]) -> None:
        """Before a step."""
        if self._inputs_of_layers is not None and weights is not None:
            self._inputs_of_layers.vectors[: len(token_ids)] = looked_up(self._spec, weights, token_ids)

    def _add_layer_inputs(self, weights: LayerInputs | None) -> None:
        """Half of a vector is made from the token's embedding, which is the residual now."""
        buffers, own = self._inputs_of_layers, self._spec.layer_input
        if buffers is None or own is None or weights is None:
            return
        self._add_norm(self._normed, None, weights.projection)
        self._add_projection(weights.projection, self._normed, buffers.projected)
        source, target = (
            Columns(buffer, 0, own.width, self._spec.num_layers) for buffer in (buffers.projected, buffers.vectors)
        )
        # What is projected would be scaled by 1 / sqrt(hidden), which a norm takes away again but for its epsilon.
        eps = self._spec.norm_eps * self._spec.hidden_size
        wait = self._wait_for_rows()
        self._add_norm_columns(source, weights.norm, eps, target=target, accumulate=True, wait=wait)

    def _narrow_layer_inputs(self) -> None:
        """Where rows are left out: the vectors of the others move together."""
        buffers = self._inputs_of_layers
        if buffers is None:
            return
        self._are_narrow = True
        gather: dict[IntEnum, int] = {NormField.GATHER: 1, OperandField.FLOATS: address_of(buffers.narrow)}
        self.tape.add("prepare", self._norm_fields(buffers.vectors, None) | gather, wait=Wait.NEVER)

    def _add_layer_input(self, index: int, weights: LayerInputWeights | None, factor: float) -> None:
        """`factor`: what the residual is multiplied by behind it. All ranks have all of it: they do not meet here."""
        buffers, own = self._inputs_of_layers, self._spec.layer_input
        if buffers is None or own is None or weights is None:
            return
        self._add_norm(self._normed, None, weights.gate)
        self._add_projection(weights.gate, self._normed, buffers.gates)
        vectors = buffers.narrow if self._are_narrow else buffers.vectors
        own_input = Columns(vectors, index * own.width, own.width)
        self._add_activation(buffers.gates, own_input, weights.out, buffers.gated)
        self._add_projection(weights.out, buffers.gated, self.block_output)
        self._add_norm_add(self.block_output, weights.norm, factor)
