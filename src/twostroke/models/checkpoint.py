"""A loaded model: its spec, its tensors by canonical name, and where its text side (tokenizer, template) is found.
How files become this is in `loading.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.models.spec import ModelSpec
from twostroke.models.weights.tensor import WeightTensor


@dataclass(frozen=True, slots=True)
class Checkpoint:
    name: str
    path: Path
    spec: ModelSpec
    tensors: Mapping[str, WeightTensor]
    """Canonical names, exactly those of `spec.tensor_shapes()`."""
    gguf_metadata: Mapping[str, Any] | None = None
    """The GGUF key-values, tokenizer fields among them; None for a Hugging Face folder (`path` holds its files)."""

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def num_parameters(self) -> int:
        total = 0
        for shape in self.spec.tensor_shapes().values():
            count = 1
            for size in shape:
                count *= size
            total += count
        return total
