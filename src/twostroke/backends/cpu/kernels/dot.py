"""The one thing that differs between instruction sets: 16 dot products of 4 unsigned 8-bit weights with 4 signed 8-bit
activations, added to 32-bit integers. Each is exact, so every instruction set gives the same integers."""

from __future__ import annotations

from llvmlite import ir

from twostroke.backends.cpu.kernels.emitter import I1, I8, I8X64, I16, I32, I32X16, Emitter, Value

BIAS = 128
"""An 8-bit weight is stored as q + 128; its dot product must be lowered by 128 times the sum of the activations."""


def unbiases_itself(emitter: Emitter) -> bool:
    """Whether `dot_biased` removes the bias, or the accumulator must start at -128 times the sum of activations."""
    return emitter.isa.name not in ("avx512-vnni", "avx2-vnni")


def dot_small(emitter: Emitter, accumulator: Value, weights: Value, activations: Value) -> Value:
    """Weights of 0 to 127.  # weights [64] u8, activations: four s8 in an i32, accumulator [16] i32"""
    return _dot(emitter, accumulator, weights, activations, signed=False)


def dot_biased(emitter: Emitter, accumulator: Value, weights: Value, activations: Value) -> Value:
    """Weights stored as q + 128; see `unbiases_itself`."""
    if unbiases_itself(emitter):
        weights = emitter.build.xor(weights, ir.Constant(I8X64, [-128] * 64))
    return _dot(emitter, accumulator, weights, activations, signed=True)


def dot_words(emitter: Emitter, accumulator: Value, numbers: Value, factors: Value) -> Value:
    """Pairs of 16 bits, signed.  # numbers [16] i32: a pair each; factors: a pair in an i32, accumulator [16] i32"""
    build, spread = emitter.build, emitter.splat(factors)
    match emitter.isa.name:
        case "avx512-vnni":
            name = "llvm.x86.avx512.vpdpwssd.512"
            return emitter.external(name, I32X16, [I32X16] * 3, [accumulator, numbers, spread])
        case "avx2" | "avx2-vnni":
            words = ir.VectorType(I16, 16)
            halves = [[build.bitcast(x, words) for x in split_vector(emitter, side, 2)] for side in (numbers, spread)]
            kinds = [words] * 2
            name = "llvm.x86.avx2.pmadd.wd"
            pairs = [
                emitter.external(name, ir.VectorType(I32, 8), kinds, list(both)) for both in zip(*halves, strict=True)
            ]
            return build.add(accumulator, join_parts(emitter, pairs))
    for shift in (0, 16):
        left, right = (build.ashr(build.shl(x, emitter.ints(16 - shift)), emitter.ints(16)) for x in (numbers, spread))
        accumulator = build.add(accumulator, build.mul(left, right))
    return accumulator


def _dot(emitter: Emitter, accumulator: Value, weights: Value, activations: Value, *, signed: bool) -> Value:
    match emitter.isa.name:
        case "avx512-vnni":
            return _vnni(emitter, accumulator, weights, activations)
        case "avx2-vnni":
            return _narrow_vnni(emitter, accumulator, weights, activations)
        case "avx2":
            return _avx2(emitter, accumulator, weights, activations, signed=signed)
        case "neon-dotprod":
            return _neon(emitter, accumulator, weights, activations)
    return _generic(emitter, accumulator, weights, activations, signed=signed)


def _vnni(emitter: Emitter, accumulator: Value, weights: Value, activations: Value) -> Value:
    words = emitter.build.bitcast(weights, I32X16)
    name = "llvm.x86.avx512.vpdpbusd.512"
    return emitter.external(name, I32X16, [I32X16] * 3, [accumulator, words, emitter.splat(activations)])


