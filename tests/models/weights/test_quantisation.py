"""Each kind against the `gguf` package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from twostroke.models.weights.quantisation import SLAB_VALUES, dequantise, quantise
from twostroke.models.weights.tensor import BLOCK_KINDS, WeightKind

REPACKED = (WeightKind.Q8_0, WeightKind.Q4_0, WeightKind.Q4_1)


def oracle_kind(kind: WeightKind) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[kind.name]


def oracle_dequantise(kind: WeightKind, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data, oracle_kind(kind))


def assert_same_bits(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    """Equal to the bit; where a scale is nan, which nan does not matter."""
    assert found.dtype == expected.dtype == np.float32
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)
def test_block_sizes_are_the_formats(kind: WeightKind) -> None:
    assert (kind.block_values, kind.block_bytes) == gguf.GGML_QUANT_SIZES[oracle_kind(kind)]


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("error")
def test_dequantise_any_bytes_as_the_oracle_does(kind: WeightKind) -> None:
    data = np.random.default_rng(1).integers(0, 256, (50, 8 * kind.block_bytes), dtype=np.uint8)
    found = dequantise(kind, data)
    assert found.shape == (50, 8 * kind.block_values)
    assert_same_bits(found, oracle_dequantise(kind, data))


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)
def test_dequantise_over_several_slabs(kind: WeightKind) -> None:
    rows = 2 * SLAB_VALUES // 1024 + 3
    data = np.random.default_rng(2).integers(0, 256, (rows, kind.row_bytes(1024)), dtype=np.uint8)
    assert_same_bits(dequantise(kind, data), oracle_dequantise(kind, data))


def test_dequantise_rows_longer_than_a_slab_no_rows_and_strided_rows() -> None:
    long_row = np.random.default_rng(3).integers(0, 256, (2, WeightKind.Q8_0.row_bytes(SLAB_VALUES + 32)), np.uint8)
    assert_same_bits(dequantise(WeightKind.Q8_0, long_row), oracle_dequantise(WeightKind.Q8_0, long_row))
    assert dequantise(WeightKind.Q4_K, np.empty((0, 144), np.uint8)).shape == (0, 256)
    every_other = np.random.default_rng(4).integers(0, 256, (9, 40), np.uint8)[::2]
    assert_same_bits(dequantise(WeightKind.Q4_1, every_other), oracle_dequantise(WeightKind.Q4_1, every_other.copy()))


def test_dequantise_from_an_odd_address_gives_a_new_aligned_array() -> None:
    raw = np.random.default_rng(5).standard_normal(64).astype(np.float32)
    shifted = np.frombuffer(b"\0" + raw.tobytes(), dtype=np.uint8)[1:].reshape(2, 128)
    found = dequantise(WeightKind.F32, shifted)
    assert found.flags.aligned
    assert found.flags.writeable
    np.testing.assert_array_equal(found.ravel(), raw)


@pytest.mark.parametrize("kind", REPACKED, ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("error")
def test_quantise_as_the_oracle_does(kind: WeightKind) -> None:
    rng = np.random.default_rng(6)
    values = rng.standard_normal((200, 320)).astype(np.float32)
    values *= np.exp(4 * rng.standard_normal((200, 1))).astype(np.float32)
    values[0] = 0
    values[1] = 1.5
    values[2] = np.arange(320) % 16 - 8  # ties of rounding
    values[3] = -np.abs(values[3])
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(values, oracle_kind(kind))
    np.testing.assert_array_equal(quantise(kind, values), expected)


@pytest.mark.parametrize("kind", REPACKED, ids=lambda kind: kind.name)
def test_quantise_then_dequantise_is_near(kind: WeightKind) -> None:
    values = np.random.default_rng(7).standard_normal((1, SLAB_VALUES + 64)).astype(np.float32)  # more than a slab
    found = dequantise(kind, quantise(kind, values))
    step = {WeightKind.Q8_0: 1 / 127, WeightKind.Q4_0: 1 / 8, WeightKind.Q4_1: 2 / 15}[kind]
    largest = np.abs(values).reshape(-1, 32).max(axis=1, keepdims=True)
    # Q4_0 has no +8: a value opposite in sign to the largest may be a whole step away.
    assert (np.abs(found - values).reshape(-1, 32) <= 1.01 * step * largest).all()


@pytest.mark.parametrize("kind", REPACKED, ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("error")
def test_quantise_of_numbers_too_small_for_a_scale_is_near_zero(kind: WeightKind) -> None:
    values = np.full((1, 32), 1e-44, dtype=np.float32)
    values[0, ::2] = -1e-44
    assert np.abs(dequantise(kind, quantise(kind, values))).max() == 0


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="no whole number of Q4_1 blocks"):
        dequantise(WeightKind.Q4_1, np.zeros((1, 21), np.uint8))
    with pytest.raises(ValueError, match="not a multiple of Q8_0's 32"):
        quantise(WeightKind.Q8_0, np.zeros((1, 31), np.float32))
    with pytest.raises(ValueError, match="no quantiser to Q6_K"):
        quantise(WeightKind.Q6_K, np.zeros((1, 256), np.float32))
