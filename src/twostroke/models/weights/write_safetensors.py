"""Writing safetensors files: named arrays of one file, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_NAMES = {"f4": "F32", "i8": "I64", "b1": "BOOL", "u2": "BF16"}
"""What numpy calls a kind of numbers, and what the format does. 16 bits without a sign stand for bfloat16."""
_ALIGNMENT = 8


def bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of each number's bits, rounded to the nearest, ties to even. Finite numbers alone."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path: Path, arrays: Mapping[str, npt.NDArray[Any]], notes: Mapping[str, str]) -> None:
    """`notes` go into the header. The file takes its place in one move. Raises OSError."""
    header: dict[str, Any] = {"__metadata__": dict(notes)} if notes else {}
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    position = 0
    for name, array in whole.items():
        end = position + array.nbytes
        kind = _NAMES[array.dtype.str[1:]]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in whole.values():
                file.write(array.tobytes())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
