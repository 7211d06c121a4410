"""Random tensors of every weight kind, with the spread that real weights have."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.models.weights.quantisation import quantise
from twostroke.models.weights.tensor import WeightKind, WeightTensor, from_float32

# Where a block of each K kind keeps its f16 scales, which must be finite and small.
_SCALE_OFFSETS = {WeightKind.Q4_K: (0, 2), WeightKind.Q5_K: (0, 2), WeightKind.Q6_K: (208,)}


def tensor(kind: WeightKind, values: npt.NDArray[np.float32], name: str = "weights") -> WeightTensor:
    """These values, stored as this kind."""
    if kind is WeightKind.F32:
        return from_float32(name, values)
    if kind is WeightKind.F16:
        data = values.astype("<f2").view(np.uint8)
    elif kind is WeightKind.BF16:
        data = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    else:
        data = quantise(kind, values)
    return WeightTensor(name, kind, values.shape, data.reshape(len(values), -1))


def random_tensor(kind: WeightKind, outputs: int, depth: int, seed: int = 0) -> WeightTensor:
    rng = np.random.default_rng(seed)
    if kind not in _SCALE_OFFSETS:
        return tensor(kind, rng.standard_normal((outputs, depth)).astype(np.float32))
    blocks = rng.integers(0, 256, (outputs, depth // 256, kind.block_bytes), dtype=np.uint8)
    for offset in _SCALE_OFFSETS[kind]:
        scales = rng.uniform(0.001, 0.01, (*blocks.shape[:2], 1)).astype("<f2")
        blocks[..., offset : offset + 2] = scales.view(np.uint8)
    return WeightTensor("weights", kind, (outputs, depth), blocks.reshape(outputs, -1))
