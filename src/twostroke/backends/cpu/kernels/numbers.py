"""Numbers that attention needs beside floats: pairs of bf16, their dot product, their rounding, and powers of two."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from twostroke.backends.cpu.kernels.emitter import F32X16, I16, I16X16, I32, I32X16, Emitter, Value

LARGEST_BF16 = float.fromhex("0x1.fep127")
I16X32 = ir.VectorType(I16, 32)


class _BrainFloat(ir.Type):  # type: ignore[misc]
    """llvmlite has no bf16; as an operand of intrinsics, its name is all that is needed."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _BrainFloat)

    def __hash__(self) -> int:
        return hash(_BrainFloat)


_BF16X16, _BF16X32 = (ir.VectorType(_BrainFloat(), lanes) for lanes in (16, 32))


def dot_pairs(e: Emitter, total: Value, left: Value, right: Value) -> Value:
    """total + left[2i] * right[2i] + left[2i + 1] * right[2i + 1]; a lane of 32 bits holds a pair of bf16."""
    if e.isa.has_bf16_dot:
        pairs = [e.build.bitcast(side, _BF16X32) for side in (left, right)]
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return e.external(name, F32X16, [F32X16, _BF16X32, _BF16X32], [total, *pairs])
    for half in (high_floats, low_floats):  # in the order of that instruction
        total = e.multiply_add(half(e, left), half(e, right), total)
    return total


def low_floats(e: Emitter, pairs: Value) -> Value:
    return e.build.bitcast(e.build.shl(pairs, e.ints(16)), F32X16)


def high_floats(e: Emitter, pairs: Value) -> Value:
    return e.build.bitcast(e.build.and_(pairs, e.ints(-65536)), F32X16)


def to_bf16(e: Emitter, value: Value) -> Value:
    """16 floats to the bits of bf16, to nearest even. NaN stays NaN."""
    if e.isa.has_bf16_dot:
        rounded = e.external("llvm.x86.avx512bf16.cvtneps2bf16.512", _BF16X16, [F32X16], [value])
        return e.build.bitcast(rounded, I16X16)
    build, bits = e.build, e.build.bitcast(value, I32X16)
    odd = build.and_(build.lshr(bits, e.ints(16)), e.ints(1))
    rounded = build.lshr(build.add(build.add(bits, e.ints(0x7FFF)), odd), e.ints(16))
    whole = build.or_(build.lshr(bits, e.ints(16)), e.ints(0x40))
    return build.trunc(build.select(build.fcmp_unordered("uno", value, value), whole, rounded), I16X16)


def exact_bf16(e: Emitter, low: Value, high: Value) -> Value:
    """Two vectors of floats that bf16 holds exactly, one after the other, as 16 pairs."""
    if e.isa.has_bf16_dot:
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        joined = e.external(name, _BF16X32, [F32X16, F32X16], [high, low])
        return e.build.bitcast(joined, I32X16)
    halves = [e.build.trunc(e.build.lshr(e.build.bitcast(x, I32X16), e.ints(16)), I16X16) for x in (low, high)]
    return e.build.bitcast(_concatenate(e, *halves), I32X16)


def as_pairs(e: Emitter, values: Value) -> Value:
    """16 numbers of 16 bits as 8 pairs; the upper 8 lanes are zero."""
    return e.build.bitcast(_concatenate(e, values, ir.Constant(I16X16, [0] * 16)), I32X16)


def _concatenate(e: Emitter, low: Value, high: Value) -> Value:
    return e.build.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 32), list(range(32))))


def saturate(e: Emitter, value: Value, limit: float) -> Value:
    """Within the limits, NaN too: what is stored is always finite."""
    low, high = e.floats(-limit), e.floats(limit)
    value = e.build.select(e.build.fcmp_ordered(">", value, low), value, low)
    return e.build.select(e.build.fcmp_ordered("<", value, high), value, high)


def power_of_two(e: Emitter, value: Value, degree: int) -> Value:
    """2^x for x up to 0, by a series of this degree: exactly 1 at 0, exactly 0 at -127 and below; NaN stays NaN."""
    lowest = e.floats(-127.0)
    return e.power_of_two(e.build.select(e.build.fcmp_ordered("<", value, lowest), lowest, value), degree)
