"""Weights brought to GGUF's blocks on the device have the numbers and scales that a file would have: those of
`models/weights/quantisation.py`, which are the `gguf` package's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from twostroke.backends.cuda.file_numbers import numbers_of
from twostroke.backends.cuda.kernels.block_rounding import rounded_in_blocks
from twostroke.backends.cuda.kernels.grouped_numbers import GroupedMatrix
from twostroke.backends.cuda.matrix import ExpertMatrix, ExpertUnits
from twostroke.backends.cuda.stored_codes import EXPERTS_TO, QUANTISED_TO, as_units
from twostroke.models.weights.quantisation import dequantise, quantise
from twostroke.models.weights.tensor import WeightKind, WeightTensor

KINDS = ("q8_0", "q4_1")


def weights(rows: int = 64, width: int = 256) -> np.ndarray:
    """Blocks of all sizes, with halves, of nothing, of one sign, and too small for a scale."""
    generator = np.random.default_rng(3)
    values = generator.standard_normal((rows, width)) * np.exp(4 * generator.standard_normal((rows, 1)))
    values[0], values[1, :32], values[2] = 0, 0.75, np.abs(values[2])
    values[3, :64] = np.arange(64) - 63.5
    values[4, :32] = 1e-12 * np.arange(32)
    return values.astype(np.float32)


def stored(kind: str, values: np.ndarray) -> WeightTensor:
    own = WeightKind[kind.upper()]
    return WeightTensor("", own, values.shape, quantise(own, values))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_scales_are_those_of_a_file(kind: str, device: str) -> None:
    values, bits = weights(), 8 if kind == "q8_0" else 4
    found = rounded_in_blocks(torch.from_numpy(values).to(device), 32, bits, has_minimum=kind == "q4_1")
    expected = numbers_of(stored(kind, values), torch.device("cpu"))
    assert torch.equal(found[0].cpu(), expected.numbers.view(64, 256))
    assert torch.equal(found[1].cpu(), expected.scales.to(torch.float16))
    assert (found[2] is None) == (expected.added is None)
    if found[2] is not None and expected.added is not None:
        assert torch.equal(found[2].cpu(), expected.added.to(torch.float16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_matrix_is_that_of_a_file_rounded_to_bf16(kind: str, is_gated: bool, device: str) -> None:
    values = weights()
    place = GroupedMatrix.empty((64, 256), QUANTISED_TO[kind], device, is_gated=is_gated)
    place.quantise(torch.from_numpy(values).to(device))
    expected = torch.from_numpy(dequantise(WeightKind[kind.upper()], stored(kind, values).data)).bfloat16().float()
    assert torch.equal(place.dequantised().cpu(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_by_rows_are_those_of_a_file(kind: str, device: str) -> None:
    values = weights()
    form = EXPERTS_TO[kind].by_rows
    assert form is not None
    place = ExpertMatrix.empty((2, 32, 256), form, torch.device(device))
    place.quantise(torch.from_numpy(values).to(device).view(2, 32, 256))
    expected = torch.from_numpy(dequantise(WeightKind[kind.upper()], stored(kind, values).data)).bfloat16().float()
    assert torch.equal(place.dequantised().cpu().view(64, 256), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_units_are_those_of_a_file(kind: str, device: str) -> None:
    values, form = weights(), EXPERTS_TO[kind].by_rows
    assert form is not None
    code = as_units(form)
    assert code is not None
    place = ExpertUnits.empty((2, 32, 256), code, torch.device(device), is_gated=True)
    place.quantise(torch.from_numpy(values).to(device).view(2, 32, 256))
    expected = torch.from_numpy(dequantise(WeightKind[kind.upper()], stored(kind, values).data)).bfloat16().float()
    assert torch.equal(place.dequantised().cpu().view(64, 256), expected)


def test_a_row_that_is_no_whole_blocks(device: str) -> None:
    """What stands behind its end changes no scale."""
    values = weights(width=80)
    wide = np.concatenate([values, np.repeat(values[:, -1:], 16, axis=1)], axis=1)
    for bits, has_minimum in ((8, False), (4, True)):
        numbers, scales, _ = rounded_in_blocks(torch.from_numpy(values), 32, bits, has_minimum=has_minimum)
        whole, same, _ = rounded_in_blocks(torch.from_numpy(wide), 32, bits, has_minimum=has_minimum)
        assert torch.equal(numbers, whole[:, :80]) and torch.equal(scales, same)