def _narrow_vnni(emitter: Emitter, accumulator: Value, weights: Value, activations: Value) -> Value:
    """The same in two halves of 256 bits; LLVM takes the encoding that the features allow."""
    kind = ir.VectorType(I32, 8)
    spread = split_vector(emitter, emitter.splat(activations), 2)[0]
    words = split_vector(emitter, emitter.build.bitcast(weights, I32X16), 2)
    halves = zip(split_vector(emitter, accumulator, 2), words, strict=True)
    name = "llvm.x86.avx512.vpdpbusd.256"
    return join_parts(
        emitter, [emitter.external(name, kind, [kind] * 3, [total, part, spread]) for total, part in halves]
    )


def split_vector(emitter: Emitter, vector: Value, parts: int) -> list[Value]:
    width = vector.type.count // parts
    undefined = ir.Constant(vector.type, ir.Undefined)
    masks = [list(range(part * width, part * width + width)) for part in range(parts)]
    return [
        emitter.build.shuffle_vector(vector, undefined, ir.Constant(ir.VectorType(I32, width), mask)) for mask in masks
    ]


def join_parts(emitter: Emitter, parts: list[Value]) -> Value:
    while len(parts) > 1:
        width = parts[0].type.count * 2
        mask = ir.Constant(ir.VectorType(I32, width), list(range(width)))
        parts = [emitter.build.shuffle_vector(a, b, mask) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _avx2(emitter: Emitter, accumulator: Value, weights: Value, activations: Value, *, signed: bool) -> Value:
    """pmaddubsw adds two products in 16 bits. 127 * 127 * 2 fits; for signed weights the sign moves to the
    activations first, and 128 * 127 * 2 fits too: nothing saturates."""
    bytes32, words16, ints8 = ir.VectorType(I8, 32), ir.VectorType(I16, 16), ir.VectorType(I32, 8)
    spread = split_vector(emitter, emitter.build.bitcast(emitter.splat(activations), I8X64), 2)[0]
    sums = []
    for part in split_vector(emitter, weights, 2):
        left, right = part, spread
        if signed:
            left = emitter.external("llvm.abs.v32i8", bytes32, [bytes32, I1], [part, ir.Constant(I1, 0)])
            right = emitter.external("llvm.x86.avx2.psign.b", bytes32, [bytes32] * 2, [spread, part])
        pairs = emitter.external("llvm.x86.avx2.pmadd.ub.sw", words16, [bytes32] * 2, [left, right])
        ones = ir.Constant(words16, [1] * 16)
        sums.append(emitter.external("llvm.x86.avx2.pmadd.wd", ints8, [words16] * 2, [pairs, ones]))
    return emitter.build.add(accumulator, join_parts(emitter, sums))


def _neon(emitter: Emitter, accumulator: Value, weights: Value, activations: Value) -> Value:
    bytes16, ints4 = ir.VectorType(I8, 16), ir.VectorType(I32, 4)
    spread = split_vector(emitter, emitter.build.bitcast(emitter.splat(activations), I8X64), 4)[0]
    pieces = zip(split_vector(emitter, accumulator, 4), split_vector(emitter, weights, 4), strict=True)
    name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
    kinds = [ints4, bytes16, bytes16]
    return join_parts(emitter, [emitter.external(name, ints4, kinds, [total, part, spread]) for total, part in pieces])


def _generic(emitter: Emitter, accumulator: Value, weights: Value, activations: Value, *, signed: bool) -> Value:
    """Byte by byte, in 32-bit lanes."""
    build, words = emitter.build, emitter.build.bitcast(weights, I32X16)
    for byte in range(4):
        if signed:
            weight = build.ashr(build.shl(words, emitter.ints(24 - 8 * byte)), emitter.ints(24))
        else:
            weight = build.and_(build.lshr(words, emitter.ints(8 * byte)), emitter.ints(0xFF))
        shifted = build.shl(activations, ir.Constant(I32, 24 - 8 * byte))
        activation = build.ashr(shifted, ir.Constant(I32, 24))
        accumulator = build.add(accumulator, build.mul(weight, emitter.splat(activation)))
    return accumulator
