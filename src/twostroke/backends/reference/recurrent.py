"""Layers that keep a state in place of keys and values: what each token is projected to, the walk of a step's tokens
through their sequences' states, and what becomes of it. The rules that change a state are in `recurrent_prefill.py` and
`recurrent_decode.py`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twostroke.backends.host.arithmetic import Array, linear
from twostroke.backends.host.batch import Batch
from twostroke.backends.reference.kv_store import Table
from twostroke.backends.reference.recurrent_decode import convolve_token
from twostroke.backends.reference.recurrent_prefill import convolve_chunk
from twostroke.backends.reference.recurrent_weights import ConvolutionWeights, RecurrentWeights
from twostroke.backends.reference.state_store import State, StateStore
from twostroke.models.spec import Recurrent

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
) -> Array:
    """What a recurrent layer adds to the residual stream  # [num_tokens, hidden]"""
    assert isinstance(weights, ConvolutionWeights)
    return _short_convolution(weights, normed, _walk(layer, batch, states, tables))


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
