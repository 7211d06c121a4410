"""The 12-bit packing that is measured, against torch's bf16 and by hand-made rows."""

import json

import numpy as np
import pytest
import torch

from bench.packed_range import measure, pack, to_bf16, to_float32
from bench.weight_files import matrices


def row(*values):
    return np.array([values], dtype=np.float32)


def packed(*values):
    return pack(to_bf16(row(*values)))[0].tolist()


def test_rounding_to_bf16_is_torchs():
    values = np.random.default_rng(1).integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32)
    values = values[np.abs(values) < 3e38].reshape(1, -1)  # neither NaN nor what rounds to infinity
    assert np.array_equal(to_float32(to_bf16(values)), torch.from_numpy(values).bfloat16().float().numpy())


def test_fifteen_binades_and_zero_are_held_exactly():
    values = [1.9921875, -1.0, 0.0, 255 / 128 * 2.0**-14, -(2.0**-14)]
    assert packed(*values) == values


def test_below_the_window_weights_are_rounded_on_a_grid():
    step = 2.0**-21  # of a row whose largest binade is that of 1
    assert packed(1.5, 126 * step, -3 * step)[1:] == [126 * step, -3 * step]
    assert packed(1.5, 2.75 * step, 2.5 * step, -0.5 * step)[1:] == [3 * step, 2 * step, 0.0]
    assert packed(1.5, 127.5 * step)[1] == 2.0**-14  # the upmost tie: the first value that has a code


def test_rows_of_bf16s_smallest_numbers_are_held_exactly():
    assert packed(2.0**-112, 2.0**-133) == [2.0**-112, 2.0**-133]
    assert packed(2.0**-130, -(2.0**-133)) == [2.0**-130, -(2.0**-133)]
    assert packed(0.0, 0.0) == [0.0, 0.0]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_no_change_is_larger_than_two_to_the_minus_22_of_the_row(scale):
    generator = np.random.default_rng(2)
    values = generator.standard_normal((64, 512)) * np.exp2(generator.integers(-24, 1, (64, 512))) * scale
    bits = to_bf16(values.astype(np.float32))
    weights, held = to_float32(bits), pack(bits)
    change = np.abs(held.astype(np.float64) - weights)
    assert 0 < (change / np.abs(weights).max(axis=1, keepdims=True)).max() <= 2.0**-22
    assert np.array_equal(to_float32(to_bf16(held)), held)


def test_counts_of_a_row():
    found = measure("", row(1.5, 2.75 * 2.0**-21, 0.25 * 2.0**-21, 0.0))
    assert (found.num_weights, found.num_changed, found.num_lost, found.num_zeros) == (4, 2, 1, 1)
    assert found.largest_change == pytest.approx(2.0**-23 / 1.5)
    assert found.exponent_bits == 2.0


def test_a_row_of_zeros_has_no_outlier():
    assert measure("", np.zeros((2, 8), dtype=np.float32)).largest_weight == 0.0


def test_matrices_of_safetensors_pass_over_vectors_and_integers(tmp_path):
    data = {"w": ("BF16", [2, 1], b"\x80\x3f\x00\xc0"), "b": ("F32", [1], bytes(4)), "ids": ("I64", [1, 1], bytes(8))}
    header, at = {}, 0
    for name, (kind, shape, content) in data.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + len(content)]}
        at += len(content)
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(content for _, _, content in data.values()))
    assert [(name, kind, values.tolist()) for name, kind, values in matrices(path)] == [("w", "BF16", [[1.0], [-2.0]])]
