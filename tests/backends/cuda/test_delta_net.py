"""Gated delta nets on the device against the rule written token by token in float64: prompts by tiles, chunks that
begin anywhere, decodes, and drafts that hold or do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tests.backends.cuda.rule_checks import EPS, Case, check_chunks, check_decodes, check_drafts
from tests.backends.cuda.state_case import Sequences, convolved, sigmoid, silu

from twostroke.backends.cuda.kernels.delta_prefill import solve_triangle
from twostroke.backends.cuda.recurrent_rules import RecurrentWeights
from twostroke.models.spec import GatedDeltaNet


class DeltaTwin:
    def __init__(self, mixer: GatedDeltaNet, case: Sequences) -> None:
        self.mixer, heads = mixer, mixer.num_value_heads
        self.conv, self.norm = case.drawn(mixer.conv_width, mixer.taps), 1 + 0.2 * case.drawn(mixer.value_dim)
        self.dt_bias, self.decay = case.drawn(heads), -np.exp(0.3 * case.drawn(heads))

    def weights(self, device: str) -> RecurrentWeights:
        told = {name: getattr(self, name) for name in ("conv", "dt_bias", "decay")} | {"gated_norm": self.norm}
        return RecurrentWeights(**{name: torch.from_numpy(each).float().to(device) for name, each in told.items()})

    def of(self, projected: np.ndarray, start: int, matrix: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        own, keys = self.mixer, self.mixer.key_width
        splits = np.cumsum([own.conv_width, own.value_width, own.num_value_heads])
        inputs, gates, betas, fadings = np.split(projected, splits, axis=1)
        mixed = silu(convolved(inputs, self.conv))
        both = mixed[:, : 2 * keys].reshape(len(mixed), 2, own.num_key_heads, own.key_dim)
        both /= np.sqrt((both**2).sum(-1, keepdims=True) + 1e-6)
        shares = np.arange(own.num_value_heads)
        shares = shares % own.num_key_heads if own.tiled else shares // own.values_per_key_head
        queries, keys_of = both[:, 0, shares] * own.key_dim**-0.5, both[:, 1, shares]
        values = mixed[:, 2 * keys :].reshape(len(mixed), own.num_value_heads, own.value_dim)
        left = np.exp(self.decay * np.logaddexp(fadings + self.dt_bias, 0))
        answers, behind = [], []
        for token in range(start, len(mixed)):
            matrix = matrix * left[token][:, None, None]
            known = np.einsum("hk,hkv->hv", keys_of[token], matrix)
            written = sigmoid(betas[token])[:, None] * (values[token] - known)
            matrix = matrix + keys_of[token][:, :, None] * written[:, None]
            found = np.einsum("hk,hkv->hv", queries[token], matrix)
            found = found / np.sqrt((found**2).mean(-1, keepdims=True) + EPS) * self.norm
            answers.append(found.reshape(-1) * silu(gates[token]))
            behind.append(matrix)
        return np.stack(answers), behind


@pytest.mark.parametrize(
    ("mixer", "starts", "counts", "dtype"),
    [
        (GatedDeltaNet(2, 4, 16, 32, 4), [0, 7, 3], [70, 2, 64], torch.float32),
        (GatedDeltaNet(2, 4, 16, 16, 4, tiled=True), [1, 0], [131, 1], torch.float32),
        (GatedDeltaNet(1, 3, 24, 40, 3), [5], [33], torch.float32),
        (GatedDeltaNet(2, 2, 16, 16, 4), [9, 0], [65, 40], torch.bfloat16),
    ],
)
def test_chunks(device, mixer, starts, counts, dtype):
    check_chunks(Case(DeltaTwin, mixer, starts, counts, device), dtype)


@pytest.mark.parametrize("mixer", [GatedDeltaNet(2, 4, 16, 32, 4), GatedDeltaNet(1, 3, 24, 40, 3, tiled=True)])
def test_decodes(device, mixer):
    check_decodes(Case(DeltaTwin, mixer, [4, 1, 9], [1, 1, 1], device))


def test_drafts_are_answered_at_once_and_replayed_as_they_hold(device):
    check_drafts(Case(DeltaTwin, GatedDeltaNet(2, 4, 16, 16, 4), [4, 1, 7], [3, 3, 3], device), [2, 3, 1])


@triton.jit
def _solve(x, out, tile: tl.constexpr):
    place = tl.arange(0, tile)[:, None] * tile + tl.arange(0, tile)[None, :]
    tl.store(out + place, solve_triangle(tl.load(x + place), tile))


@pytest.mark.parametrize("kind", ["random", "alike"])
def test_meetings_are_solved(device, kind):
    """Also where all keys are alike and nothing fades: powers of such meetings are larger than float32 can tell."""
    rng = np.random.default_rng(5)
    meetings = np.tril(rng.standard_normal((64, 64)) * 0.3 if kind == "random" else np.ones((64, 64)), -1)
    x = torch.from_numpy(meetings).float().to(device)
    out = torch.full_like(x, float("nan"))
    _solve[(1,)](x, out, tile=64)
    expected = np.linalg.inv(np.eye(64) + x.double().cpu().numpy())
    np.testing.assert_allclose(out.double().cpu().numpy(), expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())
