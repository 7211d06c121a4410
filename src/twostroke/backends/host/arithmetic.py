"""The small functions a decoder is made of, on float32 arrays of any leading shape. None of them knows a model."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """[n, inputs] times [outputs, inputs] -> [n, outputs]: weights are stored one output a row. Each row is multiplied
    by itself: together, BLAS would add up in an order that depends on how many there are, and a draft would not get the
    bits that its token gets alone."""
    y: Array = (x[:, None] @ weight.T)[:, 0]
    return y if bias is None else y + bias


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Scale the last axis to a root mean square of 1, then by a learned weight a dimension. Unlike a layer norm it
    subtracts no mean, which costs less and has proved to matter little."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    normed: Array = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return normed


def silu(x: Array) -> Array:
    """x times its sigmoid, written with tanh, which cannot overflow."""
    y: Array = x * (np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * x)))
    return y


def gelu_tanh(x: Array) -> Array:
    """x times the normal distribution's share below x, in the tanh approximation that Gemma was trained with."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    y: Array = np.float32(0.5) * x * (1 + np.tanh(inner))
    return y


def gelu(x: Array) -> Array:
    """x times the normal distribution's share below x, which BERT was trained with."""
    y: Array = np.float32(0.5) * x * (1 + erf(x * np.float32(math.sqrt(0.5))))
    return y


def erf(x: Array) -> Array:
    """The error function, off by 1.5e-7 at most (Abramowitz and Stegun, 7.1.26): numpy has none."""
    size = np.abs(x.astype(np.float64))
    t = 1 / (1 + 0.3275911 * size)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    y: Array = np.copysign(1 - series * np.exp(-size * size), x).astype(np.float32)
    return y


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Bring the last axis to a mean of 0 and a spread of 1, then to a learned weight and bias a dimension."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(np.square(centred), axis=-1, keepdims=True)
    normed: Array = centred / np.sqrt(variance + np.float32(eps)) * weight + bias
    return normed


def soft_cap(x: Array, cap: float | None) -> Array:
    """Bend values smoothly into (-cap, cap); None leaves them."""
    return x if cap is None else np.float32(cap) * np.tanh(x / np.float32(cap))


def sigmoid(x: Array) -> Array:
    """Written with tanh, which cannot overflow."""
    y: Array = np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * x))
    return y


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), which is above 0 and, far up, x itself."""
    y: Array = np.logaddexp(np.float32(0), x)
    return y


def softmax(scores: Array, sinks: Array | None = None) -> Array:
    """Over the last axis. The maximum is taken out first so that exp cannot overflow: it cancels in the quotient.
    `sinks` [..., 1] are scores of nothing, one beside each row's: they take a share, and leave the rest a sum below
    1."""
    largest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    exponentials = np.exp(scores - largest)
    total = exponentials.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - largest)
    weights: Array = exponentials / total
    return weights


def rotate(x: Array, cos: Array, sin: Array, *, neighbours: bool = False) -> Array:
    """The rotary embedding: turn each pair (x[i], x[i + d/2]) of a head by an angle that grows with the position, so
    that the product of a query and a key depends on how far apart they are, and on nothing else of where they are.

    x [n, heads, head_dim]; cos, sin [n, d/2] with d the rotated dimensions, which may be fewer than a head has.
    `neighbours`: pairs are (x[2i], x[2i + 1]). Every number stays in its place, as in every backend: what one of them
    keeps of a token another can read."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]  # the same for every head
    pairs, rest = x[..., : 2 * half], x[..., 2 * half :]
    if neighbours:
        first, second = pairs[..., 0::2], pairs[..., 1::2]
        turned = np.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(pairs.shape)
        return np.concatenate([turned, rest], axis=-1)
    first, second = pairs[..., :half], pairs[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
