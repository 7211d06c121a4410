"""Experts' matrices in units: what is put in comes out again, by both ways back to floats; and the product of experts
is right over every code, whatever the routing, in an emulation of its own text and on the card."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.backends.cuda.packed_case import assert_near, by_kernel, counts_of_rows, needs_compiler, needs_hopper
from torch.nn import functional

from twostroke.backends.cuda.kernels.activation import Gate
from twostroke.backends.cuda.kernels.expert_numbers import LEVELS
from twostroke.backends.cuda.kernels.expert_units import (
    MOST_POWER,
    ExpertUnits,
    SmallFloatUnits,
    dequantise_units_into,
)
from twostroke.backends.cuda.kernels.four_bits import FourBitMatrix
from twostroke.backends.cuda.kernels.grouped_numbers import GroupedMatrix
from twostroke.backends.cuda.kernels.moe_routing import Order
from twostroke.backends.cuda.kernels.packed_format import FP8_UNITS, GROUPED_CODES, INT4, MX_UNITS, Code
from twostroke.backends.cuda.kernels.packed_tiles import PackedTile
from twostroke.core.errors import ModelError
from twostroke.models.mlp_spec import ClampedGate

Q4_K = next(code for code in GROUPED_CODES if code.name == "int4_32ka")
CODES = (MX_UNITS, FP8_UNITS, INT4, Q4_K)
CLAMPED = ClampedGate()


def filled(code: Code, shape: tuple[int, int, int], *, is_gated: bool, device: str = "cpu") -> ExpertUnits:
    weights = ExpertUnits.empty(shape, code, device, is_gated=is_gated)
    torch.manual_seed(shape[1])
    for matrix in weights:
        match matrix:
            case GroupedMatrix():
                matrix.draw()
            case SmallFloatUnits() if code is MX_UNITS:
                numbers = torch.randint(0, 16, shape[1:], dtype=torch.uint8, device=device)
                groups = -(-shape[2] // 32)
                matrix.put(numbers, torch.randint(110, 130, (shape[1], groups), dtype=torch.uint8, device=device))
            case SmallFloatUnits() | FourBitMatrix():
                matrix.quantise(torch.randn(shape[1:], device=device))
    return weights


@pytest.mark.parametrize("is_gated", [True, False])
def test_floats_of_four_bits_come_out_as_they_were_put(is_gated: bool, device: str) -> None:
    rows, width = 48, 160
    numbers = torch.randint(0, 16, (rows, width), dtype=torch.uint8, device=device)
    powers = torch.randint(90, 150, (rows, width // 32), dtype=torch.uint8, device=device)
    weights = ExpertUnits.empty((1, rows, width), MX_UNITS, device, is_gated=is_gated)
    (matrix,) = weights
    assert isinstance(matrix, SmallFloatUnits)
    matrix.put(numbers, powers)
    table = torch.tensor([*LEVELS, *(-level for level in LEVELS)], device=device)
    scales = torch.exp2(powers.float() - 127).repeat_interleave(32, 1)
    assert torch.equal(matrix.dequantised(), table[numbers.long()] * scales)


def test_powers_that_no_weight_has_are_refused(device: str) -> None:
    (matrix,) = ExpertUnits.empty((1, 16, 32), MX_UNITS, device)
    assert isinstance(matrix, SmallFloatUnits)
    powers = torch.full((16, 1), MOST_POWER + 1, dtype=torch.uint8, device=device)
    with pytest.raises(ModelError, match="larger than"):
        matrix.put(torch.zeros(16, 32, dtype=torch.uint8, device=device), powers)


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_both_ways_to_floats_agree(code: Code, is_gated: bool, device: str) -> None:
    weights = filled(code, (3, 80, 288), is_gated=is_gated, device=device)
    expected = weights.dequantised()
    assert expected.abs().max() > 0
    out = torch.full(expected.shape, float("nan"), dtype=torch.bfloat16, device=device)
    dequantise_units_into(weights, out)
    assert torch.equal(out, expected.to(torch.bfloat16))


def test_quantised_floats_are_near(device: str) -> None:
    drawn = torch.randn(2, 64, 256, device=device)
    for code, most in ((FP8_UNITS, 0.03), (INT4, 0.12)):
        weights = ExpertUnits.empty((2, 64, 256), code, device, is_gated=True)
        weights.quantise(drawn)
        assert float((weights.dequantised() - drawn).norm() / drawn.norm()) < most


def activated(sums: torch.Tensor, kind: Gate | None) -> torch.Tensor:
    if kind is None:
        return sums
    gate, up = sums.chunk(2, dim=-1)
    if isinstance(kind, ClampedGate):
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit) + 1
        return gate * torch.sigmoid(kind.alpha * gate) * up
    return functional.silu(gate) * up


def check(
    weights: ExpertUnits,
    counts: list[int],
    tile: PackedTile,
    kind: Gate | None,
    *,
    has_bias: bool,
    num_sms: int,
    multiply: Callable[..., None],
) -> None:
    device, top_k = weights.data.device, 3
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(device)
    num_pairs = sum(counts)
    num_tokens = -(-num_pairs // top_k)
    pairs = torch.randperm(num_tokens * top_k)[:num_pairs].to(torch.int32).to(device)
    inputs = torch.randn(num_tokens if kind else num_pairs, weights.width).to(torch.bfloat16).to(device)
    sources = (inputs[pairs.long() // top_k] if kind else inputs).float()
    bias = torch.randn(len(counts), weights.rows).to(torch.bfloat16).to(device) if has_bias else None
    sums = [part @ own.T for part, own in zip(sources.split(counts), weights.dequantised(), strict=True)]
    if bias is not None:
        sums = [part + own.float() for part, own in zip(sums, bias, strict=True)]
    expected = activated(torch.cat(sums), kind)
    guard = torch.full((num_pairs + 1, expected.shape[1]), float("nan"), dtype=torch.bfloat16, device=device)
    order = Order(pairs, starts, top_k)
    multiply(inputs, weights, guard[:num_pairs], order, tile=tile, num_sms=num_sms, gated=kind, bias=bias)
    assert_near(guard[:num_pairs], expected, torch.bfloat16)
    assert guard[num_pairs].isnan().all(), "written behind the last row"


@needs_compiler
@pytest.mark.parametrize(
    "code, kind, has_bias, groups, units",
    [
        (MX_UNITS, CLAMPED, True, 2, 2),
        (MX_UNITS, None, True, 4, 1),
        (FP8_UNITS, "silu", False, 2, 2),
        pytest.param(FP8_UNITS, None, False, 4, 1, marks=pytest.mark.slow),
        pytest.param(INT4, "silu", False, 2, 1, marks=pytest.mark.slow),
        pytest.param(Q4_K, None, False, 2, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_products_of_any_routing_on_an_emulated_device(
    code: Code, kind: Gate | None, has_bias: bool, groups: int, units: int
) -> None:
    """Inputs are no whole number of rounds, but for codes whose groups are as long as one."""
    experts, tile = 5, PackedTile(8, groups, units, stages=3, code=code)
    weights = filled(code, (experts, 160, 256 if code is INT4 else 224), is_gated=kind is not None)
    _, multiply = by_kernel("cpu")
    for index, counts in enumerate(counts_of_rows(tile.rows, experts)):
        check(weights, counts, tile, kind, has_bias=has_bias, num_sms=4 + 3 * index, multiply=multiply)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("rows", [8, 16, 32, 64])
@pytest.mark.parametrize("kind, has_bias", [("silu", False), (CLAMPED, True), (None, True), (None, False)], ids=str)
@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_products_of_any_routing_on_a_card(code: Code, kind: Gate | None, has_bias: bool, rows: int) -> None:
    experts, tile = 24, PackedTile(rows, *((2, 2) if kind else (4, 1)), code=code)
    _, multiply = by_kernel("cuda")
    for shape in ((1024, 2880), (320, 256)):
        weights = filled(code, (experts, *shape), is_gated=kind is not None, device="cuda")
        for counts in counts_of_rows(rows, experts):
            for num_sms in (132, 7):
                check(weights, counts, tile, kind, has_bias=has_bias, num_sms=num_sms, multiply=multiply)
