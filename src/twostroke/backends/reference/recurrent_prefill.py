"""Prefill of layers that keep a state: a chunk of one sequence's tokens at once. What comes before the chunk is in the
state alone; within it tokens meet each other in matrix products, in sections whose squares stay small.

`recurrent_decode.py` has the same rules for one token, where they are easier to read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from twostroke.backends.host.arithmetic import Array

SECTION = 64
"""Tokens: their meetings take its square, and the state is gone through once for all of them."""


def convolve_chunk(inputs: Array, weight: Array, before: Array) -> tuple[Array, Array]:
    """Each channel over its last tokens: inputs [chunk, channels]; weight [channels, taps], the newest token's last;
    before [taps - 1, channels], the inputs before the chunk. Returns the outputs, and the inputs to be kept."""
    count, taps = len(inputs), weight.shape[1]
    extended = np.concatenate([before, inputs])
    outputs = np.zeros_like(inputs)
    for tap in range(taps):
        outputs += extended[tap : tap + count] * weight[:, tap]
    return outputs, extended[count:]


def delta_chunk(
    queries: Array, keys: Array, values: Array, betas: Array, fading: Array, state: Array
) -> tuple[Array, Array]:
    """The gated delta rule: queries and keys [chunk, heads, key_dim], values [chunk, heads, value_dim], betas and
    fading (a logarithm, below 0) [chunk, heads], state [heads, key_dim, value_dim]. Returns what the queries found
    [chunk, heads, value_dim], and the state after the chunk.

    Token i finds the state faded by all tokens of the section up to it, and in it what the earlier ones wrote. What it
    writes is beta times what its key lacked, so writes depend on each other, each on the earlier ones: with the
    meetings of keys in a triangle M, they are the solution of (1 + M) writes = beta (values - what the state gave)."""
    outputs = np.empty_like(values)
    for tokens in _sections(len(keys)):
        q, k, v = (part[tokens].transpose(1, 0, 2) for part in (queries, keys, values))  # [heads, count, dim]
        beta = betas[tokens].T[:, :, None]  # [heads, count, 1]
        since_start, between, to_end = _fading(fading[tokens])
        lacking = beta * (v - since_start * (k @ state))
        meetings = np.tril(beta * (k @ k.transpose(0, 2, 1)) * between, -1)  # [heads, count, count]
        writes = _solve(meetings, lacking)
        found = since_start * (q @ state) + (q @ k.transpose(0, 2, 1) * between) @ writes
        outputs[tokens] = found.transpose(1, 0, 2)
        state = since_start[:, -1:] * state + np.matmul((k * to_end).transpose(0, 2, 1), writes)
    return outputs, state


def _solve(meetings: Array, wanted: Array) -> Array:
    """x where (1 + meetings) x = wanted, row by row: a row meets earlier ones alone  # [heads, count, dim]"""
    solved = wanted.copy()
    for row in range(1, solved.shape[1]):
        solved[:, row] -= (meetings[:, row : row + 1, :row] @ solved[:, :row])[:, 0]
    return solved


def scan_chunk(inputs: Array, b: Array, c: Array, fading: Array, state: Array) -> tuple[Array, Array]:
    """Mamba-2's: inputs [chunk, heads, head_dim], already as long as their steps; b and c [chunk, heads, state_size];
    fading (a logarithm, below 0) [chunk, heads]; state [heads, head_dim, state_size]. Returns what was read
    [chunk, heads, head_dim], and the state after the chunk."""
    outputs = np.empty_like(inputs)
    for tokens in _sections(len(inputs)):
        x, into, along = (part[tokens].transpose(1, 0, 2) for part in (inputs, b, c))  # [heads, count, dim]
        since_start, between, to_end = _fading(fading[tokens])
        from_before = since_start * (along @ state.transpose(0, 2, 1))
        found = from_before + (along @ into.transpose(0, 2, 1) * between) @ x
        outputs[tokens] = found.transpose(1, 0, 2)
        state = since_start[:, -1:] * state + np.matmul((x * to_end).transpose(0, 2, 1), into)
    return outputs, state


def _sections(count: int) -> Iterator[slice]:
    return (slice(start, min(start + SECTION, count)) for start in range(0, count, SECTION))


def _fading(logarithms: Array) -> tuple[Array, Array, Array]:
    """From [count, heads], what is left: of the state before the section at each token [heads, count, 1]; of what each
    token wrote at each later one, and at itself, [heads, count, count]; and at the section's end [heads, count, 1]."""
    sums = np.cumsum(logarithms.T, axis=1)  # [heads, count]
    differences = sums[:, :, None] - sums[:, None, :]
    between = np.where(np.tri(sums.shape[1], dtype=np.bool_), np.exp(np.minimum(differences, 0)), np.float32(0))
    return np.exp(sums)[:, :, None], between, np.exp(sums[:, -1:] - sums)[:, :, None]
