"""The forward pass of BERT-like encoders: positions are looked up, and each block's sum with the residual is normed.
Attention is the decoder's, whose mask lets tokens of one chunk see each other both ways."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from twostroke.backends.host.arithmetic import Array, layer_norm
from twostroke.backends.host.batch import Batch
from twostroke.backends.reference.kv_store import KVStore
from twostroke.backends.reference.mlp import gated_mlp
from twostroke.backends.reference.model import StepPlan, grouped_attention
from twostroke.backends.reference.weights import GatedMlp, GroupedWeights, PlaceWeights, Weights
from twostroke.models.spec import DenseMlp, LearntPlaces, ModelSpec


def encoder_states(spec: ModelSpec, weights: Weights, batch: Batch, kv: KVStore, max_context: int) -> Iterator[Array]:
    """Compute every token of the batch; after each layer, give their states  # [num_tokens, hidden]"""
    assert spec.places is not None and weights.places is not None
    plan = StepPlan.of(spec, batch, kv, max_context)
    hidden = _embedded(spec.places, weights.places, weights.embedding[batch.token_ids], batch, spec.norm_eps)
    for index, (layer, own) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        assert isinstance(own.attention, GroupedWeights) and isinstance(own.mlp, GatedMlp)
        assert isinstance(layer.mlp, DenseMlp)
        assert own.attention_norm is not None and own.attention_norm_bias is not None
        assert own.mlp_norm is not None and own.mlp_norm_bias is not None
        hidden = hidden + grouped_attention(spec, layer.grouped, own.attention, index, hidden, batch, kv, plan)
        hidden = layer_norm(hidden, own.attention_norm, own.attention_norm_bias, spec.norm_eps)
        hidden = hidden + gated_mlp(layer.mlp, own.mlp, hidden)
        hidden = layer_norm(hidden, own.mlp_norm, own.mlp_norm_bias, spec.norm_eps)
        yield hidden


def _embedded(places: LearntPlaces, weights: PlaceWeights, tokens: Array, batch: Batch, eps: float) -> Array:
    """What tokens are, where they stand and in which text, as one  # [num_tokens, hidden]"""
    texts = np.zeros(len(tokens), dtype=np.int32) if batch.texts is None else batch.texts
    hidden = tokens + weights.positions[batch.positions + places.first_position]
    hidden = hidden + weights.texts[np.minimum(texts, places.num_texts - 1)]
    return layer_norm(hidden, weights.norm, weights.norm_bias, eps)
