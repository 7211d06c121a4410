"""Mamba-2 on the device against the rule written token by token in float64: prompts by tiles, chunks that begin
anywhere, decodes, and drafts that hold or do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.backends.cuda.rule_checks import EPS, Case, check_chunks, check_decodes, check_drafts
from tests.backends.cuda.state_case import Sequences, convolved, silu

from twostroke.backends.cuda.recurrent_rules import RecurrentWeights
from twostroke.models.spec import Mamba2

GRANITE, NEMOTRON = Mamba2(4, 16, 32, 2, 4), Mamba2(6, 24, 40, 3, 3, False, 2, 0.05, 0.9, 1e-3)
"""As Granite's; and with all that others have: norms of groups, bounds on steps, an epsilon and no bias."""


class MambaTwin:
    def __init__(self, mixer: Mamba2, case: Sequences) -> None:
        self.mixer, heads = mixer, mixer.num_heads
        self.conv = case.drawn(mixer.conv_width, mixer.taps)
        self.conv_bias = case.drawn(mixer.conv_width) if mixer.conv_bias else None
        self.dt_bias, self.decay, self.skip = case.drawn(heads), -np.exp(0.3 * case.drawn(heads)), case.drawn(heads)
        self.gated_norm = 1 + 0.2 * case.drawn(mixer.width)

    def weights(self, device: str) -> RecurrentWeights:
        names = ("conv", "conv_bias", "dt_bias", "decay", "skip", "gated_norm")
        told = {name: each for name in names if (each := getattr(self, name)) is not None}
        return RecurrentWeights(**{name: torch.from_numpy(each).float().to(device) for name, each in told.items()})

    def of(self, projected: np.ndarray, start: int, matrix: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        own, count = self.mixer, len(projected)
        inputs, gates, steps = np.split(projected, [own.conv_width, own.conv_width + own.width], axis=1)
        mixed = silu(convolved(inputs, self.conv) + (0 if self.conv_bias is None else self.conv_bias))
        numbers = mixed[:, : own.width].reshape(count, own.num_heads, own.head_dim)
        both = mixed[:, own.width :].reshape(count, 2, own.num_groups, own.state_size)
        both = both.repeat(own.num_heads // own.num_groups, axis=2)
        lengths = np.clip(np.logaddexp(steps + self.dt_bias, 0), own.shortest_step, own.longest_step)
        answers, behind = [], []
        for token in range(start, count):
            length = lengths[token][:, None]
            matrix = matrix * np.exp(self.decay[:, None] * length)[:, :, None]
            matrix = matrix + (numbers[token] * length)[:, :, None] * both[token, 0][:, None]
            found = np.einsum("hpn,hn->hp", matrix, both[token, 1]) + self.skip[:, None] * numbers[token]
            parts = (found.reshape(-1) * silu(gates[token])).reshape(own.norm_groups, -1)
            parts = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + (own.norm_eps or EPS))
            answers.append(parts.reshape(-1) * self.gated_norm)
            behind.append(matrix)
        return np.stack(answers), behind


@pytest.mark.parametrize(
    ("mixer", "starts", "counts", "dtype"),
    [
        (GRANITE, [0, 7, 3], [70, 2, 64], torch.float32),
        (NEMOTRON, [1, 0], [131, 1], torch.float32),
        (GRANITE, [9, 0], [65, 40], torch.bfloat16),
    ],
)
def test_chunks(device, mixer, starts, counts, dtype):
    check_chunks(Case(MambaTwin, mixer, starts, counts, device), dtype)


@pytest.mark.parametrize("mixer", [GRANITE, NEMOTRON])
def test_decodes(device, mixer):
    check_decodes(Case(MambaTwin, mixer, [4, 1, 9], [1, 1, 1], device))


def test_drafts_are_answered_at_once_and_replayed_as_they_hold(device):
    check_drafts(Case(MambaTwin, GRANITE, [4, 1, 7], [3, 3, 3], device), [2, 3, 1])
