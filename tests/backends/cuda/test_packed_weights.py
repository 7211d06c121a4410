"""Twelve bits of a weight, by torch and by kernels, against an implementation of the same format in numpy that shares
nothing with either."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.backends.cuda import packed_reference
from tests.backends.cuda.packed_reference import pack, unpacked

from bench.packed_range import pack as numpy_pack
from twostroke.backends.cuda.kernels.packed_format import DEPTH, ROUND_BYTES, UNIT_ROWS, can_pack, packed_bytes
from twostroke.backends.cuda.kernels.packing import LEAST_EXPONENT, PackedMatrix, is_packable, pack_by_kernel


def packed(weight: torch.Tensor, *, is_gated: bool = False) -> PackedMatrix:
    """By torch, which kernels must agree with to the bit."""
    place, other = (PackedMatrix.empty(tuple(weight.shape), weight.device, is_gated=is_gated) for _ in range(2))
    for tensor in (place.data, place.factors, other.data, other.factors):
        tensor.view(torch.uint8).fill_(0xA5)  # nothing may stay as it was
    pack(weight, place)
    pack_by_kernel(weight, other)
    assert torch.equal(place.data, other.data) and torch.equal(place.factors, other.factors)
    return place


def expert(place: PackedMatrix, index: int) -> PackedMatrix:
    return PackedMatrix(place.data[index], place.factors[index], place.is_gated)


def from_numpy(weight: torch.Tensor) -> torch.Tensor:
    bits = weight.cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
    return torch.from_numpy(numpy_pack(bits)).to(torch.bfloat16)


def normal(*shape: int, device: str, scale: float = 0.02) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16).to(device)


def assert_same_bits(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.shape == expected.shape and ours.dtype == torch.bfloat16
    assert torch.equal(ours.cpu().contiguous().view(torch.int16), expected.cpu().contiguous().view(torch.int16))


@pytest.mark.parametrize("rows", [8, 64, 72, 192])
def test_a_matrix_is_what_numpy_packs(rows: int, device: str) -> None:
    weight = normal(rows, 256, device=device)
    weight[0, :3] = torch.tensor([2.0, 1e-9, -3e-8])  # next to a large weight small ones are rounded, or lost
    found = unpacked(packed(weight), rows)
    expected = from_numpy(weight)
    assert_same_bits(found, expected)
    changes = (found.float() - weight.float()).abs()
    assert changes[0, 1] > 0 and (changes.amax(1) <= weight.float().abs().amax(1) * 2**-22).all()


def test_every_exponent_and_mantissa_of_a_row_is_kept_or_rounded(device: str) -> None:
    """All finite numbers of bf16, each row with those of one exponent's neighbourhood."""
    mantissas = torch.arange(128)
    rows = []
    for largest in range(LEAST_EXPONENT, 255, 3):
        exponents = (largest - torch.arange(32)).clamp(min=0)  # twice the window, down to subnormal numbers
        bits = (exponents[:, None] << 7 | mantissas).flatten()
        rows.append(torch.where(bits % 3 == 0, bits | 0x8000, bits))
    bits = torch.stack(rows)[: len(rows) // 8 * 8].to(torch.int32)
    bits = torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16)
    weight = bits.view(torch.bfloat16).to(device)
    assert_same_bits(unpacked(packed(weight), len(weight)), from_numpy(weight))


def test_zeros_keep_their_sign_and_tiny_rows_stay_tiny(device: str) -> None:
    weight = torch.zeros(8, 128, dtype=torch.bfloat16, device=device)
    weight[1] = -0.0
    weight[2, 5] = 2.0**-130  # a subnormal number
    weight[3, 5] = 2.0**-100
    weight[4, 7] = -3.3e38
    found = unpacked(packed(weight), 8)
    assert_same_bits(found[[0, 1, 4]], weight[[0, 1, 4]])
    step = 2.0 ** (LEAST_EXPONENT - 14 - 127 - 7)
    assert ((found[2:4].float() - weight[2:4].float()).abs() <= step / 2).all()
    assert found[3, 5] == weight[3, 5]


def test_gates_and_ups_take_turns_and_come_back(device: str) -> None:
    weight = normal(2 * 40, 128, device=device)  # 80 rows: not a whole number of units
    place = packed(weight, is_gated=True)
    assert_same_bits(unpacked(place, 80), from_numpy(weight))
    largest = weight.float().abs().amax(1)
    exponents = torch.floor(torch.log2(largest))
    turns = torch.stack([exponents[:40].view(5, 8), exponents[40:].view(5, 8)], dim=1).flatten()
    assert torch.equal(torch.log2(place.factors[:80]), turns), "eight rows of the gate, then eight of the up matrix"


@pytest.mark.parametrize("slice_weights", [1, UNIT_ROWS * 128 * 3, 1 << 24])
@pytest.mark.parametrize("is_gated", [False, True])
def test_experts_are_packed_as_if_alone_in_slices_of_any_size(
    slice_weights: int, is_gated: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_reference, "_SLICE_WEIGHTS", slice_weights)
    weight = normal(3, 80, 128, device=device)
    place = packed(weight, is_gated=is_gated)
    assert place.data.shape == (3, 2, 2, ROUND_BYTES) and place.factors.shape == (3, 2 * UNIT_ROWS)
    for index in range(3):
        alone = packed(weight[index], is_gated=is_gated)
        assert torch.equal(place.data[index], alone.data) and torch.equal(place.factors[index], alone.factors)
        assert_same_bits(unpacked(expert(place, index), 80), from_numpy(weight[index]))


def test_rows_behind_the_last_are_zeros(device: str) -> None:
    place = packed(normal(72, 128, device=device))
    whole = unpacked(place, 2 * UNIT_ROWS)
    assert not whole[72:].count_nonzero() and place.factors.isfinite().all()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_weight_that_is_not_finite_shows_in_its_rows_factor(bad: float, device: str) -> None:
    weight = normal(2, 64, 128, device=device)
    weight[1, 17, 100] = bad
    is_finite = packed(weight).factors.isfinite()
    assert is_finite[0].all() and is_finite[1].sum() == 63 and not is_finite[1, 17]


def test_what_can_be_packed() -> None:
    assert can_pack((72, 256)) and can_pack((4, 80, 128), is_gated=True)
    assert not can_pack((72, 3 * DEPTH)), "an odd number of rounds"
    assert not can_pack((72, 200))
    assert not can_pack((60, 256))
    assert not can_pack((72, 256), is_gated=True)
    weight = torch.zeros(72, 256, dtype=torch.bfloat16)
    assert is_packable(weight, is_gated=False) and not is_packable(weight, is_gated=True)
    assert not is_packable(weight.to(torch.float16), is_gated=False)


def test_bytes_are_those_of_the_tensors(device: str) -> None:
    for rows, depth in ((64, 128), (72, 256), (8, 512)):
        place = PackedMatrix.empty((rows, depth), device)
        assert place.num_bytes == packed_bytes(rows, depth) == place.data.nbytes + place.factors.nbytes
    assert packed_bytes(4096, 4096) == 4096 * 4096 * 3 // 2 + 4096 * 4
