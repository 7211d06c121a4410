"""A checkpoint's tensors as float32 arrays, in the shape of the model. Quantised weights are decoded once, here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import layer_name

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [outputs, inputs], vectors [outputs]; what a family lacks is None."""

    attention_norm: Array
    q: Array
    k: Array
    v: Array
    o: Array
    mlp_norm: Array
    gate: Array
    up: Array
    down: Array
    q_bias: Array | None = None
    k_bias: Array | None = None
    v_bias: Array | None = None
    o_bias: Array | None = None
    q_norm: Array | None = None
    k_norm: Array | None = None
    post_attention_norm: Array | None = None
    post_mlp_norm: Array | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Array  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Array  # [hidden]
    output: Array  # [vocab, hidden]; the embedding itself when the two are tied

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint) -> Weights:
        arrays = {name: tensor.to_float32() for name, tensor in checkpoint.tensors.items()}
        layers = []
        for index in range(checkpoint.spec.num_layers):
            prefix = layer_name(index, "")
            own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
            layers.append(LayerWeights(**own))
        embedding = arrays["embedding"]
        return Weights(embedding, tuple(layers), arrays["final_norm"], arrays.get("output", embedding))
