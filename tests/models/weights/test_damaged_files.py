"""Valid files, damaged at random: a reader returns or raises ModelError, and never takes much memory or time."""

from __future__ import annotations

import json
import math
import struct
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from tests.properties import examples

from twostroke.core.errors import ModelError
from twostroke.models.weights.gguf import open_gguf
from twostroke.models.weights.safetensors import open_safetensors
from twostroke.models.weights.tensor import WeightTensor

MAX_PEAK_BYTES = 8 << 20
MAX_SECONDS = 2.0
ABSURD = [0, 1, 2, 7, 8, 9, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]

Damage = Callable[[bytes], bytes]


def truncate(share: float) -> Damage:
    return lambda raw: raw[: int(share * len(raw))]


def overwrite(share: float, patch: bytes) -> Damage:
    def apply(raw: bytes) -> bytes:
        start = int(share * len(raw))
        return raw[:start] + patch + raw[start + len(patch) :]

    return apply


def insert(share: float, patch: bytes) -> Damage:
    def apply(raw: bytes) -> bytes:
        start = int(share * len(raw))
        return raw[:start] + patch + raw[start:]

    return apply


def flip(share: float, bit: int) -> Damage:
    def apply(raw: bytes) -> bytes:
        index = int(share * len(raw))
        return raw[:index] + bytes(byte ^ (1 << bit) for byte in raw[index : index + 1]) + raw[index + 1 :]

    return apply


def reset_number(share: float, value: int, width: int) -> Damage:
    """An absurd length, count, offset or type, where one may be."""
    return overwrite(share, struct.pack("<Q", value)[:width])


shares = st.floats(0, 1, exclude_max=True)
patches = st.binary(min_size=1, max_size=12)
damages = st.lists(
    st.one_of(
        st.builds(truncate, shares),
        st.builds(overwrite, shares, patches),
        st.builds(insert, shares, patches),
        st.builds(flip, shares, st.integers(0, 7)),
        st.builds(reset_number, shares, st.sampled_from(ABSURD), st.sampled_from([4, 8])),
    ),
    min_size=1,
    max_size=4,
)


def survives(raw: bytes, path: Path, reader: Callable[[Path], Mapping[str, WeightTensor]]) -> bool:
    """Whether the file is read; every tensor of it must then be readable too. Anything but a ModelError escapes."""
    path.write_bytes(raw)
    tracemalloc.start()
    started_s = time.process_time()
    try:
        tensors = reader(path)
        for tensor in tensors.values():
            assert tensor.to_float32().shape == tensor.shape
        return True
    except ModelError as error:
        assert len(str(error)) < 1000
        str(error).encode()
        return False
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < MAX_PEAK_BYTES
        assert time.process_time() - started_s < MAX_SECONDS


def quickly_and_often(drawn: dict[str, st.SearchStrategy[Any]], check: Callable[..., None]) -> tuple[Any, Any]:
    """The same test with few examples, and with many among the slow ones."""
    quick, often = (examples(count)(given(**drawn)(check)) for count in (100, 400))
    return quick, pytest.mark.slow(often)


def damaged_gguf(small_gguf: Path, tmp_path_factory: pytest.TempPathFactory, damage: list[Damage]) -> None:
    raw = small_gguf.read_bytes()
    for apply in damage:
        raw = apply(raw)
    survives(raw, tmp_path_factory.getbasetemp() / "damaged.gguf", lambda path: open_gguf(path).tensors)


def damaged_safetensors(
    small_safetensors: Path, tmp_path_factory: pytest.TempPathFactory, damage: list[Damage]
) -> None:
    raw = small_safetensors.read_bytes()
    for apply in damage:
        raw = apply(raw)
    if survives(raw, tmp_path_factory.getbasetemp() / "damaged.safetensors", open_safetensors):
        safetensors.deserialize(raw)  # what we accept, the format's own reader accepts


test_damaged_gguf, test_damaged_gguf_often = quickly_and_often({"damage": damages}, damaged_gguf)
test_damaged_safetensors, test_damaged_safetensors_often = quickly_and_often({"damage": damages}, damaged_safetensors)


@st.composite
def safetensors_headers(draw: st.DrawFn) -> tuple[dict[str, object], int]:
    """A header that is nearly always right, and the data's size: a few tensors, now and then one of them off."""
    header: dict[str, object] = {}
    position = 0
    for name in draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=3), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(["F32", "F16", "BF16"]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        num_bytes = math.prod(shape) * (4 if dtype == "F32" else 2)
        start = max(0, position + draw(st.sampled_from([0] * 12 + [-4, -2, 2])))
        end = start + num_bytes + draw(st.sampled_from([0] * 12 + [-2, 1, 4]))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        position += num_bytes
    return header, max(0, position + draw(st.sampled_from([0] * 8 + [-1, 1])))


def headers_are_accepted_when_the_formats_own_reader_accepts_them(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[dict[str, object], int]
) -> None:
    header = json.dumps(drawn[0]).encode()
    raw = struct.pack("<Q", len(header)) + header + bytes(drawn[1])
    try:
        safetensors.deserialize(raw)
        accepted = True
    except safetensors.SafetensorError:
        accepted = False
    assert survives(raw, tmp_path_factory.getbasetemp() / "drawn.safetensors", open_safetensors) == accepted


test_headers, test_headers_often = quickly_and_often(
    {"drawn": safetensors_headers()}, headers_are_accepted_when_the_formats_own_reader_accepts_them
)


@pytest.mark.parametrize("apart", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_absurd_number_at_every_place(small_gguf: Path, tmp_path: Path, apart: int) -> None:
    """Not at random: 8 bytes of the header in turn become the largest number there is, at each place when all the tests
    run. Fields are 4 and 8 bytes wide: every seventh place meets each of their bytes."""
    raw, path = small_gguf.read_bytes(), tmp_path / "damaged.gguf"
    header_bytes = len(raw) - sum(tensor.nbytes for tensor in open_gguf(small_gguf).tensors.values())
    outcomes = {
        survives(raw[:start] + b"\xff" * 8 + raw[start + 8 :], path, lambda path: open_gguf(path).tensors)
        for start in range(0, header_bytes - 8, apart)
    }
    assert outcomes == {True, False}
