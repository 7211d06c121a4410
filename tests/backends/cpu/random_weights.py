"""Random tensors of every weight kind, with the spread that real weights have."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.models.weights.quantisation import dequantise, quantise
from twostroke.models.weights.tensor import WeightKind, WeightTensor, from_float32

SPREAD = 0.1
"""The standard deviation of random blocks."""
_WRITTEN = (WeightKind.F32, WeightKind.F16, WeightKind.BF16, WeightKind.Q8_0, WeightKind.Q4_0, WeightKind.Q4_1)
# Where a block of each other kind keeps its f16 scales, which must be finite and small, if they do not come first.
_SCALE_OFFSETS = {
    WeightKind.Q5_1: (0, 2),
    WeightKind.Q2_K: (80, 82),
    WeightKind.Q3_K: (108,),
    WeightKind.Q4_K: (0, 2),
    WeightKind.Q5_K: (0, 2),
    WeightKind.Q6_K: (208,),
    WeightKind.TQ1_0: (52,),
    WeightKind.TQ2_0: (64,),
    WeightKind.IQ1_M: (),
    WeightKind.MXFP4: (),
    WeightKind.NVFP4: (),
}


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


def random_tensor(kind: WeightKind, outputs: int, depth: int, seed: int = 0, name: str = "weights") -> WeightTensor:
    rng = np.random.default_rng(seed)
    if kind in _WRITTEN:
        return tensor(kind, rng.standard_normal((outputs, depth)).astype(np.float32), name)
    blocks = rng.integers(0, 256, (outputs, depth // kind.block_values, kind.block_bytes), dtype=np.uint8)
    if kind is WeightKind.IQ1_M:  # four bits of the scale on top of each of four words: 0x2400 is 0.016
        blocks[..., [49, 51, 53, 55]] &= 15
        blocks[..., 53] |= 0x40
        blocks[..., 55] |= 0x20
    if kind is WeightKind.MXFP4:  # exponents of two, from -127 on
        blocks[..., 0] = rng.integers(119, 124, blocks.shape[:2])
    if kind is WeightKind.NVFP4:  # floats of E4M3
        blocks[..., :4] = rng.integers(8, 32, (*blocks.shape[:2], 4))
    offsets = _SCALE_OFFSETS.get(kind, (0,))
    drawn = {offset: rng.uniform(0.1, 1, (*blocks.shape[:2], 1)) for offset in offsets}
    if kind is WeightKind.Q5_1:
        drawn[2] = -16 * drawn[0]
    for spread in (1.0, None):  # as drawn, and then so that values spread as far as wanted
        factor = spread or SPREAD / float(dequantise(kind, blocks.reshape(outputs, -1)).std())
        for offset, scales in drawn.items():
            blocks[..., offset : offset + 2] = (factor * scales).astype("<f2").view(np.uint8)
    return WeightTensor(name, kind, (outputs, depth), blocks.reshape(outputs, -1))
