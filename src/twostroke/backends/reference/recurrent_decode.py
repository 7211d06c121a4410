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
