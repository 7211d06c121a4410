"""A memory-mapped reader of safetensors files, one or sharded over a folder. Every size and offset is checked before
it is trusted, as the format demands: the tensors cover the data exactly, without holes or overlap. Never pickle."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import ModelError
from twostroke.models.weights.mapped_file import map_file, quoted
from twostroke.models.weights.tensor import WeightKind, WeightTensor

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
SINGLE_FILE = "model.safetensors"
MAX_DIMENSIONS = 8
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_KINDS = {"F32": WeightKind.F32, "F16": WeightKind.F16, "BF16": WeightKind.BF16}
_TABLE_KINDS = {"I64": "<i8", "I32": "<i4", "BOOL": "|b1"}
"""Whole numbers and marks: no weights, and read only for who asks for them."""
Tables = dict[str, npt.NDArray[np.generic]]
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1}
_ITEM_BYTES |= {"I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1}


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """A tensor just as a file has it."""

    name: str
    dtype: str
    """As the format names it."""
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]  # all its bytes, a read-only view of the memory map

    def as_weights(self) -> WeightTensor:
        """Of the float kinds."""
        kind = _KINDS[self.dtype]
        row_bytes = kind.row_bytes(self.shape[-1] if self.shape else 1)
        data = self.data.reshape(math.prod(self.shape[:-1]), row_bytes)
        return WeightTensor(self.name, kind, self.shape, data)

    @property
    def is_float(self) -> bool:
        return self.dtype in _KINDS


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # from the start of the data
    end: int


def open_folder(folder: Path | str, tables: Tables | None = None) -> dict[str, WeightTensor]:
    """The tensors of a Hugging Face folder: `model.safetensors`, or the shards that its index names. Tables of whole
    numbers are put into `tables`, and refused without it."""
    return _weights_of(read_folder(folder, _read_with(tables)), tables)


def read_folder(folder: Path | str, dtypes: Iterable[str] = tuple(_ITEM_BYTES)) -> dict[str, RawTensor]:
    """The same tensors as they lie there."""
    folder = Path(folder)
    if (folder / SINGLE_FILE).is_file():
        return read_safetensors(folder / SINGLE_FILE, dtypes)
    if (folder / INDEX_FILE).is_file():
        return _read_shards(folder, dtypes)
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder")
    refuse_pickle(folder, (entry.name for entry in folder.iterdir()))
    raise ModelError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files that `open_folder` may read."""
    if (folder / SINGLE_FILE).is_file():
        return (folder / SINGLE_FILE,)
    return (folder / INDEX_FILE, *sorted(folder.glob("*.safetensors")))


def open_safetensors(path: Path | str, tables: Tables | None = None) -> dict[str, WeightTensor]:
    """The tensors of one file, in the order of their data; each a read-only view of the memory map."""
    return _weights_of(read_safetensors(path, _read_with(tables)), tables)


def _read_with(tables: Tables | None) -> tuple[str, ...]:
    return tuple(_KINDS) if tables is None else (*_KINDS, *_TABLE_KINDS)


def _weights_of(raw: Mapping[str, RawTensor], tables: Tables | None) -> dict[str, WeightTensor]:
    tensors: dict[str, WeightTensor] = {}
    for name, tensor in raw.items():
        if tensor.is_float:
            tensors[name] = tensor.as_weights()
        else:
            assert tables is not None
            values = np.frombuffer(tensor.data.tobytes(), dtype=_TABLE_KINDS[tensor.dtype])
            tables[name] = values.reshape(tensor.shape)
    return tensors


