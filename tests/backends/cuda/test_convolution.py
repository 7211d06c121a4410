"""Short convolutions on the device against plain float64 arithmetic: chunks that begin anywhere, decodes, and what is
kept of their inputs; and the items that say which state is whose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.backends.cuda.state_case import BEFORE, Sequences, convolved, silu

from twostroke.backends.cuda.kernels.convolution import convolve_gated_step, convolve_tiles, keep_inputs
from twostroke.backends.cuda.kernels.state_items import (
    ANY_LENGTH,
    NO_TILE,
    StateTiles,
    copy_states,
    decode_items,
    keep_states,
    settled_items,
)
from twostroke.backends.cuda.state_shape import StateShape

STARTS_AND_COUNTS = [([0, 5, 1, 130], [70, 3, 64, 1]), ([2], [129]), ([0, 0], [1, 2])]


def gated_case(starts, counts, taps, channels, device):
    """Inputs of every token, [tokens, 3 * channels]; and what is convolved of them."""
    case = Sequences(StateShape(channels, taps), list(starts), list(counts), device, seed=taps)
    projected = [case.drawn(start + count, 3 * channels) for start, count in zip(starts, counts, strict=True)]
    inputs = [each[:, :channels] * each[:, 2 * channels :] for each in projected]
    case.fill(inputs)
    weight = case.drawn(channels, taps)
    expected = [
        (own[:, channels : 2 * channels] * convolved(mixed, weight))[start:]
        for own, mixed, start in zip(projected, inputs, starts, strict=True)
    ]
    x = case.joined([own[start:] for own, start in zip(projected, starts, strict=True)])
    return case, x, inputs, torch.from_numpy(weight).float().to(device), expected


def near(found, expected):
    np.testing.assert_allclose(found.double().cpu().numpy(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize(("starts", "counts"), STARTS_AND_COUNTS)
def test_chunks_between_gates(device, starts, counts, taps):
    case, x, inputs, weight, expected = gated_case(starts, counts, taps, 72, device)
    items, work = case.work(room=(case.num_tokens, len(starts) + 2))
    out = torch.full((case.num_tokens, 72), float("nan"), device=device)
    convolve_tiles(x, weight, None, case.states, items, work.tiles, out, case.shape, gated=True)
    keep_inputs(x, case.states, items, case.shape, gated=True)
    for first, own in zip(case.firsts, expected, strict=True):
        near(out[first : first + len(own)], own)
    assert torch.isnan(out[:BEFORE]).all() and torch.isnan(out[case.num_tokens - 3 :]).all(), "others are left alone"
    case.check_ring(inputs, counts)


def test_chunks_through_an_activation(device):
    starts, counts, width = [3, 0], [66, 5], 40
    case = Sequences(StateShape(width, 4), starts, counts, device)
    inputs = [case.drawn(start + count, width + 9) for start, count in zip(starts, counts, strict=True)]
    case.fill([each[:, :width] for each in inputs])
    weight, bias = case.drawn(width, 4), case.drawn(width)
    items, work = case.work()
    x = case.joined([own[start:] for own, start in zip(inputs, starts, strict=True)])
    out = torch.full((case.num_tokens, width), float("nan"), device=device)
    told = (torch.from_numpy(each).float().to(device) for each in (weight, bias))
    convolve_tiles(x, *told, case.states, items, work.tiles, out, case.shape, gated=False)
    for first, own, start in zip(case.firsts, inputs, starts, strict=True):
        expected = silu(convolved(own[:, :width], weight) + bias)[start:]
        near(out[first : first + len(expected)], expected)


def test_decodes_write_their_states_and_others_do_not(device):
    starts = [4, 1, 9]
    case, x, inputs, weight, expected = gated_case(starts, [1, 1, 1], 3, 300, device)
    x, out = x[BEFORE:], torch.full((3, 300), float("nan"), device=device)
    before = case.states.clone()
    items = case.decodes(count=2)
    convolve_gated_step(x, weight, case.states, items, out, case.shape, writes=False)
    near(out[:2], np.concatenate(expected[:2]))
    assert torch.isnan(out[2]).all(), "it is no decode"
    assert torch.equal(case.states.nan_to_num(7), before.nan_to_num(7))
    convolve_gated_step(x, weight, case.states, case.decodes(), out, case.shape, writes=True)
    near(out, np.concatenate(expected))
    case.check_ring(inputs, [1, 1, 1])


def test_drafts_are_computed_at_once_and_kept_as_they_hold(device):
    """Three queries a stream: outputs as if each token were there, the state behind those that came, and a copy behind
    fewer of them."""
    starts, width, came = [4, 0, 7], 3, [2, 3, 1]
    case, x, inputs, weight, expected = gated_case(starts, [width] * 3, 4, 40, device)
    x, out = x[BEFORE:].clone(), torch.full((9, 40), float("nan"), device=device)
    rows = torch.arange(3, dtype=torch.int32, device=device).repeat_interleave(width)
    positions = torch.tensor(starts, dtype=torch.int32, device=device).repeat_interleave(width)
    items = decode_items(rows, positions, case.lengths, case.items(), None, width=width)
    convolve_gated_step(x, weight, case.states, items, out, case.shape, writes=False)
    near(out, np.concatenate(expected))
    counts = torch.tensor(came, dtype=torch.int32, device=device)
    case.come(came)
    free = [slot for slot in range(5) if slot not in case.slots]
    saves = torch.tensor(
        [[0, free[0], 5], [1, free[1], 3], [2, 6, 9], [0, 6, 4]], dtype=torch.int32, device=device
    )  # the last two ask for what this step does not reach
    others = settled_items(rows, counts, case.lengths, case.items(), width=width, saves=saves)
    assert others[:, 3].tolist() == [1, 3, 0, 0]
    keep_inputs(x, case.states, others, case.shape, gated=True)
    own = settled_items(rows, counts, case.lengths, case.items(), width=width)
    keep_inputs(x, case.states, own, case.shape, gated=True)
    case.check_ring(inputs, came)
    for row, (slot, count) in enumerate(((free[0], 1), (free[1], 3))):
        ring = case.states[slot].view(case.shape.ring, 40).cpu()
        end = starts[row] + count
        for position in range(max(0, end - 3), end):
            np.testing.assert_allclose(ring[position % 4], inputs[row][position], rtol=1e-5, atol=1e-6)


def test_states_are_copied_where_rows_came_as_far(device):
    case = Sequences(StateShape(24, 3), [4, 9], [1, 1], device)
    states = torch.arange(2.0 * 5 * 96, device=device).view(2, 5, 96)
    before, first, second = states.clone(), int(case.slots[0]), int(case.slots[1])
    free = [slot for slot in range(4) if slot not in (first, second)]
    pairs = torch.tensor([[first, free[0]]], dtype=torch.int32, device=device)
    copy_states(states, pairs)
    assert torch.equal(states[:, free[0]], before[:, first])
    saves = torch.tensor([[0, free[1], 6], [1, free[0], 10]], dtype=torch.int32, device=device)
    keep_states(states, saves, case.lengths)  # the first has computed 5
    assert torch.equal(states[:, free[1]], before[:, free[1]]) and torch.equal(states[:, free[0]], before[:, second])
    saves[0, 2] = ANY_LENGTH
    keep_states(states, saves[:1], case.lengths)
    assert torch.equal(states[:, free[1]], before[:, first])


def test_tiles_have_room_for_whatever_a_captured_step_holds():
    segments = tuple(np.array(each, dtype=np.int32) for each in ([0, 130], [130, 1], [0, 9], [1, 0]))
    tiles = StateTiles.build(segments, padding_row=7, room=(192, 4))
    assert tiles.segments.tolist() == [[0, 130, 0, 1], [130, 1, 9, 0], [0, 0, 0, 7], [0, 0, 0, 7]]
    assert tiles.tiles.tolist() == [[0, 0], [0, 64], [0, 128], [1, 0], *[[0, NO_TILE]] * 3]
