"""The safetensors reader against the `safetensors` package on valid files, and file by file on hostile ones."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from twostroke.core.errors import ModelError
from twostroke.models.weights import safetensors as own
from twostroke.models.weights.safetensors import open_folder, open_safetensors


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file_bytes(header: Any, data: bytes = bytes(8)) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def test_tensors_as_the_oracle_reads_them(small_safetensors: Path) -> None:
    found, oracle = open_safetensors(small_safetensors), load_file(small_safetensors)
    assert found.keys() == oracle.keys()
    for name, expected in oracle.items():
        mine = found[name]
        assert mine.name == name
        assert mine.shape == tuple(expected.shape)
        assert {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[mine.kind.name] == expected.dtype
        assert not mine.data.flags.writeable
        np.testing.assert_array_equal(mine.to_float32(), expected.float().numpy())
    assert found["cube.bf16"].data.shape == (6, 8)
    assert found["vector.f16"].data.shape == (1, 14)
    assert found["scalar"].data.shape == (1, 4)


HOSTILE = {
    "tiny": (b"\x01\0\0", "takes 8 bytes at least, and it holds 3"),
    "header length": (struct.pack("<Q", 2**63) + b"{}", f"its header claims {2**63} bytes, and at most 100000000"),
    "header cut": (struct.pack("<Q", 50) + b"{}", "its header ends at byte 58, and it holds 10 bytes"),
    "header of nothing": (file_bytes(b""), "header is not valid JSON"),
    "bad UTF-8": (file_bytes(b'{"\xff": 1}'), "header is not valid UTF-8 at byte 2"),
    "not JSON": (file_bytes(b"{nothing}"), "header is not valid JSON"),
    "nan": (file_bytes(b'{"t": NaN}'), "NaN is not JSON"),
    "not an object": (file_bytes([1]), "header is not a JSON object"),
    "deep": (file_bytes(b"[" * 200_000), "header cannot be read"),
    "endless number": (file_bytes(b'{"t": ' + b"9" * 10_000 + b"}"), "header cannot be read"),
    "duplicate": (
        file_bytes(b'{"t": ' + json.dumps(entry()).encode() + b', "t": ' + json.dumps(entry()).encode() + b"}"),
        "the key 't' occurs twice",
    ),
    "surrogate name": (file_bytes({"\ud800": entry()}), "is not valid Unicode"),
    "not a tensor": (file_bytes({"t": 5}), "tensor 't' must have dtype, shape and data_offsets"),
    "no dtype": (file_bytes({"t": {"shape": [2], "data_offsets": [0, 8]}}), "tensor 't' must have dtype"),
    "other dtype": (file_bytes({"t": entry(dtype="I64")}), "tensor 't' is stored as 'I64', which is not read"),
    "odd dtype": (file_bytes({"t": entry(dtype=["F32"])}), r"tensor 't' is stored as \['F32'\]"),
    "shape of text": (file_bytes({"t": entry(shape="2")}), "tensor 't' has the shape '2'"),
    "negative": (file_bytes({"t": entry(shape=[-2])}), r"tensor 't' has the shape \[-2\]"),
    "fraction": (file_bytes({"t": entry(shape=[2.0])}), r"tensor 't' has the shape \[2.0\]"),
    "bool": (file_bytes({"t": entry(shape=[True, 2])}), "tensor 't' has the shape"),
    "many dimensions": (file_bytes({"t": entry(shape=[2**62] * 100_000)}), "tensor 't' has the shape"),
    "overflow": (file_bytes({"t": entry(shape=[2**40] * 4)}), "takes .* bytes, not 8"),
    "size": (file_bytes({"t": entry(shape=[3])}), r"tensor 't' of shape \[3\] takes 12 bytes, not 8"),
    "backwards": (file_bytes({"t": entry(offsets=[8, 0])}), "tensor 't' has the data_offsets"),
    "one offset": (file_bytes({"t": entry(offsets=[0])}), "tensor 't' has the data_offsets"),
    "beyond the end": (file_bytes({"t": entry([4], [0, 16])}), "tensors take 16 bytes after the header, and 8 are"),
    "overlap": (
        file_bytes({"a": entry(), "b": entry([1], [4, 8])}),
        "tensor 'a' and tensor 'b' overlap",
    ),
    "hole": (file_bytes({"t": entry([1], [4, 8])}), "the header and tensor 't' have a hole between them"),
    "rest": (file_bytes({"t": entry()}, bytes(11)), "3 bytes at its end belong to no tensor"),
}


@pytest.mark.parametrize(("raw", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files_get_a_clear_error(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=message) as caught:
        open_safetensors(path)
    assert len(str(caught.value)) < 1000
    str(caught.value).encode()  # printable: no lone surrogate from the file


def test_the_builder_of_hostile_files_builds_valid_ones(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes({"__metadata__": {"a": "b"}, "t": entry()}, np.float32([1, 2]).tobytes()))
    np.testing.assert_array_equal(open_safetensors(path)["t"].to_float32(), [1, 2])


def test_every_truncation_is_refused(small_safetensors: Path, tmp_path: Path) -> None:
    whole, path = small_safetensors.read_bytes(), tmp_path / "cut.safetensors"
    path.write_bytes(whole)
    for size in reversed(range(1, len(whole))):
        os.truncate(path, size)
        with pytest.raises(ModelError, match="truncated"):
            open_safetensors(path)


# Folders


def write_shards(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5), "c": torch.randn(2, 2)}
    save_file({"a": tensors["a"], "b": tensors["b"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"c": tensors["c"]}, folder / "model-00002-of-00002.safetensors")
    weight_map = dict.fromkeys(("a", "b"), "model-00001-of-00002.safetensors") | {
        "c": "model-00002-of-00002.safetensors"
    }
    write_index(folder, {"metadata": {"total_size": 84}, "weight_map": weight_map})
    return tensors


def write_index(folder: Path, index: Any) -> None:
    (folder / own.INDEX_FILE).write_text(json.dumps(index))


def test_a_folder_of_one_file(small_safetensors: Path) -> None:
    assert open_folder(small_safetensors.parent).keys() == open_safetensors(small_safetensors).keys()


def test_a_sharded_folder(tmp_path: Path) -> None:
    expected = write_shards(tmp_path)
    found = open_folder(tmp_path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name].to_float32(), tensor.numpy())


def test_shards_may_be_links_as_in_the_hubs_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    expected = write_shards(blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("..") / "blobs" / file.name)
    assert open_folder(snapshot).keys() == expected.keys()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks the shard 'model-00002-of-00002\.safetensors'"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "..",
        "a/b.safetensors",
        "a\\b.safetensors",
        "C:x.safetensors",
    ],
)
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    write_index(folder, {"weight_map": {"a": shard}})
    with pytest.raises(ModelError, match=r"a plain \.safetensors name is needed"):
        open_folder(folder)


@pytest.mark.parametrize("shard", ["a\0.safetensors", "model.bin", "", 7, None, ["a"], {"a": 1}])
def test_a_shard_that_is_no_file_name_is_refused(tmp_path: Path, shard: Any) -> None:
    write_index(tmp_path, {"weight_map": {"a": shard}})
    with pytest.raises(ModelError, match=r"a plain \.safetensors name is needed"):
        open_folder(tmp_path)


def test_an_unprintable_shard_name_is_escaped(tmp_path: Path) -> None:
    write_index(tmp_path, {"weight_map": {"a": "\ud800.safetensors"}})
    with pytest.raises(ModelError, match="lacks the shard") as caught:
        open_folder(tmp_path)
    str(caught.value).encode()


def test_bad_indexes_are_refused(tmp_path: Path) -> None:
    for index in ({}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": "x"}):
        write_index(tmp_path, index)
        with pytest.raises(ModelError, match="has no weight_map"):
            open_folder(tmp_path)
    (tmp_path / own.INDEX_FILE).write_bytes(b"{")
    with pytest.raises(ModelError, match=r"index.json: .*not valid JSON"):
        open_folder(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"weight_map": {"z": "one.safetensors"}})
    with pytest.raises(ModelError, match=r"places tensor 'z' in 'one\.safetensors', which does not hold it"):
        open_folder(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickle_is_never_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=f"{name} only; pickle files are never read"):
        open_folder(tmp_path)


def test_a_folder_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds neither model\.safetensors nor"):
        open_folder(tmp_path)
    with pytest.raises(ModelError, match="is not a folder"):
        open_folder(tmp_path / "absent")