def read_safetensors(path: Path | str, dtypes: Iterable[str] = tuple(_ITEM_BYTES)) -> dict[str, RawTensor]:
    path = Path(path)
    buffer = map_file(path)
    if len(buffer) < 8:
        raise ModelError(f"{path} is truncated: a safetensors file takes 8 bytes at least, and it holds {len(buffer)}")
    header_bytes = int.from_bytes(buffer[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise ModelError(
            f"{path} is not a safetensors file, or is corrupt: its header claims {header_bytes} bytes, and at most "
            f"{MAX_HEADER_BYTES} are allowed"
        )
    data_start = 8 + header_bytes
    if data_start > len(buffer):
        raise ModelError(f"{path} is truncated: its header ends at byte {data_start}, and it holds {len(buffer)} bytes")
    header = _parse_object(str(path), buffer[8:data_start])
    known = tuple(dtypes)
    entries = [_parse_entry(path, name, fields, known) for name, fields in header.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    _check_cover(path, entries, len(buffer) - data_start)
    whole: npt.NDArray[np.uint8] = np.frombuffer(buffer, dtype=np.uint8)
    return {
        entry.name: RawTensor(
            entry.name, entry.dtype, entry.shape, whole[data_start + entry.start : data_start + entry.end]
        )
        for entry in entries
    }


def _parse_object(source: str, raw: bytes) -> dict[str, Any]:
    """A JSON object whose keys are unique, or a ModelError."""
    try:
        text = raw.decode("utf-8")
        parsed = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ModelError(f"{source}: the header is not valid UTF-8 at byte {error.start} of it") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{source}: the header is not valid JSON: {error}") from error
    except (ValueError, RecursionError) as error:  # a repeated key, a number without end, nesting without end
        raise ModelError(f"{source}: the header cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{source}: the header is not a JSON object")
    return parsed


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {quoted(repeated)} occurs twice")
    return result


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _parse_entry(path: Path, name: str, fields: object, dtypes: tuple[str, ...]) -> _Entry:
    what = f"{path}: tensor {quoted(name)}"
    if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
        raise ModelError(f"{what} has a name that is not valid Unicode")
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise ModelError(f"{what} must have dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in dtypes:
        raise ModelError(f"{what} is stored as {quoted(dtype)}, which is not read; these are: {', '.join(dtypes)}")
    if not _are_sizes(shape, MAX_DIMENSIONS):
        raise ModelError(f"{what} has the shape {quoted(shape)}; up to {MAX_DIMENSIONS} whole numbers are read")
    if not _are_sizes(offsets, 2) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{what} has the data_offsets {quoted(offsets)}; they must be its first byte and its end")
    expected = math.prod(shape) * _ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != expected:
        raise ModelError(f"{what} of shape {quoted(shape)} takes {expected} bytes, not {offsets[1] - offsets[0]}")
    return _Entry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(value: object, most: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= most
        and all(type(item) is int and 0 <= item < 2**63 for item in value)
    )


def _check_cover(path: Path, entries: list[_Entry], data_bytes: int) -> None:
    position, previous = 0, "the header"
    for entry in entries:
        if entry.start != position:
            fault = "overlap" if entry.start < position else "have a hole between them"
            raise ModelError(f"{path}: {previous} and tensor {quoted(entry.name)} {fault}")
        position, previous = entry.end, f"tensor {quoted(entry.name)}"
    if position > data_bytes:
        raise ModelError(
            f"{path} is truncated: its tensors take {position} bytes after the header, and {data_bytes} are there"
        )
    if position < data_bytes:
        raise ModelError(f"{path}: {data_bytes - position} bytes at its end belong to no tensor")


def _read_shards(folder: Path, dtypes: Iterable[str]) -> dict[str, RawTensor]:
    index_path = folder / INDEX_FILE
    raw = map_file(index_path)
    if len(raw) > MAX_HEADER_BYTES:
        raise ModelError(f"{index_path} holds {len(raw)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    weight_map = _parse_object(str(index_path), raw[:]).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index_path} has no weight_map of tensor names to files")
    shards: dict[str, Mapping[str, RawTensor]] = {}
    tensors: dict[str, RawTensor] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard not in shards:
            shards[shard] = read_safetensors(_shard_path(folder, shard), dtypes)
        if name not in shards[shard]:
            raise ModelError(f"{index_path} places tensor {quoted(name)} in {quoted(shard)}, which does not hold it")
        tensors[name] = shards[shard][name]
    return tensors


def _shard_path(folder: Path, shard: object) -> Path:
    """A shard is a plain file name beside its index: nothing that could lead out of the folder."""
    plain = isinstance(shard, str) and shard.endswith(".safetensors") and not set(shard) & set('/\\:\0"')
    if not plain:
        raise ModelError(f"{folder / INDEX_FILE} names the shard {quoted(shard)}; a plain .safetensors name is needed")
    path = folder / str(shard)
    if not path.is_file():
        raise ModelError(f"{folder} lacks the shard {quoted(shard)}, which its {INDEX_FILE} names")
    return path


def refuse_pickle(folder: Path, names: Iterable[str]) -> None:
    """Raise if these names of a folder without safetensors hold its weights as pickle."""
    pickles = sorted(name for name in names if name.endswith(PICKLE_SUFFIXES))
    if pickles:
        raise ModelError(
            f"{folder} holds its weights as {pickles[0]} only; pickle files are never read, because loading one can "
            "run any code: convert the model to safetensors"
        )
