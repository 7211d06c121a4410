"""From the last states of a prompt to its vector: a few rows and small matrices, the same for every host backend."""

from __future__ import annotations

import numpy as np

from twostroke.backends.host.arithmetic import Array, gelu, linear, sigmoid
from twostroke.models.pooling import DenseStep, Pooling, States
from twostroke.models.spec import StepActivation


class Pooler:
    def __init__(self, pooling: Pooling) -> None:
        self.wanted = pooling.wanted
        self._kinds = pooling.all_states
        self._normalises = pooling.normalises
        self._steps = [_Step(step) for step in pooling.steps]

    def vector(self, states: Array) -> Array:
        """`states`: those that are wanted  # [1, hidden], or of all tokens [num_tokens, hidden]"""
        pooled = np.concatenate([_pooled(kind, states) for kind in self._kinds])[None].astype(np.float32)
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


def _pooled(kind: States, states: Array) -> Array:
    if kind in ("first", "last"):
        end: Array = states[0 if kind == "first" else -1]
        return end
    if kind == "max":
        highest: Array = states.max(axis=0)
        return highest
    count = len(states)
    weights = np.arange(1, count + 1) if kind == "weighted_mean" else np.ones(count)
    total = np.sqrt(count) if kind == "root_mean" else weights.sum()
    mean: Array = (states * weights[:, None]).sum(axis=0) / total  # in 64 bits
    return mean


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
