"""Layers that keep a state in place of keys and values: what each token is projected to, the walk of a step's tokens
through their sequences' states, and what becomes of it. The rules that change a state are in `recurrent_prefill.py` and
`recurrent_decode.py`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twostroke.backends.host.arithmetic import Array, linear, rms_norm, sigmoid, silu, softplus
from twostroke.backends.host.batch import Batch
from twostroke.backends.interface import Join
from twostroke.backends.reference.kv_store import Table
from twostroke.backends.reference.norm_meeting import NormMeeting
from twostroke.backends.reference.recurrent_decode import convolve_token, delta_token, scan_token
from twostroke.backends.reference.recurrent_prefill import convolve_chunk, delta_chunk, scan_chunk
from twostroke.backends.reference.recurrent_weights import (
    ConvolutionWeights,
    DeltaWeights,
    MambaWeights,
    RecurrentWeights,
)
from twostroke.backends.reference.state_store import State, StateStore
from twostroke.models.spec import GatedDeltaNet, Mamba2, Recurrent

_LENGTH_EPS = 1e-6
"""Of the length that queries and keys of a delta net are divided by: its makers' own."""

Rule = Callable[[slice, State], tuple[Array, State]]
"""From some tokens of one sequence and the state before them to their outputs [count, width] and the state after."""


def mix_recurrent(
    mixer: Recurrent,
    weights: RecurrentWeights,
    layer: int,
    normed: Array,
    batch: Batch,
    states: StateStore,
    tables: Table,
    eps: float,
    join: Join | None = None,
) -> Array:
    """What a recurrent layer adds to the residual stream  # [num_tokens, hidden]

    `join`: of a rank, which has some of the heads."""
    walk = _walk(layer, batch, states, tables)
    if isinstance(mixer, GatedDeltaNet) and isinstance(weights, DeltaWeights):
        return _gated_delta_net(mixer, weights, normed, eps, walk)
    if isinstance(mixer, Mamba2) and isinstance(weights, MambaWeights):
        return _mamba2(mixer, weights, normed, eps, walk, join)
    assert isinstance(weights, ConvolutionWeights)
    return _short_convolution(weights, normed, walk)


Walk = Callable[[Rule, Rule], Array]


def _walk(layer: int, batch: Batch, states: StateStore, tables: Table) -> Walk:
    """Calls the rules with all of a step's tokens, each phase by its own; gives the outputs [num_tokens, width]."""

    def walk(decode: Rule, prefill: Rule) -> Array:
        parts: list[Array] = []
        previous, state = -1, State()
        for row in range(batch.num_decodes):
            slot, position = int(tables[row, 0]), int(batch.positions[row])
            is_draft = slot == previous  # rows of one sequence follow each other: its token, then its drafts
            before = state if is_draft else states.read(layer, slot, position)
            output, state = decode(slice(row, row + 1), before)
            parts.append(output)
            if is_draft:
                states.keep_aside(layer, slot, state)
            else:
                states.write(layer, slot, state)
            previous = slot
        for segment in range(batch.num_decodes, batch.num_segments):
            first, count = int(batch.segment_first[segment]), int(batch.segment_count[segment])
            slot = int(tables[segment, 0])
            before = states.read(layer, slot, int(batch.segment_start[segment]))
            output, after = prefill(slice(first, first + count), before)
            parts.append(output)
            states.write(layer, slot, after)
        return np.concatenate(parts)

    return walk


def _short_convolution(weights: ConvolutionWeights, normed: Array, walk: Walk) -> Array:
    inputs = linear(normed, weights.b) * linear(normed, weights.x)  # [num_tokens, channels]

    def decode(rows: slice, state: State) -> tuple[Array, State]:
        outputs, kept = convolve_token(inputs[rows][0], weights.conv, state[0])
        return outputs[None], (kept,)

    def prefill(rows: slice, state: State) -> tuple[Array, State]:
        outputs, kept = convolve_chunk(inputs[rows], weights.conv, state[0])
        return outputs, (kept,)

    return linear(linear(normed, weights.c) * walk(decode, prefill), weights.o)


