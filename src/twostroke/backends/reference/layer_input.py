"""Gemma 4's vectors for each token and layer: made once a step, before the first layer, and let into the residual
stream behind each layer's MLP by a gate."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.arithmetic import Array, gelu_tanh, linear, rms_norm, silu
from twostroke.backends.reference.weights import LayerInputWeights, LayerWeights
from twostroke.models.spec import ModelSpec


def layer_inputs(
    spec: ModelSpec, weights: LayerInputWeights | None, token_ids: npt.NDArray[np.int32], embedded: Array
) -> Array | None:
    """From what the token is and from its embedding, half of each  # [num_tokens, layers, width]"""
    own = spec.layer_input
    if own is None or weights is None:
        return None
    shape = (len(token_ids), spec.num_layers, own.width)
    looked_up = weights.embedding.take_rows(token_ids.astype(np.intp)).to_float32().reshape(shape)
    projected = linear(embedded, weights.projection) * np.float32(spec.hidden_size**-0.5)
    made = rms_norm(projected.reshape(shape), weights.norm, spec.norm_eps)
    return (made + looked_up * np.float32(own.width**0.5)) * np.float32(2**-0.5)


def input_block(spec: ModelSpec, weights: LayerWeights, hidden: Array, own_input: Array) -> Array:
    """What a layer's own input adds to the residual stream  # [num_tokens, hidden]"""
    gate, projection, norm = weights.input_gate, weights.input_projection, weights.post_input_norm
    assert spec.layer_input is not None and gate is not None and projection is not None and norm is not None
    activate = silu if spec.layer_input.activation == "silu" else gelu_tanh
    return rms_norm(linear(activate(linear(hidden, gate)) * own_input, projection), norm, spec.norm_eps)
