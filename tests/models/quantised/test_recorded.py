"""Our reading of packed matrices against what the packages that packed them make of them, bit by bit. `record.py` says
how the tensors were made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from twostroke.models.quantised.scheme import Layout, MatrixScheme, Strategy
from twostroke.models.weights.safetensors import RawTensor, read_safetensors
from twostroke.models.weights.stored_layouts import read_stored
from twostroke.models.weights.stored_module import Stored

RECORDED = Path(__file__).with_name("recorded.safetensors")
PACKED, GROUP, CHANNEL = Layout.PACKED_INTEGERS, Strategy.GROUP, Strategy.CHANNEL
SCHEMES = {
    "ct_int4": MatrixScheme(PACKED, 4, GROUP, 32),
    "ct_int4_asym": MatrixScheme(PACKED, 4, GROUP, 32, is_symmetric=False),
    "ct_int8_packed": MatrixScheme(PACKED, 8, GROUP, 32),
    "ct_int8_packed_asym": MatrixScheme(PACKED, 8, GROUP, 32, is_symmetric=False),
    "ct_int8": MatrixScheme(Layout.PLAIN_INTEGERS, 8, CHANNEL),
    "ct_fp8": MatrixScheme(Layout.FLOATS_OF_8, 8, CHANNEL),
    "ct_fp8_tensor": MatrixScheme(Layout.FLOATS_OF_8, 8, Strategy.TENSOR),
    "ct_nvfp4": MatrixScheme(Layout.PACKED_FP4, 4, GROUP, 16),
    "ct_mxfp4": MatrixScheme(Layout.PACKED_FP4, 4, GROUP, 32),
    "gptq": MatrixScheme(Layout.GPTQ, 4, GROUP, 32, is_symmetric=False, zeros_less_one=True),
    "gptq_order": MatrixScheme(Layout.GPTQ, 4, GROUP, 32, is_symmetric=False, has_order=True, zeros_less_one=True),
    "awq": MatrixScheme(Layout.AWQ, 4, GROUP, 32, is_symmetric=False),
}


def recorded_parts(name: str) -> dict[str, RawTensor]:
    raw = {tensor.partition(".")[::2]: value for tensor, value in read_safetensors(RECORDED).items()}
    return {part: value for (owner, part), value in raw.items() if owner == name and part != "expected"}


def test_every_recorded_matrix_is_tried() -> None:
    assert {name.partition(".")[0] for name in load_file(RECORDED)} == SCHEMES.keys()


@pytest.mark.parametrize("name", SCHEMES)
def test_as_the_package_that_packed_it(name: str) -> None:
    """Packages multiply in the scales' own type: what we have in float32 is rounded to it once, as theirs was."""
    found = torch.from_numpy(read_stored(Stored("file", name, recorded_parts(name), SCHEMES[name])).to_float32())
    expected = load_file(RECORDED)[f"{name}.expected"]
    assert torch.equal(found.to(expected.dtype), expected)


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_are_those_of_the_whole(name: str) -> None:
    tensor = read_stored(Stored("file", name, recorded_parts(name), SCHEMES[name]))
    whole = tensor.to_float32()
    for start, stop in ((0, 32), (0, 1), (5, 17), (8, 16), (31, 32)):
        piece = tensor.rows(start, stop)
        assert piece.shape == (stop - start, whole.shape[1])
        np.testing.assert_array_equal(piece.to_float32(), whole[start:stop])
        np.testing.assert_array_equal(piece.rows(0, 1).to_float32(), whole[start : start + 1])
        np.testing.assert_array_equal(tensor.parts().rows(start, stop).to_float32(), whole[start:stop])
