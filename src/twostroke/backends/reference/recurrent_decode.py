"""Decode of layers that keep a state: one token of one sequence. The state is read, changed and written whole, however
long the sequence is, and nothing else of what came before is looked at.

`recurrent_prefill.py` computes the same of many tokens at once."""

from __future__ import annotations

import numpy as np

from twostroke.backends.host.arithmetic import Array


def convolve_token(inputs: Array, weight: Array, before: Array) -> tuple[Array, Array]:
    """inputs [channels]; weight [channels, taps]; before [taps - 1, channels], those of the tokens before. Returns the
    outputs, and the inputs to be kept."""
    window = np.concatenate([before, inputs[None]])  # [taps, channels]
    outputs = np.zeros_like(inputs)
    for tap, earlier in enumerate(window):
        outputs += earlier * weight[:, tap]
    return outputs, window[1:]


def delta_token(
    query: Array, key: Array, value: Array, beta: Array, fading: Array, state: Array
) -> tuple[Array, Array]:
    """The gated delta rule: query and key [heads, key_dim], value [heads, value_dim], beta and fading (a logarithm,
    below 0) [heads], state [heads, key_dim, value_dim]. Returns what the query found, and the state after the token."""
    faded = state * np.exp(fading)[:, None, None]
    known = (key[:, None] @ faded)[:, 0]  # [heads, value_dim]: what the state has under the key
    written = beta[:, None] * (value - known)
    state = faded + key[:, :, None] * written[:, None]
    return (query[:, None] @ state)[:, 0], state


def scan_token(inputs: Array, b: Array, c: Array, fading: Array, state: Array) -> tuple[Array, Array]:
    """Mamba-2's: inputs [heads, head_dim], already as long as their step; b and c [heads, state_size]; fading (a
    logarithm, below 0) [heads]; state [heads, head_dim, state_size]. Returns what was read, and the state after the
    token."""
    state = state * np.exp(fading)[:, None, None] + inputs[:, :, None] * b[:, None]
    return (state @ c[:, :, None])[:, :, 0], state
