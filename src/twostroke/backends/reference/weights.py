"""A checkpoint's tensors as float32 arrays, in the shape of the model. Quantised weights are decoded once, here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.backends.reference.recurrent_weights import RecurrentWeights, recurrent_weights
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import GroupedAttention, LatentAttention, LayerSpec, MoeSpec, Recurrent, expert_name
from twostroke.models.weights.tensor import WeightTensor

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """A layer's MLP, or one of its experts."""

    up: Array  # [intermediate, hidden]
    down: Array  # [hidden, intermediate]
    gate: Array | None = None  # [intermediate, hidden]
    gate_bias: Array | None = None
    up_bias: Array | None = None
    down_bias: Array | None = None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A layer's experts, and what sends tokens to them."""

    router: Array  # [experts, hidden]
    experts: dict[int, GatedMlp]
    """By number: a rank of several may have some of them."""
    router_bias: Array | None = None
    router_correction: Array | None = None
    latent_down: Array | None = None  # [latent, hidden]
    latent_up: Array | None = None  # [hidden, latent]
    shared: GatedMlp | None = None
    shared_router: Array | None = None  # [1, hidden]
    router_norm: Array | None = None
    experts_norm: Array | None = None
    post_experts_norm: Array | None = None
    post_shared_norm: Array | None = None
    expert_scale: Array | None = None  # [experts]


@dataclass(frozen=True, slots=True)
class GroupedWeights:
    q: Array
    o: Array
    k: Array | None = None
    """None: it reads another layer's keys and values."""
    v: Array | None = None
    """None: values are what keys are made of."""
    q_bias: Array | None = None
    k_bias: Array | None = None
    v_bias: Array | None = None
    o_bias: Array | None = None
    q_norm: Array | None = None
    k_norm: Array | None = None
    q_gate: Array | None = None  # [heads * head_dim, hidden]
    sinks: Array | None = None  # [heads]


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Of latent attention. Queries come from the hidden states by `q`, or through a low rank by `q_a` and `q_b`."""

    kv_a: Array  # [rank + rotated, hidden]
    kv_a_norm: Array  # [rank]
    key_b: Array  # [heads, plain, rank]: what each head's keys are expanded with
    value_b: Array  # [heads, value, rank]
    o: Array
    q: Array | None = None  # [heads * key, hidden]
    q_a: Array | None = None
    q_a_norm: Array | None = None
    q_b: Array | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [outputs, inputs], vectors [outputs]; what a family lacks is None."""

    attention: GroupedWeights | LatentWeights | RecurrentWeights | None = None
    mlp: GatedMlp | ExpertWeights | None = None
    attention_norm: Array | None = None
    mlp_norm: Array | None = None
    post_attention_norm: Array | None = None
    post_mlp_norm: Array | None = None
    attention_norm_bias: Array | None = None
    mlp_norm_bias: Array | None = None
    input_gate: Array | None = None  # [width, hidden]
    input_projection: Array | None = None  # [hidden, width]
    post_input_norm: Array | None = None
    layer_scale: Array | None = None  # [1]


@dataclass(frozen=True, slots=True)
class LayerInputWeights:
    """What makes a vector for each token and layer."""

    embedding: WeightTensor  # [vocab, layers * width]: as stored, since it is the largest of all and few rows are read
    projection: Array  # [layers * width, hidden]
    norm: Array  # [width]


@dataclass(frozen=True, slots=True)
class PlaceWeights:
    """Of a model that looks positions up."""

    positions: Array  # [positions, hidden]
    texts: Array  # [2, hidden]
    norm: Array
    norm_bias: Array


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Array  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Array  # [hidden]; empty: there is none
    output: Array | None  # [vocab, hidden]; the embedding itself when the two are tied; None: it scores no tokens
    places: PlaceWeights | None = None
    layer_inputs: LayerInputWeights | None = None

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
        output = None
        if spec.has_output:
            output = embedding if spec.tied_embeddings else tensors["output"].to_float32()
        final_norm = tensors["final_norm"].to_float32() if spec.has_final_norm else np.zeros(0, dtype=np.float32)
        places = None
        if spec.places is not None:
            places = PlaceWeights(*(tensors[name].to_float32() for name in _PLACES))
        return Weights(embedding, layers, final_norm, output, places, _layer_inputs(checkpoint))


_GROUPED = tuple(field.name for field in fields(GroupedWeights))
_MLP = tuple(field.name for field in fields(GatedMlp))
_AROUND = tuple(field.name for field in fields(LayerWeights) if field.name not in ("attention", "mlp"))
_ROUTER = tuple(
    field.name for field in fields(ExpertWeights) if field.name not in ("experts", "shared", "shared_router")
)
_PLACES = ("position_embedding", "text_embedding", "embedding_norm", "embedding_norm_bias")


def _layer_weights(arrays: dict[str, Array], layer: LayerSpec) -> LayerWeights:
    attention: GroupedWeights | LatentWeights | RecurrentWeights | None = None
    if isinstance(layer.attention, LatentAttention):
        attention = _latent(arrays, layer.attention)
    elif isinstance(layer.attention, GroupedAttention):
        attention = GroupedWeights(**_named(arrays, _GROUPED))
    elif isinstance(layer.attention, Recurrent):
        attention = recurrent_weights(arrays, layer.attention)
    mlp: GatedMlp | ExpertWeights | None = None
    if layer.mlp is not None:
        mlp = _gated_mlp(arrays, "") if layer.moe is None else _experts(arrays, layer.moe)
    return LayerWeights(attention=attention, mlp=mlp, **_named(arrays, _AROUND))


def _layer_inputs(checkpoint: Checkpoint) -> LayerInputWeights | None:
    if checkpoint.spec.layer_input is None:
        return None
    tensors = checkpoint.tensors
    projection, norm = tensors["layer_projection"].to_float32(), tensors["layer_projection_norm"].to_float32()
    return LayerInputWeights(tensors["layer_embedding"], projection, norm)


def _latent(arrays: dict[str, Array], own: LatentAttention) -> LatentWeights:
    by_head = arrays["kv_b"].reshape(own.num_heads, own.plain_dim + own.value_dim, own.rank)
    key_b, value_b = by_head[:, : own.plain_dim], by_head[:, own.plain_dim :]
    others = _named(arrays, ("kv_a", "kv_a_norm", "o", "q", "q_a", "q_a_norm", "q_b"))
    return LatentWeights(key_b=key_b, value_b=value_b, **others)


def _experts(arrays: dict[str, Array], moe: MoeSpec) -> ExpertWeights:
    return ExpertWeights(
        experts={expert: _gated_mlp(arrays, expert_name(expert, "")) for expert in moe.held_experts},
        shared=None if moe.shared is None else _gated_mlp(arrays, "shared."),
        shared_router=arrays.get("shared.router"),
        **_named(arrays, _ROUTER),
    )


def _gated_mlp(arrays: dict[str, Array], prefix: str) -> GatedMlp:
    return GatedMlp(**_named(arrays, _MLP, prefix))


def _named(arrays: dict[str, Array], names: tuple[str, ...], prefix: str = "") -> dict[str, Any]:
    """Those that the model has."""
    return {name: arrays[prefix + name] for name in names if prefix + name in arrays}
