"""Matrices in forms that this engine reads and does not make: as tools that quantise folders and llama.cpp's quantiser
store them. All are made by rounding alone: what GPTQ and AWQ gain by looking at a text, and llama.cpp's K kinds by a
search of their scales, comes on top."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from twostroke.models.checkpoint import Checkpoint
from twostroke.models.weights.quantisation import quantise
from twostroke.models.weights.quantise_parts import group_of
from twostroke.models.weights.small_floats import E4M3_MOST, E4M3_VALUES, FP4_MOST, to_e4m3
from twostroke.models.weights.stored_forms import Parts, ScaledTensor, ScaleKind, pack_nibbles, unpack_nibbles
from twostroke.models.weights.tensor import WeightKind, WeightTensor

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
_BETWEEN = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
"""Halfway between the magnitudes of E2M1."""
FP8_BLOCK = 128
_SHORT_ROWS = {"q4_0": WeightKind.Q4_0, "q4_k": WeightKind.Q5_0, "q5_k": WeightKind.Q5_1, "q6_k": WeightKind.Q8_0}
"""What llama.cpp takes for rows that are no whole blocks of 256."""


def in_form(floats: Checkpoint, form: str) -> Checkpoint:
    """The model as a file of that form would hold it: its layers' matrices, and of GGUF's kinds the head in 8 bits."""
    tensors = dict(floats.tensors)
    for name, tensor in floats.tensors.items():
        is_head = name in ("embedding", "output")
        if not floats.is_multiplied(name) or name.endswith(".router") or (is_head and form in PARTS):
            continue
        values = tensor.to_float32()
        if is_head:
            tensors[name] = WeightTensor(name, WeightKind.Q8_0, values.shape, quantise(WeightKind.Q8_0, values))
        else:
            tensors[name] = made(name, form, values)
    return replace(floats, tensors=tensors)


def made(name: str, form: str, values: Float32) -> WeightTensor:
    if form not in PARTS:
        return _block_tensor(name, form, values)
    parts = PARTS[form](values)
    codes = parts.codes
    nbytes = codes.nbytes + parts.scales.nbytes + (0 if parts.zeros is None else parts.zeros.nbytes // 2)
    frame = replace(parts, codes=np.empty((len(codes), 0), dtype=np.uint8))
    return ScaledTensor(name, parts.shape, nbytes, frame, lambda start, stop: codes[start:stop])


# Scales apart


def _int8(values: Float32) -> Parts:
    scales = _or_one(np.abs(values).max(axis=1, keepdims=True) / np.float32(127))
    codes = (np.rint(values / scales) + 128).astype(np.uint8)
    return Parts(WeightKind.INT8, values.shape, codes, scales, ScaleKind.F32, 1, values.shape[1])


def _fp8_tensor(values: Float32) -> Parts:
    scales = _or_one(np.full((1, 1), np.abs(values).max() / np.float32(E4M3_MOST), dtype=np.float32))
    return Parts(WeightKind.FP8, values.shape, to_e4m3(values / scales), scales, ScaleKind.F32, *values.shape)


def _fp8_blocks(values: Float32) -> Parts:
    """Of 128 x 128, the last of a row or column cut short."""
    rows, inputs = (-(-size // FP8_BLOCK) for size in values.shape)
    padded = np.zeros((rows * FP8_BLOCK, inputs * FP8_BLOCK), dtype=np.float32)
    padded[: len(values), : values.shape[1]] = values
    blocks = np.abs(padded).reshape(rows, FP8_BLOCK, inputs, FP8_BLOCK)
    scales = _or_one((blocks.max(axis=(1, 3)) / np.float32(E4M3_MOST)).astype(np.float32))
    wide = scales.repeat(FP8_BLOCK, axis=0).repeat(FP8_BLOCK, axis=1)[: len(values), : values.shape[1]]
    codes = to_e4m3(values / wide)
    return Parts(WeightKind.FP8, values.shape, codes, scales, ScaleKind.F32, FP8_BLOCK, FP8_BLOCK)


def _gptq_order(values: Float32) -> Parts:
    """With inputs in the order of their size: those of about one size share scales."""
    order = np.argsort(-np.abs(values).mean(axis=0), kind="stable")
    found = _gptq(np.ascontiguousarray(values[:, order]))
    back = np.argsort(order)
    codes = pack_nibbles(np.ascontiguousarray(unpack_nibbles(found.codes)[:, back]))
    groups = (back // found.group_size).astype(np.int32)
    return replace(found, codes=codes, group_of_input=groups)


def _gptq(values: Float32) -> Parts:
    """Symmetric, in groups, without an order."""
    groups = _grouped(values)
    scales = _or_one((np.abs(groups).max(axis=2) / np.float32(7)).astype(np.float16))
    codes = np.clip(np.rint(groups / scales[..., None].astype(np.float32)), -8, 7) + 8
    packed = pack_nibbles(codes.astype(np.uint8).reshape(values.shape))
    return Parts(WeightKind.INT4, values.shape, packed, scales, ScaleKind.F16, 1, groups.shape[2])


def _awq(values: Float32) -> Parts:
    """With zero points."""
    groups = _grouped(values)
    low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
    scales = _or_one(((high - low) / np.float32(15)).astype(np.float16))
    wide = scales.astype(np.float32)
    zeros = np.clip(np.rint(-low / wide), 0, 15)
    codes = np.clip(np.rint(groups / wide[..., None]) + zeros[..., None], 0, 15)
    packed = pack_nibbles(codes.astype(np.uint8).reshape(values.shape))
    group = groups.shape[2]
    return Parts(WeightKind.INT4, values.shape, packed, scales, ScaleKind.F16, 1, group, zeros.astype(np.uint8))


def _nvfp4(values: Float32) -> Parts:
    groups = values.reshape(len(values), -1, 16)
    whole = np.float32(E4M3_MOST * FP4_MOST / np.abs(values).max())
    scales = to_e4m3((np.abs(groups).max(axis=2) / np.float32(FP4_MOST) * whole).astype(np.float32))
    packed = _fp4(groups, _or_one(E4M3_VALUES[scales] / whole)).reshape(len(values), -1)
    kind = WeightKind.NVFP4_PARTS
    return Parts(kind, values.shape, packed, scales, ScaleKind.E4M3, 1, 16, global_scale=whole, divides=True)


def _mxfp4(values: Float32) -> Parts:
    groups = values.reshape(len(values), -1, 32)
    powers = np.floor(np.log2(np.maximum(np.abs(groups).max(axis=2), np.float32(1e-30)))) - 2
    packed = _fp4(groups, np.exp2(powers).astype(np.float32)).reshape(len(values), -1)
    exponents = (powers + 127).astype(np.uint8)
    return Parts(WeightKind.MXFP4_PARTS, values.shape, packed, exponents, ScaleKind.E8M0, 1, 32)


def _fp4(groups: Float32, scales: Float32) -> Bytes:
    scaled = groups / scales[..., None]
    codes = np.searchsorted(_BETWEEN, np.abs(scaled)).astype(np.uint8) | (np.signbit(scaled).astype(np.uint8) << 3)
    return pack_nibbles(codes.reshape(len(groups), -1))


def _grouped(values: Float32) -> Float32:
    return values.reshape(len(values), -1, group_of(values.shape[1]))


def _or_one(scales: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:  # type: ignore[type-arg]
    scales[scales == 0] = 1
    return scales


# GGUF's blocks


def _block_tensor(name: str, form: str, values: Float32) -> WeightTensor:
    kind = WeightKind[form.upper()] if values.shape[1] % 256 == 0 else _SHORT_ROWS[form]
    if kind in (WeightKind.Q4_0, WeightKind.Q8_0):
        data = quantise(kind, values)
    elif kind in (WeightKind.Q5_0, WeightKind.Q5_1):
        data = _q5(kind, values)
    else:
        data = (_q6_k if kind is WeightKind.Q6_K else _q4_or_q5_k)(kind, values)
    return WeightTensor(name, kind, values.shape, data.reshape(len(values), -1))


def _q5(kind: WeightKind, values: Float32) -> Bytes:
    """As llama.cpp rounds. Of 32 values a scale; Q5_1 has a minimum, too, and Q5_0 has the value that is furthest from
    zero at one end."""
    groups = values.reshape(-1, 32)
    if kind is WeightKind.Q5_0:
        furthest = np.abs(groups).argmax(axis=1)[:, None]
        scales, low = np.take_along_axis(groups, furthest, axis=1) / np.float32(-16), None
    else:
        low = groups.min(axis=1, keepdims=True)
        scales = (groups.max(axis=1, keepdims=True) - low) / np.float32(31)
    inverse = 1 / _or_one(scales.copy())
    inverse[scales == 0] = 0
    codes = groups * inverse + np.float32(16.5) if low is None else (groups - low) * inverse + np.float32(0.5)
    codes = np.trunc(codes).astype(np.uint8).clip(0, 31)
    heads = [part.astype("<f2").view(np.uint8) for part in ((scales,) if low is None else (scales, low))]
    fifth = np.packbits(codes >> 4, axis=1, bitorder="little")
    return np.concatenate([*heads, fifth, (codes[:, :16] & 15) | (codes[:, 16:] << 4)], axis=1)


def _q4_or_q5_k(kind: WeightKind, values: Float32) -> Bytes:
    """Of 32 values each a scale and a minimum of six bits, times those of the block of 256."""
    most = 15 if kind is WeightKind.Q4_K else 31
    groups = values.reshape(-1, 8, 32)
    low = np.minimum(groups.min(axis=2), 0)
    scales, minima = (groups.max(axis=2).clip(min=0) - low) / most, -low
    tops = [_or_one((part.max(axis=1) / 63).astype(np.float16)).astype(np.float32) for part in (scales, minima)]
    six = [np.clip(np.rint(part / top[:, None]), 0, 63) for part, top in zip((scales, minima), tops, strict=True)]
    wide = _or_one((six[0] * tops[0][:, None]).astype(np.float32))
    down = six[1] * tops[1][:, None]
    codes = np.clip(np.rint((groups + down[..., None]) / wide[..., None]), 0, most).astype(np.uint8)
    codes[six[0] == 0] = 0
    heads = np.stack(tops, axis=1).astype("<f2").view(np.uint8)
    pairs = codes.reshape(-1, 4, 2, 32)  # 32 bytes hold two groups: one in the low nibbles, one in the high
    nibbles = ((pairs[:, :, 0] & 15) | ((pairs[:, :, 1] & 15) << 4)).reshape(len(codes), -1)
    above = np.zeros((len(codes), 32), dtype=np.uint8)
    for index in range(8):
        above |= (codes[:, index] >> 4) << index
    sixes = _six_bits(*(part.astype(np.uint8) for part in six))
    return np.concatenate([heads, sixes, *([above] if most == 31 else []), nibbles], axis=1)


def _six_bits(scales: Bytes, minima: Bytes) -> Bytes:
    """Twelve bytes: four of scales, four of minima, each with two bits of a later one on top; and four with the rest
    of those later ones."""
    first = (scales[:, :4] & 63) | ((scales[:, 4:] >> 4) << 6)
    second = (minima[:, :4] & 63) | ((minima[:, 4:] >> 4) << 6)
    return np.concatenate([first, second, (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)], axis=1)


def _q6_k(kind: WeightKind, values: Float32) -> Bytes:
    """Of 16 values each a scale of eight bits, times that of the block."""
    groups = values.reshape(-1, 16, 16)
    scales = np.abs(groups).max(axis=2) / 31
    top = _or_one((scales.max(axis=1) / 127).astype(np.float16)).astype(np.float32)
    eight = np.clip(np.rint(scales / top[:, None]), 0, 127)
    wide = _or_one((eight * top[:, None]).astype(np.float32))
    codes = (np.clip(np.rint(groups / wide[..., None]), -32, 31) + 32).astype(np.uint8)
    codes[eight == 0] = 32
    quarters = codes.reshape(-1, 2, 4, 32)  # of each half: which bits of which bytes hold 32 values
    lows = np.stack([quarters[:, :, i] & 15 | (quarters[:, :, i + 2] & 15) << 4 for i in range(2)], axis=2)
    highs = sum((quarters[:, :, i] >> 4) << np.uint8(2 * i) for i in range(4))
    ends = [eight.astype(np.int8).view(np.uint8), top.astype("<f2").view(np.uint8).reshape(-1, 2)]
    return np.concatenate([lows.reshape(len(codes), -1), np.asarray(highs).reshape(len(codes), -1), *ends], axis=1)


PARTS: dict[str, Callable[[Float32], Parts]] = {
    "fp8-tensor": _fp8_tensor, "fp8-blocks": _fp8_blocks,
    "int8": _int8, "gptq": _gptq, "gptq-order": _gptq_order, "awq": _awq, "nvfp4": _nvfp4, "mxfp4": _mxfp4,
}  # fmt: skip
MADE = (*PARTS, *_SHORT_ROWS)
"""Their names."""
