"""A tiny checkpoint with a different weight kind for each matrix: tiles of every kind in one model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.backends.cpu.random_weights import tensor
from tests.models.tiny_checkpoints import make_tiny

from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.tensor import WeightKind

_KINDS = {
    "q": WeightKind.Q4_1,
    "k": WeightKind.Q8_0,
    "v": WeightKind.Q8_0,
    "o": WeightKind.Q4_0,
    "gate": WeightKind.F16,
    "up": WeightKind.Q8_0,
    "down": WeightKind.BF16,
    "embedding": WeightKind.Q8_0,
}


def mixed_checkpoint(folder: Path, variant: str = "llama_tied") -> Checkpoint:
    path, _ = make_tiny(variant, folder)
    checkpoint = load_checkpoint(path)
    tensors = dict(checkpoint.tensors)
    for name, stored in tensors.items():
        kind = _KINDS.get(name.split(".")[-1])
        if kind is not None and len(stored.shape) == 2:
            tensors[name] = tensor(kind, stored.to_float32(), name)
    return replace(checkpoint, tensors=tensors)