def _gated_delta_net(mixer: GatedDeltaNet, weights: DeltaWeights, normed: Array, eps: float, walk: Walk) -> Array:
    inputs = np.concatenate([linear(normed, part) for part in (weights.q, weights.k, weights.v)], axis=1)
    betas = sigmoid(linear(normed, weights.beta))  # [num_tokens, value heads]
    fading = weights.decay * softplus(linear(normed, weights.dt) + weights.dt_bias)

    def decode(rows: slice, state: State) -> tuple[Array, State]:
        mixed, kept = convolve_token(inputs[rows][0], weights.conv, state[0])
        query, key, value = (part[0] for part in _delta_heads(mixer, silu(mixed)[None]))
        found, matrix = delta_token(query, key, value, betas[rows][0], fading[rows][0], state[1])
        return found[None], (kept, matrix)

    def prefill(rows: slice, state: State) -> tuple[Array, State]:
        mixed, kept = convolve_chunk(inputs[rows], weights.conv, state[0])
        queries, keys, values = _delta_heads(mixer, silu(mixed))
        found, matrix = delta_chunk(queries, keys, values, betas[rows], fading[rows], state[1])
        return found, (kept, matrix)

    gates = linear(normed, weights.z).reshape(len(normed), mixer.num_value_heads, mixer.value_dim)
    found = rms_norm(walk(decode, prefill), weights.gated_norm, eps) * silu(gates)
    return linear(found.reshape(len(normed), -1), weights.o)


def _delta_heads(mixer: GatedDeltaNet, mixed: Array) -> tuple[Array, Array, Array]:
    """Queries and keys of length 1, a head for each value head, and values  # each [count, value heads, dim]"""
    count, keys = len(mixed), mixer.key_width
    by_head = mixed[:, : 2 * keys].reshape(count, 2, mixer.num_key_heads, mixer.key_dim)
    lengths = np.sqrt(np.square(by_head).sum(axis=-1, keepdims=True) + np.float32(_LENGTH_EPS))
    if mixer.tiled:
        both = np.tile(by_head / lengths, (1, 1, mixer.values_per_key_head, 1))
    else:
        both = np.repeat(by_head / lengths, mixer.values_per_key_head, axis=2)
    values = mixed[:, 2 * keys :].reshape(count, mixer.num_value_heads, mixer.value_dim)
    return both[:, 0] * np.float32(mixer.key_dim**-0.5), both[:, 1], values


def _mamba2(mixer: Mamba2, weights: MambaWeights, normed: Array, eps: float, walk: Walk, join: Join | None) -> Array:
    inputs = np.concatenate([linear(normed, part) for part in (weights.x, weights.b, weights.c)], axis=1)
    lengths = softplus(linear(normed, weights.dt) + weights.dt_bias)  # [num_tokens, heads]: of each token's step
    lengths = np.clip(lengths, np.float32(mixer.shortest_step), np.float32(mixer.longest_step))
    fading = weights.decay * lengths

    def decode(rows: slice, state: State) -> tuple[Array, State]:
        mixed, kept = convolve_token(inputs[rows][0], weights.conv, state[0])
        x, b, c = (part[0] for part in _mamba_heads(mixer, weights, mixed[None]))
        found, matrix = scan_token(x * lengths[rows][0][:, None], b, c, fading[rows][0], state[1])
        return (found + weights.skip[:, None] * x)[None], (kept, matrix)

    def prefill(rows: slice, state: State) -> tuple[Array, State]:
        mixed, kept = convolve_chunk(inputs[rows], weights.conv, state[0])
        x, b, c = _mamba_heads(mixer, weights, mixed)
        found, matrix = scan_chunk(x * lengths[rows][:, :, None], b, c, fading[rows], state[1])
        return found + weights.skip[:, None] * x, (kept, matrix)

    found = walk(decode, prefill).reshape(len(normed), -1) * silu(linear(normed, weights.z))
    eps = mixer.norm_eps or eps
    if mixer.norm_part is not None and join is not None:
        part = mixer.norm_part
        meeting = NormMeeting(join, part.width, part.group, part.num_groups)
        return linear(meeting.rms_norm(found, weights.gated_norm, eps), weights.o)
    by_group = found.reshape(len(normed), mixer.norm_groups, -1)
    normed_groups = rms_norm(by_group, weights.gated_norm.reshape(mixer.norm_groups, -1), eps)
    return linear(normed_groups.reshape(len(normed), -1), weights.o)


def _mamba_heads(mixer: Mamba2, weights: MambaWeights, mixed: Array) -> tuple[Array, Array, Array]:
    """x, b and c, a head for each head of x  # [count, heads, head_dim], twice [count, heads, state_size]"""
    count, width, group_width = len(mixed), mixer.width, mixer.group_width
    mixed = silu(mixed if weights.conv_bias is None else mixed + weights.conv_bias)
    both = mixed[:, width:].reshape(count, 2, mixer.num_groups, group_width // mixer.num_groups)
    both = np.repeat(both, mixer.num_heads // mixer.num_groups, axis=2)
    return mixed[:, :width].reshape(count, mixer.num_heads, mixer.head_dim), both[:, 0], both[:, 1]
