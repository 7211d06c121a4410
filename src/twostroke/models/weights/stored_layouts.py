"""How a module's tensors are packed in a quantised folder, layout by layout: from the raw tensors of one matrix to a
ScaledTensor. Every size is checked before it is trusted; nothing is read but what a check needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import numpy as np
import numpy.typing as npt

from twostroke.models.quantised.scheme import Layout, Strategy
from twostroke.models.weights.safetensors import RawTensor
from twostroke.models.weights.stored_forms import Parts, ScaledTensor, pack_nibbles, unpack_nibbles
from twostroke.models.weights.stored_module import Scales, Stored, frame_of, scale_array, scales_of
from twostroke.models.weights.tensor import WeightKind

Bytes = npt.NDArray[np.uint8]

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of eight outputs that share a word: where each has its four bits, counted from the lowest."""
_MAX_INPUTS = 2**31


def read_stored(stored: Stored) -> ScaledTensor:
    """Raises ModelError."""
    return _READERS[stored.scheme.layout](stored)


# compressed-tensors

_FLOATS = ("BF16", "F16", "F32")


def _packed_integers(stored: Stored) -> ScaledTensor:
    """Words of 32 bits, the first input lowest: on this side's byte order, bytes with the first input below."""
    bits = stored.scheme.bits
    packed, experts = _matrices(stored, stored.need("weight_packed", "I32"))
    rows, words = packed.shape
    inputs = _whole_shape(stored, rows, experts)
    if words != -(-inputs * bits // 32) or inputs * bits % 8:
        raise stored.error(f"has a weight_packed of shape {packed.shape}, and {inputs} inputs of {bits} bits")
    scales = scales_of(stored, "weight_scale", _FLOATS, rows, inputs)
    kind = WeightKind.INT4 if bits == 4 else WeightKind.INT8
    zeros = _packed_zeros(stored, rows, scales.values.shape[1])
    order = _order(stored, "weight_g_idx", inputs, scales)
    codes = packed.data.reshape(rows, -1)[:, : inputs * bits // 8]
    frame = replace(frame_of(kind, rows, inputs, scales), zeros=zeros, group_of_input=order)
    return stored.tensor(frame, lambda start, stop: codes[start:stop], experts)


def _matrices(stored: Stored, raw: RawTensor) -> tuple[RawTensor, int | None]:
    """A matrix, or a stack of experts as one matrix, and how many they are."""
    if len(raw.shape) not in (2, 3):
        raise stored.error(f"has numbers of shape {raw.shape}, and a matrix is asked for, or a stack of them")
    experts = raw.shape[0] if len(raw.shape) == 3 else None
    return replace(raw, shape=(prod(raw.shape[:-1]), raw.shape[-1])), experts


def _whole_shape(stored: Stored, rows: int, experts: int | None) -> int:
    """The inputs, by `weight_shape`, whose other numbers must be the rows'."""
    shape = stored.need("weight_shape", "I64", "I32")
    if prod(shape.shape) not in (2, 3):
        raise stored.error(f"has a weight_shape of shape {shape.shape}, and two numbers are asked for")
    found = [int(size) for size in np.frombuffer(shape.data.tobytes(), "<i8" if shape.dtype == "I64" else "<i4")]
    each = rows // (experts or 1)
    if found[:-1] not in ([each], [rows], [experts, each]) or not 0 < found[-1] < _MAX_INPUTS:
        raise stored.error(f"has a weight_shape of {found}, and its weight_packed has {rows} rows")
    return found[-1]


def _packed_zeros(stored: Stored, rows: int, groups: int) -> Bytes | None:
    """Packed along the outputs."""
    zeros = stored.maybe("weight_zero_point", "I32")
    _check_zeros_wanted(stored, zeros is not None)
    if zeros is None:
        return None
    bits = stored.scheme.bits
    zeros, experts = _matrices(stored, zeros)  # where a stack's rows share words, they are packed as one
    if experts is not None and rows // experts * bits % 32:
        raise stored.error(f"has zero points of experts of {rows // experts} rows, which are no whole words")
    stored.shaped("weight_zero_point", zeros, (-(-rows * bits // 32), groups))
    by_column = np.ascontiguousarray(zeros.data.view("<u4").reshape(-1, groups).T)  # [groups, words]
    codes = by_column.view(np.uint8).reshape(groups, -1)
    codes = unpack_nibbles(codes) if bits == 4 else codes
    return np.ascontiguousarray(codes[:, :rows].T)


def _check_zeros_wanted(stored: Stored, has_zeros: bool) -> None:
    if has_zeros and stored.scheme.is_symmetric:
        raise stored.error("has zero points, and the config says that it is symmetric")
    if not has_zeros and not stored.scheme.is_symmetric:
        raise stored.error("has no zero points, and the config says that it is not symmetric")


def _order(stored: Stored, part: str, inputs: int, scales: Scales) -> npt.NDArray[np.int32] | None:
    """The group of each input, where they do not follow one another."""
    found = stored.maybe(part, "I32", "I64")
    if found is None:
        if stored.scheme.has_order:
            raise stored.error(f"has no {part}, and the config says that inputs have an order of their own")
        return None
    stored.shaped(part, found, (inputs,))
    groups = np.frombuffer(found.data.tobytes(), "<i4" if found.dtype == "I32" else "<i8")
    if groups.min() < 0 or groups.max() >= scales.values.shape[1]:
        if groups.min() == groups.max() == -1 and not stored.scheme.has_order:
            return None  # so some files say that there is no order
        raise stored.error(f"has a {part} that names groups beyond its {scales.values.shape[1]}")
    if np.array_equal(groups, np.arange(inputs) // scales.group_size):
        return None
    if not stored.scheme.has_order:
        raise stored.error(f"has a {part} that orders inputs, and the config says that they have no order")
    return groups.astype(np.int32)


def _plain_integers(stored: Stored) -> ScaledTensor:
    """Signed bytes, whose sign bit is turned to make them codes."""
    weight = stored.need("weight", "I8", ndim=2)
    rows, inputs = weight.shape
    scales = scales_of(stored, "weight_scale", _FLOATS, rows, inputs)
    zeros = stored.maybe("weight_zero_point", "I8")
    _check_zeros_wanted(stored, zeros is not None)
    frame = frame_of(WeightKind.INT8, rows, inputs, scales)
    if zeros is not None:
        groups = scales.values.shape[1]
        if prod(zeros.shape) not in (1, rows * groups):
            raise stored.error(f"has a weight_zero_point of shape {zeros.shape}, and ({rows}, {groups}) is asked for")
        whole = np.broadcast_to(zeros.data.reshape(-1, groups if prod(zeros.shape) > 1 else 1), (rows, groups))
        frame = replace(frame, zeros=whole ^ np.uint8(128))
    codes = weight.data.reshape(rows, inputs)
    return stored.tensor(frame, lambda start, stop: codes[start:stop] ^ np.uint8(128))


_SMALL = ("F8_E8M0", "U8")


def _floats_of_8(stored: Stored) -> ScaledTensor:
    """With `weight_scale`, or in files of blocks `weight_scale_inv`, which multiplies all the same."""
    weight = stored.need("weight", "F8_E4M3")
    if len(weight.shape) not in (2, 3):
        raise stored.error(f"has shape {weight.shape}, and a matrix is asked for")
    part = "weight_scale_inv" if "weight_scale_inv" in stored.parts else "weight_scale"
    if len(stored.parts.keys() & {"weight_scale_inv", "weight_scale"}) == 2:
        raise stored.error("has both a weight_scale and a weight_scale_inv")
    stacked = len(weight.shape) == 3
    experts, rows, inputs = weight.shape[0] if stacked else 1, prod(weight.shape[:-1]), weight.shape[-1]
    scales = scales_of(_with_found_strategy(stored, part, rows), part, (*_FLOATS, *_SMALL), rows, inputs, experts)
    codes = weight.data.reshape(rows, inputs)
    frame = frame_of(WeightKind.FP8, rows, inputs, scales)
    return stored.tensor(frame, lambda start, stop: codes[start:stop], experts if stacked else None)


def _with_found_strategy(stored: Stored, part: str, rows: int) -> Stored:
    """Some methods leave open whether a tensor or each of its rows has a scale: their files show it."""
    raw = stored.parts.get(part)
    if raw is None or stored.scheme.strategy is not Strategy.TENSOR or rows == 1 or prod(raw.shape) != rows:
        return stored
    return replace(stored, scheme=replace(stored.scheme, strategy=Strategy.CHANNEL))


def _packed_fp4(stored: Stored) -> ScaledTensor:
    """NVFP4, whose scales are divided by one of the whole tensor; or MXFP4."""
    packed, experts = _matrices(stored, stored.need("weight_packed", "U8"))
    if stored.scheme.group_size == 32:
        return _fp4(stored, packed, WeightKind.MXFP4_PARTS, "weight_scale", _SMALL, experts=experts)
    tensor_scale = stored.scalar("weight_global_scale", is_needed=True)
    kind, dtypes = WeightKind.NVFP4_PARTS, ("F8_E4M3",)
    return _fp4(stored, packed, kind, "weight_scale", dtypes, experts=experts, global_scale=tensor_scale, divides=True)


def _modelopt_fp4(stored: Stored) -> ScaledTensor:
    """NVFP4, whose scales are multiplied by one of the whole tensor."""
    tensor_scale = stored.scalar("weight_scale_2", is_needed=True)
    kind, packed = WeightKind.NVFP4_PARTS, stored.need("weight", "U8", ndim=2)
    return _fp4(stored, packed, kind, "weight_scale", ("F8_E4M3",), global_scale=tensor_scale)


def _mxfp4_blocks(stored: Stored) -> ScaledTensor:
    """All experts of a layer: [experts, rows, blocks, 16 bytes], and a scale for each block of 32."""
    blocks = stored.need("blocks", "U8", ndim=4)
    experts, rows, groups, block_bytes = blocks.shape
    if block_bytes != 16:
        raise stored.error(f"has blocks of {block_bytes} bytes, and 16 are asked for")
    stored.shaped("scales", stored.need("scales", *_SMALL), blocks.shape[:3])
    flat = replace(blocks, shape=(experts * rows, groups * block_bytes))
    return _fp4(stored, flat, WeightKind.MXFP4_PARTS, "scales", _SMALL, experts=experts)


def _fp4(
    stored: Stored,
    packed: RawTensor,
    kind: WeightKind,
    scale: str,
    dtypes: tuple[str, ...],
    *,
    experts: int | None = None,
    global_scale: np.float32 | None = None,
    divides: bool = False,
) -> ScaledTensor:
    rows, inputs = packed.shape[0], 2 * packed.shape[1]
    if inputs % (stored.scheme.group_size or 1):
        raise stored.error(f"has {inputs} inputs, which are no whole groups of {stored.scheme.group_size}")
    scales = scales_of(stored, scale, dtypes, rows, inputs)
    codes = packed.data.reshape(rows, -1)
    frame = replace(frame_of(kind, rows, inputs, scales), global_scale=global_scale, divides=divides)
    return stored.tensor(frame, lambda start, stop: codes[start:stop], experts)


# GPTQ and AWQ: matrices are stored with their inputs first


def _gptq(stored: Stored) -> ScaledTensor:
    """Words hold several inputs of one output."""
    bits = stored.scheme.bits
    words = stored.need("qweight", "I32", ndim=2)
    inputs, rows = words.shape[0] * 32 // bits, words.shape[1]
    frame = _turned_frame(stored, rows, inputs, None)
    table = words.data.view("<u4").reshape(words.shape)

    def codes_of(start: int, stop: int) -> Bytes:
        by_row = np.ascontiguousarray(table[:, start:stop].T)  # [rows, words]: bytes with the first input below
        return by_row.view(np.uint8).reshape(stop - start, -1)

    return stored.tensor(frame, codes_of)


def _awq(stored: Stored) -> ScaledTensor:
    """Words hold eight outputs of one input, not in order."""
    words = stored.need("qweight", "I32", ndim=2)
    inputs, rows = words.shape[0], words.shape[1] * 8
    if inputs % 2:
        raise stored.error(f"has {inputs} inputs, and an even number is asked for")
    frame = _turned_frame(stored, rows, inputs, _AWQ_ORDER)
    table = words.data.view("<u4").reshape(words.shape)

    def codes_of(start: int, stop: int) -> Bytes:
        first = start // 8
        by_input = _spread_words(table[:, first : -(-stop // 8)], 4, _AWQ_ORDER)
        return pack_nibbles(np.ascontiguousarray(by_input[:, start - 8 * first : stop - 8 * first].T))

    return stored.tensor(frame, codes_of)


def _turned_frame(stored: Stored, rows: int, inputs: int, order: tuple[int, ...] | None) -> Parts:
    """What GPTQ and AWQ have alike: `scales` [groups, outputs], and `qzeros` with several outputs a word."""
    scheme = stored.scheme
    group = inputs if scheme.group_size is None else min(scheme.group_size, inputs)
    groups = -(-inputs // group)
    raw = stored.shaped("scales", stored.need("scales", *_FLOATS), (groups, rows))
    values, kind = scale_array(raw)
    scales = Scales(np.ascontiguousarray(values.reshape(groups, rows).T), kind, 1, group)
    bits = scheme.bits
    packed = stored.shaped("qzeros", stored.need("qzeros", "I32"), (groups, -(-rows * bits // 32)))
    zeros = _spread_words(packed.data.view("<u4").reshape(packed.shape), bits, order)[:, :rows].T
    frame = frame_of(WeightKind.INT4 if bits == 4 else WeightKind.INT8, rows, inputs, scales)
    own_order = _order(stored, "g_idx", inputs, scales) if scheme.layout is Layout.GPTQ else None
    found = (zeros + np.uint8(scheme.zeros_less_one)) & np.uint8(2**bits - 1)
    if scheme.is_symmetric and (found == 2 ** (bits - 1)).all():
        return replace(frame, group_of_input=own_order)
    if scheme.is_symmetric:
        raise stored.error("has zero points that are not the middle, and the config says that it is symmetric")
    return replace(frame, zeros=np.ascontiguousarray(found), group_of_input=own_order)


def _spread_words(words: npt.NDArray[np.uint32], bits: int, order: tuple[int, ...] | None) -> Bytes:
    """[n, words] to [n, numbers], the lowest first, or each of eight where `order` has it."""
    places = np.arange(32 // bits) if order is None else np.array(order)
    spread = (words[..., None] >> (places * bits).astype(np.uint32)) & np.uint32(2**bits - 1)
    return spread.astype(np.uint8).reshape(len(words), -1)


_READERS: dict[Layout, Callable[[Stored], ScaledTensor]] = {
    Layout.PACKED_INTEGERS: _packed_integers,
    Layout.PLAIN_INTEGERS: _plain_integers,
    Layout.FLOATS_OF_8: _floats_of_8,
    Layout.PACKED_FP4: _packed_fp4,
    Layout.GPTQ: _gptq,
    Layout.AWQ: _awq,
    Layout.MXFP4_BLOCKS: _mxfp4_blocks,
    Layout.MODELOPT_FP4: _modelopt_fp4,
}
