"""A memory-mapped reader of GGUF files: key-values and tensors, every length and offset checked before it is trusted.
Knows the container; what the keys mean, families and tokenizer know; what the blocks mean, `quantisation.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import ModelError
from twostroke.models.weights.mapped_file import map_file, quoted
from twostroke.models.weights.tensor import BLOCK_KINDS, WeightKind, WeightTensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
MAX_HEADER_BYTES = 64 << 20
"""Key-values and tensor list together. The largest vocabularies in use need about 15 MB; a hostile file could
otherwise have its tensor data read as one enormous list."""

_U32, _U64 = Struct("<I"), Struct("<Q")
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LEAST_BYTES = {_BOOL: 1, _STRING: 8, _ARRAY: 12} | {code: dtype.itemsize for code, dtype in _SCALARS.items()}
"""By value type: what one value takes at least, so that a count is refused before anything is allocated for it."""
_LEAST_KEY_VALUE_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

_KINDS = {
    0: WeightKind.F32,
    1: WeightKind.F16,
    2: WeightKind.Q4_0,
    3: WeightKind.Q4_1,
    6: WeightKind.Q5_0,
    7: WeightKind.Q5_1,
    8: WeightKind.Q8_0,
    10: WeightKind.Q2_K,
    11: WeightKind.Q3_K,
    12: WeightKind.Q4_K,
    13: WeightKind.Q5_K,
    14: WeightKind.Q6_K,
    16: WeightKind.IQ2_XXS,
    17: WeightKind.IQ2_XS,
    18: WeightKind.IQ3_XXS,
    19: WeightKind.IQ1_S,
    20: WeightKind.IQ4_NL,
    21: WeightKind.IQ3_S,
    22: WeightKind.IQ2_S,
    23: WeightKind.IQ4_XS,
    29: WeightKind.IQ1_M,
    30: WeightKind.BF16,
    34: WeightKind.TQ1_0,
    35: WeightKind.TQ2_0,
    39: WeightKind.MXFP4,
    40: WeightKind.NVFP4,
}
_UNREAD_KINDS = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0"}


@dataclass(frozen=True, slots=True)
class GGUFFile:
    path: Path
    version: int
    metadata: Mapping[str, Any]
    """Strings, ints, floats, bools, and lists of them."""
    tensors: Mapping[str, WeightTensor]
    """In file order; `data` is a read-only view of the memory map."""


def open_gguf(path: Path | str) -> GGUFFile:
    path = Path(path)
    header = _Header(path, map_file(path))
    version = header.read_version()
    num_tensors, num_key_values = header.u64(), header.u64()
    header.check_count("key-values", num_key_values, _LEAST_KEY_VALUE_BYTES)
    header.check_count("tensors", num_tensors, _LEAST_TENSOR_BYTES)
    metadata = header.read_key_values(num_key_values)
    entries = header.read_tensor_entries(num_tensors)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"{path}: general.alignment must be a power of two, not {quoted(alignment)}")
    split_count = metadata.get("split.count", 1)
    if isinstance(split_count, int) and split_count > 1:
        raise ModelError(f"{path} is one part of a model split in {split_count} GGUF files; merge them into one first")
    data_start = -(-header.position // alignment) * alignment
    tensors = _view_tensors(path, header.buffer, entries, data_start, alignment)
    return GGUFFile(path, version, metadata, tensors)


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    name: str
    kind: WeightKind
    shape: tuple[int, ...]  # rows first
    offset: int  # from the start of the data

    @property
    def row_bytes(self) -> int:
        return self.kind.row_bytes(self.shape[-1])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


class _Header:
    """A cursor over the part of the file before the tensor data."""

    def __init__(self, path: Path, buffer: mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.position = 0
        self.end = min(len(buffer), MAX_HEADER_BYTES)

    def require(self, num_bytes: int, what: str) -> None:
        if num_bytes <= self.end - self.position:
            return
        expected = self.position + num_bytes
        if self.end < len(self.buffer):
            raise ModelError(
                f"{self.path}: {what} would end at byte {expected}; a GGUF header of more than {MAX_HEADER_BYTES} "
                "bytes is not read"
            )
        raise ModelError(
            f"{self.path} is truncated or corrupt: {what} needs at least {expected} bytes, and the file holds "
            f"{self.end} bytes"
        )

    def check_count(self, what: str, count: int, least_bytes: int) -> None:
        self.require(count * least_bytes, f"a list of {count} {what}")

    def u32(self, what: str = "the header") -> int:
        self.require(4, what)
        value: int = _U32.unpack_from(self.buffer, self.position)[0]
        self.position += 4
        return value

    def u64(self, what: str = "the header") -> int:
        self.require(8, what)
        value: int = _U64.unpack_from(self.buffer, self.position)[0]
        self.position += 8
        return value

    def string(self, what: str) -> str:
        length = self.u64(what)
        self.require(length, what)
        raw = self.buffer[self.position : self.position + length]
        self.position += length
        return self.decode(raw, what)

    def decode(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {what} is not valid UTF-8: {quoted(raw)}") from error

    def read_version(self) -> int:
        self.require(8, "the header")
        if self.buffer[:4] != MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file: it begins with {self.buffer[:4]!r}, not {MAGIC!r}")
        self.position = 4
        version = self.u32()
        if version and version & 0xFFFF == 0:
            raise ModelError(f"{self.path} is a big-endian GGUF file; only little-endian ones are read")
        if version not in VERSIONS:
            known = " and ".join(str(v) for v in VERSIONS)
            raise ModelError(f"{self.path} is GGUF version {version}; versions {known} are read")
        return version

    def read_key_values(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            key = self.string(f"the name of key {index}")
            if key in metadata:
                raise ModelError(f"{self.path}: the key {quoted(key)} occurs twice")
            what = f"the value of {quoted(key)}"
            metadata[key] = self.value(self.u32(what), what, depth=0)
        return metadata

    def value(self, value_type: int, what: str, depth: int) -> Any:
        if value_type == _STRING:
            return self.string(what)
        if value_type != _ARRAY:
            return self.numbers(value_type, 1, what)[0]
        if depth >= MAX_ARRAY_DEPTH:
            raise ModelError(f"{self.path}: {what} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        item_type = self.u32(what)
        count = self.u64(what)
        least_bytes = _LEAST_BYTES.get(item_type)
        if least_bytes is None:
            raise ModelError(f"{self.path}: {what} is an array of the unknown type {item_type}")
        self.check_count(f"items in {what}", count, least_bytes)
        if item_type == _STRING:
            return self.strings(count, what)
        if item_type == _ARRAY:
            return [self.value(_ARRAY, what, depth + 1) for _ in range(count)]
        return self.numbers(item_type, count, what)

    def numbers(self, value_type: int, count: int, what: str) -> list[Any]:
        dtype: np.dtype[Any] | None = np.dtype(np.uint8) if value_type == _BOOL else _SCALARS.get(value_type)
        if dtype is None:
            raise ModelError(f"{self.path}: {what} has the unknown type {value_type}")
        self.require(count * dtype.itemsize, what)
        values = np.frombuffer(self.buffer, dtype, count, self.position)
        self.position += values.nbytes
        if value_type == _BOOL:
            if (values > 1).any():
                raise ModelError(f"{self.path}: {what} should be 0 or 1, as a bool is, and holds {values.max()}")
            values = values.astype(bool)
        numbers: list[Any] = values.tolist()
        return numbers

    def strings(self, count: int, what: str) -> list[str]:
        """The hot loop of opening a model: a vocabulary and its merges are 10^5 strings and more."""
        buffer, position, end, unpack_from = self.buffer, self.position, self.end, _U64.unpack_from
        items: list[str] = []
        for index in range(count):
            start = position + 8
            length = unpack_from(buffer, position)[0] if start <= end else 0
            if length > end - start:
                self.position = position
                self.require(8 + length, f"item {index} of {what}")
            position = start + length
            raw = buffer[start:position]
            try:
                items.append(raw.decode())
            except UnicodeDecodeError:
                self.decode(raw, f"item {index} of {what}")
        self.position = position
        return items

    def read_tensor_entries(self, count: int) -> list[_TensorEntry]:
        entries: dict[str, _TensorEntry] = {}
        for index in range(count):
            name = self.string(f"the name of tensor {index}")
            if name in entries:
                raise ModelError(f"{self.path}: the tensor {quoted(name)} occurs twice")
            entries[name] = self.read_tensor_entry(name)
        return list(entries.values())

    def read_tensor_entry(self, name: str) -> _TensorEntry:
        what = f"tensor {quoted(name)}"
        num_dimensions = self.u32(what)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ModelError(f"{self.path}: {what} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are read")
        shape = tuple(reversed([self.u64(what) for _ in range(num_dimensions)]))  # GGUF gives the row's length first
        if 0 in shape:
            raise ModelError(f"{self.path}: {what} has an empty shape {shape}")
        kind_code = self.u32(what)
        kind = _KINDS.get(kind_code)
        if kind is None:
            named = _UNREAD_KINDS.get(kind_code, f"number {kind_code}")
            readable = ", ".join(kind.name for kind in BLOCK_KINDS)
            raise ModelError(f"{self.path}: {what} is stored as kind {named}, which is not read; these are: {readable}")
        if shape[-1] % kind.block_values:
            raise ModelError(
                f"{self.path}: {what} has rows of {shape[-1]} values, not a multiple of {kind.name}'s block of "
                f"{kind.block_values}"
            )
        return _TensorEntry(name, kind, shape, self.u64(what))


def _view_tensors(
    path: Path, buffer: mmap, entries: list[_TensorEntry], data_start: int, alignment: int
) -> dict[str, WeightTensor]:
    """Check that every tensor lies within the file, aligned, and over no other one; then view it."""
    previous_end, previous_name = 0, ""
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset % alignment:
            raise ModelError(
                f"{path}: tensor {quoted(entry.name)} begins at offset {entry.offset}, not a multiple of the file's "
                f"alignment of {alignment}"
            )
        if entry.offset < previous_end:
            raise ModelError(f"{path}: tensors {quoted(previous_name)} and {quoted(entry.name)} overlap")
        previous_end, previous_name = entry.offset + entry.nbytes, entry.name
    if data_start + previous_end > len(buffer) and entries:
        raise ModelError(
            f"{path} is truncated or corrupt: tensor {quoted(previous_name)} ends at byte {data_start + previous_end}, "
            f"and the file holds {len(buffer)} bytes"
        )
    whole: npt.NDArray[np.uint8] = np.frombuffer(buffer, dtype=np.uint8)
    tensors: dict[str, WeightTensor] = {}
    for entry in entries:
        start = data_start + entry.offset
        data = whole[start : start + entry.nbytes].reshape(-1, entry.row_bytes)
        tensors[entry.name] = WeightTensor(entry.name, entry.kind, entry.shape, data)
    return tensors
