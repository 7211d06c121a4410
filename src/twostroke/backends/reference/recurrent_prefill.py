"""Prefill of layers that keep a state: a chunk of one sequence's tokens at once. What comes before the chunk is in the
state alone; within it tokens meet each other in matrix products, in sections whose squares stay small.

`recurrent_decode.py` has the same rules for one token, where they are easier to read."""

from __future__ import annotations

import numpy as np

from twostroke.backends.host.arithmetic import Array


def convolve_chunk(inputs: Array, weight: Array, before: Array) -> tuple[Array, Array]:
    """Each channel over its last tokens: inputs [chunk, channels]; weight [channels, taps], the newest token's last;
    before [taps - 1, channels], the inputs before the chunk. Returns the outputs, and the inputs to be kept."""
    count, taps = len(inputs), weight.shape[1]
    extended = np.concatenate([before, inputs])
    outputs = np.zeros_like(inputs)
    for tap in range(taps):
        outputs += extended[tap : tap + count] * weight[:, tap]
    return outputs, extended[count:]
