"""From the last states of a prompt to its vector: a few rows and small matrices, the same for every host backend."""

from __future__ import annotations

import numpy as np

from twostroke.backends.host.arithmetic import Array, gelu, linear, sigmoid
from twostroke.models.pooling import DenseStep, Pooling
from twostroke.models.spec import StepActivation


class Pooler:
    def __init__(self, pooling: Pooling) -> None:
        self.pooled_states = pooling.states
        self._normalises = pooling.normalises
        self._steps = [_Step(step) for step in pooling.steps]

    def vector(self, states: Array) -> Array:
        """`states`: those that `pooled_states` names  # [1, hidden], or with the mean [num_tokens, hidden]"""
        pooled = states.mean(axis=0, keepdims=True, dtype=np.float64).astype(np.float32)
        for step in self._steps:
            pooled = step.apply(pooled)
        vector: Array = pooled[0]
        return normalised(vector) if self._normalises else vector


class _Step:
    def __init__(self, step: DenseStep) -> None:
        self._weight = step.weight.to_float32()
        self._bias = None if step.bias is None else step.bias.to_float32()
        self._activation: StepActivation = step.activation

    def apply(self, x: Array) -> Array:
        return _activated(self._activation, linear(x, self._weight, self._bias))


def _activated(activation: StepActivation, x: Array) -> Array:
    if activation == "tanh":
        return np.tanh(x)
    if activation == "gelu":
        return gelu(x)
    if activation == "relu":
        return np.maximum(x, np.float32(0))
    return sigmoid(x) if activation == "sigmoid" else x


def normalised(vector: Array) -> Array:
    """Of length 1; a vector of zeros stays."""
    length = np.sqrt(np.sum(np.square(vector), dtype=np.float64))
    scaled: Array = (vector / max(length, 1e-12)).astype(np.float32)
    return scaled
