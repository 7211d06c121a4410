"""Weights in eight and four bits: that what was put there is what is found there, that quantising leaves no more error
than the bits make it leave, and that kernels which quantise and dequantise agree with plain torch."""

from __future__ import annotations

import pytest
import torch

from twostroke.backends.cuda.kernels.eight_bits import E4M3, EightBitMatrix, quantise_rows, stored_order
from twostroke.backends.cuda.kernels.four_bits import FourBitMatrix, dequantise_into, quantised_by_groups
from twostroke.backends.cuda.kernels.packed_format import FOUR_BITS, FP8, INT4, Code
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.matrix import LowBitMatrix, empty_low_bit

SHAPES = [(144, 576), (64, 128), (208, 256)]
"""Rows that are no whole number of units, inputs that are no whole number of rounds."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp2(torch.randint(-4, 5, (shape[0], 1), generator=generator).float())
    return (torch.randn(shape, generator=generator) * rows * shape[-1] ** -0.5).to(torch.bfloat16)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_float8_is_found_as_it_was_put(shape: tuple[int, int], is_gated: bool, device: str) -> None:
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    codes[(codes & 0x7F) == 0x7F] = 0  # not a number
    scales = torch.rand(shape[0], device=device) + 0.5
    form = EightBitMatrix.empty(shape, device, is_gated=is_gated)
    form.put(codes, scales)
    assert torch.equal(form.dequantised(), codes.view(E4M3).float() * scales[:, None])
    assert not form.data[:, stored_order(form.data.shape[1], form.data.device) >= shape[1]].any(), "padding is zeros"
    halves = scales.view(2, -1, 8) if is_gated else scales.view(1, -1, 8)
    assert torch.equal(form.factors[: shape[0]], halves.transpose(0, 1).flatten()), "gates and ups in turns of eight"


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("code", FOUR_BITS, ids=lambda code: code.name)
def test_four_bits_are_found_as_they_were_put(code: Code, shape: tuple[int, int], is_gated: bool, device: str) -> None:
    torch.manual_seed(1)
    numbers = torch.randint(0, 16, shape, dtype=torch.uint8, device=device)
    groups = -(-shape[1] // code.group)
    scales = (torch.rand(shape[0], groups, device=device) * 0.01).to(torch.bfloat16).float()
    offsets = (torch.randn(shape[0], groups, device=device) * 0.01).to(torch.bfloat16).float()
    form = FourBitMatrix.empty(shape, code, device, is_gated=is_gated)
    form.put(numbers, scales, offsets if code.has_offsets else None)
    of_input = torch.arange(shape[1], device=device) // code.group
    offset = offsets[:, of_input] if code.has_offsets else -8 * scales[:, of_input]
    expected = (numbers * scales[:, of_input] + offset).to(torch.bfloat16).float()
    assert torch.equal(form.dequantised(), expected)
    out = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
    dequantise_into(form, out)
    assert torch.equal(out.float(), expected)


@pytest.mark.parametrize("code", [FP8, *FOUR_BITS], ids=lambda code: code.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_those_of_the_tensors(code: Code, shape: tuple[int, int]) -> None:
    for is_gated in (False, True):
        product = Product("gated", shape[0] // 2, shape[1]) if is_gated else Product("plain", *shape)
        form = empty_low_bit(product, code, torch.device("cpu"))
        assert form.num_bytes == code.num_bytes(shape)


def quantised(weight: torch.Tensor, code: Code) -> LowBitMatrix:
    form = empty_low_bit(Product("plain", *weight.shape), code, weight.device)
    form.quantise(weight)
    return form


def test_quantising_leaves_what_the_bits_leave(device: str) -> None:
    weight = normal(256, 1024).to(device)
    weight[3] = 0.0
    eight, four = (quantised(weight, code).dequantised() for code in (FP8, INT4))
    assert relative_error(eight, weight) < 0.028 and relative_error(four, weight) < 0.11
    assert not eight[3].any() and not four[3].any()


def test_every_number_that_float8_has_stays_as_it_is(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes[(codes & 0x7F) != 0x7F].view(E4M3).float()
    weight = torch.cat([numbers, numbers[:2]])[None, :].repeat(8, 1).to(torch.bfloat16).to(device)
    found = quantised(weight, FP8)
    assert torch.equal(found.dequantised(), weight.float())


def test_a_clip_is_looked_for_that_leaves_less_error() -> None:
    """One large weight among small ones: to keep it whole costs all others."""
    weight = normal(64, 256, seed=3).float()
    weight[:, 5] *= 6
    numbers, scales = quantised_by_groups(weight, 128)
    found = (numbers.float() - 8) * scales.repeat_interleave(128, 1)
    plain_scales = weight.view(64, 2, 128).abs().amax(-1) / 7
    wide = plain_scales.repeat_interleave(128, 1)
    plain = (weight / wide).round().clamp(-8, 7) * wide
    assert (found - weight).square().sum() < 0.97 * (plain - weight).square().sum()
    groups = (found - weight).view(64, 2, 128).square().sum(-1), (plain - weight).view(64, 2, 128).square().sum(-1)
    assert (groups[0] <= groups[1] * 1.02).all(), "no group is worse, but for its scale's rounding"


@pytest.mark.parametrize("width", [128, 576])
def test_rows_are_brought_to_float8(width: int, device: str) -> None:
    torch.manual_seed(width)
    x = (torch.randn(5, width) * torch.tensor([1.0, 1e-3, 300.0, 0.0, 7.0])[:, None]).to(torch.bfloat16).to(device)
    padded = FP8.rounds(width) * FP8.depth
    out = torch.full((5, padded), 0xA5, dtype=torch.uint8, device=device)
    scales = torch.full((5,), float("nan"), device=device)
    quantise_rows(x, out, scales)
    order = torch.argsort(stored_order(padded, out.device))
    in_order = out[:, order].view(E4M3).float()
    assert not in_order[:, width:].any() and not in_order[3].any()
    largest = x.float().abs().amax(1)
    assert torch.allclose(scales, torch.clamp(largest / 448.0, min=2.0**-100))
    expected = (x.float() / scales[:, None]).to(E4M3).float()
    assert torch.equal(in_order[:, :width], expected)
