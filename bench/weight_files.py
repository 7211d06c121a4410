"""The matrices of trained models as float32, a row an output, from .safetensors, .onnx, .pt and .gguf files.
Knows these containers as far as `packed_range.py` needs them: convolutions, vectors and integers are passed over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.models.loading import load_checkpoint

Matrix = npt.NDArray[np.float32]  # [outputs, inputs]


def matrices(path: Path) -> Iterator[tuple[str, str, Matrix]]:
    """Name, stored kind and values of every matrix of a file."""
    if path.suffix == ".gguf":
        for name, tensor in load_checkpoint(path).tensors.items():
            if len(tensor.shape) == 2:
                yield name, tensor.kind.name, tensor.to_float32()
    elif path.suffix == ".safetensors":
        yield from _safetensors_matrices(path)
    elif path.suffix == ".onnx":
        yield from _onnx_matrices(path)
    elif path.suffix in (".pt", ".pth", ".bin"):
        yield from _torch_matrices(path)
    else:
        raise ValueError(f"{path.name} is none of .safetensors, .onnx, .pt, .pth, .bin and .gguf")


def _safetensors_matrices(path: Path) -> Iterator[tuple[str, str, Matrix]]:
    """Not by the engine's own reader, which refuses a file that holds integers too, as encoders' files do."""
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    data_start = 8 + int(raw[:8].view("<u8")[0])
    header = json.loads(raw[8:data_start].tobytes())
    for name, entry in header.items():
        if name == "__metadata__" or len(entry["shape"]) != 2 or entry["dtype"] not in ("F32", "F16", "BF16"):
            continue
        start, end = entry["data_offsets"]
        data = raw[data_start + start : data_start + end].tobytes()
        yield name, entry["dtype"], _to_float32(data, entry["dtype"]).reshape(entry["shape"])


def _to_float32(data: bytes, kind: str) -> npt.NDArray[np.float32]:
    if kind == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[kind]).astype(np.float32)


def _torch_matrices(path: Path) -> Iterator[tuple[str, str, Matrix]]:
    import torch

    seen: set[int] = set()  # of storages: a tied matrix is stored once and named twice

    def found(name: str, value: Any) -> Iterator[tuple[str, str, Matrix]]:
        if isinstance(value, dict):
            for key, part in value.items():
                if str(key).startswith("optimi"):  # an optimiser's state, in a checkpoint of a training
                    continue
                yield from found(f"{name}.{key}" if name else str(key), part)
        elif isinstance(value, torch.Tensor) and value.ndim == 2 and value.is_floating_point():
            is_new = value.data_ptr() not in seen
            seen.add(value.data_ptr())
            if is_new:
                yield name, str(value.dtype).removeprefix("torch."), value.float().numpy()

    # weights_only: a pickle that holds anything but tensors is refused, not run.
    yield from found("", torch.load(path, map_location="cpu", weights_only=True))


# The numbers of ONNX's protobuf fields that are read here.
_MODEL_GRAPH = 7
_GRAPH_NODE, _GRAPH_INITIALISER = 1, 5
_NODE_INPUT, _NODE_OUTPUT, _NODE_OPERATION, _NODE_ATTRIBUTE = 1, 2, 4, 5
_ATTRIBUTE_NAME, _ATTRIBUTE_INTEGER, _ATTRIBUTE_TENSOR = 1, 3, 5
_TENSOR_SHAPE, _TENSOR_TYPE, _TENSOR_FLOATS, _TENSOR_NAME, _TENSOR_RAW = 1, 2, 4, 8, 9
_TENSOR_KINDS = {1: "F32", 10: "F16", 16: "BF16"}

Fields = dict[int, list[Any]]  # numbers (as bytes where they are fixed), or memoryviews of what has a length


def _onnx_matrices(path: Path) -> Iterator[tuple[str, str, Matrix]]:
    graph = _fields(_fields(memoryview(path.read_bytes()))[_MODEL_GRAPH][0])
    tensors = {_text(tensor[_TENSOR_NAME][0]): tensor for tensor in map(_fields, graph.get(_GRAPH_INITIALISER, []))}
    uses: dict[str, str] = {}
    for node in map(_fields, graph.get(_GRAPH_NODE, [])):
        operation = _text(node[_NODE_OPERATION][0])
        attributes = {_text(a[_ATTRIBUTE_NAME][0]): a for a in map(_fields, node.get(_NODE_ATTRIBUTE, []))}
        inputs = [_text(name) for name in node.get(_NODE_INPUT, [])]
        if operation == "Constant" and "value" in attributes:
            tensors[_text(node[_NODE_OUTPUT][0])] = _fields(attributes["value"][_ATTRIBUTE_TENSOR][0])
        elif operation == "Gemm" and "transB" in attributes and attributes["transB"][_ATTRIBUTE_INTEGER][0]:
            uses[inputs[1]] = "rows"
        elif operation in ("MatMul", "Gemm"):
            uses[inputs[1]] = "columns"
        elif operation in ("LSTM", "GRU", "RNN"):
            uses |= dict.fromkeys(inputs[1:3], "rows")
        elif operation == "Gather":
            uses[inputs[0]] = "rows"
    for name, tensor in tensors.items():
        shape = _packed_numbers(tensor.get(_TENSOR_SHAPE, []))
        kind = _TENSOR_KINDS.get(tensor[_TENSOR_TYPE][0])
        if kind is None or len(shape) not in (2, 3) or name not in uses:
            continue
        data = (tensor.get(_TENSOR_RAW) or tensor.get(_TENSOR_FLOATS) or [b""])[0]
        values = _to_float32(bytes(data), kind).reshape(-1, shape[-1])  # directions of a recurrence: more rows
        yield name, kind, np.ascontiguousarray(values.T) if uses[name] == "columns" else values


def _fields(message: memoryview) -> Fields:
    """A protobuf message, one level deep."""
    found: Fields = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value: Any
        if key & 7 == 0:
            value, at = _varint(message, at)
        else:
            if key & 7 == 2:
                size, at = _varint(message, at)
            else:
                size = {1: 8, 5: 4}[key & 7]
            value = message[at : at + size]
            at += size
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while message[at] & 0x80:
        value |= (message[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
    return value | message[at] << shift, at + 1


def _packed_numbers(values: list[Any]) -> list[int]:
    """A repeated number, which a writer may give one by one or packed into bytes."""
    numbers: list[int] = []
    for value in values:
        if isinstance(value, int):
            numbers.append(value)
            continue
        at = 0
        while at < len(value):
            number, at = _varint(value, at)
            numbers.append(number)
    return numbers


def _text(value: memoryview) -> str:
    return bytes(value).decode()
