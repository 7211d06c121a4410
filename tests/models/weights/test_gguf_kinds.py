"""A GGUF tensor of every kind, told wrongly: cut short, of widths that are no whole blocks, of sizes beyond any file,
and of bytes that mean no number. One sentence, or numbers as the `gguf` package has them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.models.weights.test_gguf import file_bytes, opened, tensor
from tests.models.weights.test_quantisation import assert_same_bits, oracle_dequantise, oracle_kind

from twostroke.core.errors import ModelError
from twostroke.models.weights.tensor import BLOCK_KINDS, WeightKind

ROWS = 3
KINDS = pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)


def of_kind(kind: WeightKind, width: int, data: bytes, rows: int = ROWS) -> bytes:
    return file_bytes(tensors=[tensor("t", (width, rows), oracle_kind(kind).value)], data=data)


@KINDS
def test_every_truncation_is_told(kind: WeightKind, tmp_path: Path) -> None:
    width = 2 * kind.block_values
    data = bytes(range(256)) * (kind.row_bytes(width) * ROWS // 256 + 1)
    data = data[: kind.row_bytes(width) * ROWS]
    whole = of_kind(kind, width, data)
    (found,) = opened(tmp_path, whole).tensors.values()
    assert found.kind is kind and found.shape == (ROWS, width) and found.data.tobytes() == data
    for missing in range(1, len(data) + 1, 5):
        with pytest.raises(ModelError) as caught:
            opened(tmp_path, whole[:-missing])
        assert "'t'" in str(caught.value) and "\n" not in str(caught.value)


@KINDS
@pytest.mark.parametrize("width", [0, 1, 2**31, 2**61, 2**64 - 1], ids=["none", "one", "2^31", "2^61", "all"])
def test_a_width_that_is_none(kind: WeightKind, width: int, tmp_path: Path) -> None:
    """One value more than whole blocks, where there are blocks; and more than a file can have."""
    if width == 1:
        width = kind.block_values + 1
    with pytest.raises(ModelError) as caught:
        opened(tmp_path, of_kind(kind, width, b"\0" * 4 * kind.block_bytes))
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


@KINDS
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("byte", [0x00, 0x7C, 0x7F, 0xFC, 0xFF])
def test_bytes_that_are_no_numbers_are_those_of_the_oracle(kind: WeightKind, byte: int, tmp_path: Path) -> None:
    """Infinities and what is not a number in scales, and the largest codes."""
    data = bytes([byte]) * kind.block_bytes * ROWS
    (found,) = opened(tmp_path, of_kind(kind, kind.block_values, data)).tensors.values()
    expected = oracle_dequantise(kind, np.frombuffer(data, np.uint8).reshape(ROWS, -1))
    assert_same_bits(found.to_float32(), expected)


def test_kinds_of_the_format_that_are_not_read_are_refused_by_name(tmp_path: Path) -> None:
    read = {oracle_kind(kind) for kind in BLOCK_KINDS}
    for kind in set(gguf.GGMLQuantizationType) - read:
        with pytest.raises(ModelError, match=kind.name):
            opened(tmp_path, file_bytes(tensors=[tensor("t", (256, 1), kind.value)], data=b"\0" * 2048))
    for number in (len(gguf.GGMLQuantizationType) + 100, 2**31, 2**32 - 1):
        with pytest.raises(ModelError, match=str(number)):
            opened(tmp_path, file_bytes(tensors=[tensor("t", (256, 1), number)], data=b"\0" * 2048))
