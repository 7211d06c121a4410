"""The GGUF reader against the `gguf` package on valid files, and file by file on hostile ones."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.tiny_gguf import add_key
from tests.properties import examples

from twostroke.core.errors import ModelError
from twostroke.models.weights import gguf as own
from twostroke.models.weights.gguf import open_gguf
from twostroke.models.weights.tensor import WeightKind

U8, BOOL, STRING, ARRAY, U32 = 0, 7, 8, 9, 4


def text(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key_value(key: bytes | str, value_type: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", value_type) + payload


def tensor(name: bytes | str = "t", shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def file_bytes(
    key_values: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    key_values, tensors = key_values or [], tensors or []
    num_tensors, num_key_values = counts or (len(tensors), len(key_values))
    header = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_key_values) + b"".join(key_values + tensors)
    return header + b"\0" * (-len(header) % alignment) + data


def opened(folder: Path, raw: bytes) -> own.GGUFFile:
    path = folder / "file.gguf"
    path.write_bytes(raw)
    return open_gguf(path)


def test_metadata_and_tensors_as_the_oracle_reads_them(small_gguf: Path) -> None:
    found, oracle = open_gguf(small_gguf), gguf.GGUFReader(small_gguf)
    expected = {key: field.contents() for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert dict(found.metadata) == expected
    assert [type(found.metadata[key]) for key in expected] == [type(value) for value in expected.values()]
    assert list(found.tensors) == [entry.name for entry in oracle.tensors]
    for entry in oracle.tensors:
        mine = found.tensors[entry.name]
        assert mine.name == entry.name
        assert mine.kind.name == entry.tensor_type.name
        assert mine.shape == tuple(reversed(entry.shape.tolist()))
        assert mine.data.tobytes() == entry.data.tobytes()
        assert not mine.data.flags.writeable
    assert found.tensors["cube"].data.shape == (6, 10)
    assert found.tensors["vector"].data.shape == (1, 28)


@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType, ids=lambda kind: kind.name)
def test_every_kind_that_the_format_has_is_read_or_refused_by_name(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    values, size = gguf.GGML_QUANT_SIZES[kind]
    raw = file_bytes(tensors=[tensor(shape=(values,), kind=int(kind))], data=bytes(size))
    if kind in gguf.quants._type_traits or kind.name in ("F32", "F16"):  # those that the package can dequantise
        assert opened(tmp_path, raw).tensors["t"].kind.name == kind.name
    else:
        with pytest.raises(ModelError, match=f"tensor 't' is stored as kind {kind.name}, which is not read"):
            opened(tmp_path, raw)


@examples(60)
@given(
    values=st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=12),
        st.one_of(
            st.text(st.characters(codec="utf-8")),
            st.booleans(),
            st.lists(st.text(st.characters(codec="utf-8")), min_size=1, max_size=8),
            st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8),
            st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8),
        ),
        max_size=6,
    )
)
def test_whatever_the_writer_writes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, object]
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    written = {f"test.{key}": value for key, value in values.items() if value != ""}  # the writer drops empty strings
    for key, value in written.items():
        add_key(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert dict(open_gguf(path).metadata) == {"general.architecture": "llama"} | written


def test_alignment_of_the_file_is_respected(tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    arrays = {f"t{index}": np.arange(index + 1, dtype=np.float32) for index in range(4)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_gguf(path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found.tensors[name].to_float32(), array)


def test_version_2_and_nested_arrays(tmp_path: Path) -> None:
    inner = struct.pack("<IQ", U8, 2) + bytes([1, 2])
    nested = struct.pack("<IQ", ARRAY, 2) + inner + struct.pack("<IQ", STRING, 1) + text("x")
    found = opened(tmp_path, file_bytes([key_value("k", ARRAY, nested)], version=2))
    assert found.version == 2
    assert found.metadata["k"] == [[1, 2], ["x"]]


def test_the_real_model_opens_fast_and_equals_the_oracle(smollm2_path: Path) -> None:
    elapsed_s = []
    for _ in range(3):
        started_s = time.process_time()
        found = open_gguf(smollm2_path)
        elapsed_s.append(time.process_time() - started_s)
    assert min(elapsed_s) < 0.5  # 0.04 s on an idle core
    assert len(found.metadata["tokenizer.ggml.tokens"]) == found.metadata["llama.vocab_size"] == 49152
    oracle = gguf.GGUFReader(smollm2_path)
    assert found.metadata["tokenizer.ggml.merges"] == oracle.fields["tokenizer.ggml.merges"].contents()
    assert found.tensors.keys() == {entry.name for entry in oracle.tensors}
    for entry in oracle.tensors:
        mine = found.tensors[entry.name]
        assert mine.shape == tuple(reversed(entry.shape.tolist()))
        if entry.name.startswith("blk.") and not entry.name.startswith(("blk.0.", "blk.29.")):
            continue  # the layers between are laid out alike
        expected = gguf.quants.dequantize(entry.data, entry.tensor_type).reshape(mine.shape)
        np.testing.assert_array_equal(mine.to_float32().view(np.uint32), expected.view(np.uint32))


F32_DATA = bytes(32)
HUGE = 2**63

HOSTILE = {
    "not gguf": (b"PK\x03\x04" + bytes(40), r"is not a GGUF file: it begins with b'PK\\x03\\x04'"),
    "tiny": (b"GGUF", "truncated or corrupt: the header needs at least 8 bytes, and the file holds 4 bytes"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (file_bytes(version=1), "GGUF version 1; versions 2 and 3 are read"),
    "version 0": (file_bytes(version=0), "GGUF version 0"),
    "key-value count": (file_bytes(counts=(0, HUGE)), f"a list of {HUGE} key-values needs at least"),
    "tensor count": (file_bytes(counts=(HUGE, 0)), f"a list of {HUGE} tensors needs at least"),
    "key length": (file_bytes([struct.pack("<Q", 2**64 - 1) + bytes(9)]), "name of key 0 needs at least"),
    "bad key": (file_bytes([key_value(b"\xff\xfe", U8, b"\1")]), "the name of key 0 is not valid UTF-8: b'.xff.xfe'"),
    "duplicate key": (file_bytes([key_value("k", U8, b"\1")] * 2), "the key 'k' occurs twice"),
    "unknown type": (file_bytes([key_value("k", 13, bytes(8))]), "value of 'k' has the unknown type 13"),
    "unknown item type": (
        file_bytes([key_value("k", ARRAY, struct.pack("<IQ", 99, 1))]),
        "value of 'k' is an array of the unknown type 99",
    ),
    "bool of 2": (file_bytes([key_value("k", BOOL, b"\2")]), "should be 0 or 1"),
    "bad string": (file_bytes([key_value("k", STRING, text(b"\x80"))]), "value of 'k' is not valid UTF-8"),
    "bad token": (
        file_bytes([key_value("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text(b"\xc3"))]),
        "item 1 of the value of 'k' is not valid UTF-8: b'.xc3'",
    ),
    "string count": (
        file_bytes([key_value("k", ARRAY, struct.pack("<IQ", STRING, HUGE))]),
        f"a list of {HUGE} items in the value of 'k' needs",
    ),
    "number count": (
        file_bytes([key_value("k", ARRAY, struct.pack("<IQ", U8, HUGE))]),
        f"a list of {HUGE} items in the value of 'k' needs",
    ),
    "token length": (
        file_bytes([key_value("k", ARRAY, struct.pack("<IQQ", STRING, 1, HUGE))]),
        "item 0 of the value of 'k' needs at least",
    ),
    "strings run out": (
        file_bytes([key_value("k", ARRAY, struct.pack("<IQQ", STRING, 2, 5) + bytes(11))], alignment=1),
        "item 1 of the value of 'k' needs at least",
    ),
    "deep arrays": (
        file_bytes([key_value("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 50)]),
        "nests arrays more than 4 deep",
    ),
    "alignment of 48": (
        file_bytes([key_value("general.alignment", U32, struct.pack("<I", 48))]),
        "general.alignment must be a power of two, not 48",
    ),
    "alignment of 0": (
        file_bytes([key_value("general.alignment", U32, struct.pack("<I", 0))]),
        "general.alignment must be a power of two",
    ),
    "alignment as text": (
        file_bytes([key_value("general.alignment", STRING, text("32"))]),
        "general.alignment must be a power of two, not '32'",
    ),
    "a split model": (
        file_bytes([key_value("split.count", U32, struct.pack("<I", 3))]),
        "one part of a model split in 3 GGUF files",
    ),
    "bad tensor name": (file_bytes(tensors=[tensor(b"\xff")], data=F32_DATA), "name of tensor 0 is not valid UTF-8"),
    "duplicate tensor": (file_bytes(tensors=[tensor()] * 2, data=F32_DATA), "the tensor 't' occurs twice"),
    "no dimensions": (file_bytes(tensors=[tensor(shape=())], data=F32_DATA), "tensor 't' has 0 dimensions"),
    "five dimensions": (file_bytes(tensors=[tensor(shape=(1,) * 5)]), "tensor 't' has 5 dimensions; 1 to 4"),
    "many dimensions": (
        file_bytes(tensors=[text("t") + struct.pack("<I", 2**32 - 1) + bytes(20)]),
        "has 4294967295 dimensions",
    ),
    "empty dimension": (file_bytes(tensors=[tensor(shape=(8, 0))]), "tensor 't' has an empty shape"),
    "kind not read": (file_bytes(tensors=[tensor(kind=15)]), "tensor 't' is stored as kind Q8_K, which is not read"),
    "kind unknown": (file_bytes(tensors=[tensor(kind=777)]), "tensor 't' is stored as kind number 777"),
    "part of a block": (
        file_bytes(tensors=[tensor(shape=(33,), kind=3)]),
        "tensor 't' has rows of 33 values, not a multiple of Q4_1's block of 32",
    ),
    "shape overflow": (
        file_bytes(tensors=[tensor(shape=(2**32, 2**32, 2**32, 2**32))], data=F32_DATA),
        "tensor 't' ends at byte 1361129467683753853853498429727072845",
    ),
    "misaligned": (file_bytes(tensors=[tensor(offset=8)], data=bytes(64)), "begins at offset 8, not a multiple of"),
    "offset beyond": (
        file_bytes(tensors=[tensor(offset=2**40)], data=F32_DATA),
        "tensor 't' ends at byte 1099511627872, and the file holds 96 bytes",
    ),
    "overlap": (
        file_bytes(tensors=[tensor("a", (16,)), tensor("b", (8,), offset=32)], data=bytes(64)),
        "tensors 'a' and 'b' overlap",
    ),
    "truncated data": (
        file_bytes(tensors=[tensor()], data=bytes(31)),
        "truncated or corrupt: tensor 't' ends at byte 96, and the file holds 95 bytes",
    ),
}


@pytest.mark.parametrize(("raw", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files_get_a_clear_error(tmp_path: Path, raw: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        opened(tmp_path, raw)


def test_the_builder_of_hostile_files_builds_valid_ones(tmp_path: Path) -> None:
    """So that the cases above fail for the reason they name."""
    data = np.arange(16, dtype=np.float32)
    found = opened(
        tmp_path,
        file_bytes(
            [key_value("k", STRING, text("v"))],
            [tensor("a"), tensor("b", (4, 2), offset=32)],
            data.tobytes(),
        ),
    )
    assert found.metadata == {"k": "v"}
    np.testing.assert_array_equal(found.tensors["b"].to_float32(), data[8:].reshape(2, 4))
    assert found.tensors["a"].kind is WeightKind.F32


def test_header_of_absurd_size_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "MAX_HEADER_BYTES", 1000)
    raw = file_bytes([key_value("k", ARRAY, struct.pack("<IQ", U8, 5000) + bytes(5000))])
    with pytest.raises(ModelError, match="a GGUF header of more than 1000 bytes is not read"):
        opened(tmp_path, raw)


@pytest.mark.parametrize("apart", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_truncation_gives_the_bytes_expected_and_found(small_gguf: Path, tmp_path: Path, apart: int) -> None:
    whole = small_gguf.read_bytes()
    tensors = open_gguf(small_gguf).tensors.values()
    last = max(tensors, key=lambda entry: entry.data.ctypes.data)  # behind it is only padding
    used_bytes = whole.rindex(last.data.tobytes()) + last.nbytes
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:used_bytes])
    assert open_gguf(path).tensors.keys() == open_gguf(small_gguf).tensors.keys()
    for size in reversed(range(1, used_bytes, apart)):
        os.truncate(path, size)
        with pytest.raises(ModelError, match=f"holds {size} bytes"):
            open_gguf(path)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot open .*absent\.gguf: No such file"):
        open_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="is not a regular file"):
        open_gguf(tmp_path)
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelError, match="is empty: it holds 0 bytes"):
        open_gguf(tmp_path / "empty.gguf")
    with pytest.raises(ModelError, match="null"):
        open_gguf(Path("a\0b"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match="is not a regular file"):
        open_gguf(tmp_path / "pipe.gguf")
