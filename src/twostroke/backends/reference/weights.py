"""A checkpoint's tensors as float32 arrays, in the shape of the model. Quantised weights are decoded once, here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import LayerSpec, expert_name

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """A layer's MLP, or one of its experts."""

    gate: Array  # [intermediate, hidden]
    up: Array  # [intermediate, hidden]
    down: Array  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [outputs, inputs], vectors [outputs]; what a family lacks is None."""

    attention_norm: Array
    q: Array
    k: Array
    v: Array
    o: Array
    mlp_norm: Array
    mlp: GatedMlp | None = None
    router: Array | None = None  # [experts, hidden]
    experts: tuple[GatedMlp, ...] = ()
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
        spec, tensors = checkpoint.spec, checkpoint.tensors
        by_layer: list[dict[str, Array]] = [{} for _ in range(spec.num_layers)]
        for name, tensor in tensors.items():
            if name.startswith("layers."):
                _, index, own_name = name.split(".", 2)
                by_layer[int(index)][own_name] = tensor.to_float32()
        layers = tuple(_layer_weights(own, layer) for own, layer in zip(by_layer, spec.layers, strict=True))
        embedding = tensors["embedding"].to_float32()
        output = embedding if spec.tied_embeddings else tensors["output"].to_float32()
        return Weights(embedding, layers, tensors["final_norm"].to_float32(), output)


def _layer_weights(arrays: dict[str, Array], layer: LayerSpec) -> LayerWeights:
    if layer.moe is None:
        return LayerWeights(**_without_mlps(arrays), mlp=_gated_mlp(arrays, ""))
    experts = tuple(_gated_mlp(arrays, expert_name(expert, "")) for expert in range(layer.moe.num_experts))
    return LayerWeights(**_without_mlps(arrays), experts=experts)


def _gated_mlp(arrays: dict[str, Array], prefix: str) -> GatedMlp:
    return GatedMlp(arrays[f"{prefix}gate"], arrays[f"{prefix}up"], arrays[f"{prefix}down"])


def _without_mlps(arrays: dict[str, Array]) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if name.rpartition(".")[2] not in ("gate", "up", "down")}
