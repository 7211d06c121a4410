"""A thin layer over llvmlite's IRBuilder: counted loops, variables, vectors of 16 floats, and the few functions of
floats that kernels share. Every sum has one order, so a result never depends on who computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from twostroke.backends.cpu.isa import InstructionSet

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, POINTER, VOID = ir.HalfType(), ir.FloatType(), ir.PointerType(), ir.VoidType()
LANES = 16
F32X16, F16X16 = ir.VectorType(F32, LANES), ir.VectorType(F16, LANES)
I32X16, I16X16, I8X16 = (ir.VectorType(t, LANES) for t in (I32, I16, I8))
I8X64 = ir.VectorType(I8, 64)

Value = Any  # an llvmlite.ir value; the library carries no types
POWER_SERIES = {
    3: (1.0, 0.693282927, 0.242210963, 0.0550089315),
    5: (1.0, 0.693147004, 0.240222424, 0.0555073358, 0.00967151299, 0.00132647273),
    6: (1.0, 0.693147182, 0.240226477, 0.0555033237, 0.00961843692, 0.0013398875, 0.00015353362),
}
"""Coefficients of 2^x for x within a half of 0, by degree, exact at 0: the largest relative error is as small as can be
(1e-4, 9e-8 and 2e-9 before rounding)."""
ROUND_MAGIC = 1.5 * 2**23
"""Adding this to a float below 2^22 leaves its nearest integer in the low bits: rounding with no conversion, and no
undefined result for NaN."""


class Variable:
    """A mutable value; LLVM turns it into registers."""

    def __init__(self, emitter: Emitter, kind: Any, slot: Value) -> None:
        self._emitter, self._kind, self._slot = emitter, kind, slot

    @property
    def value(self) -> Value:
        return self._emitter.build.load(self._slot, typ=self._kind)

    @value.setter
    def value(self, new: Value) -> None:
        self._emitter.build.store(new, self._slot)


class Emitter:
    def __init__(self, module: ir.Module, isa: InstructionSet) -> None:
        self.module, self.isa = module, isa
        self.build: ir.IRBuilder = None

    @contextmanager
    def function(
        self,
        name: str,
        parameters: Sequence[tuple[str, Any]],
        *,
        result: Any = VOID,
        inline: bool = False,
        apart: bool = False,
    ) -> Iterator[list[Value]]:
        """Opens a function; a `result` other than void is returned by the body. Pointers do not alias. `apart` keeps
        it from being inlined: its registers are its own."""
        made = ir.Function(self.module, ir.FunctionType(result, [kind for _, kind in parameters]), name)
        made.attributes.add("nounwind")
        if apart:
            made.linkage = "internal"
            made.attributes.add("noinline")
        if inline:
            made.linkage = "internal"
            made.attributes.add("alwaysinline")
        for argument, (label, kind) in zip(made.args, parameters, strict=True):
            argument.name = label
            if kind is POINTER:
                argument.add_attribute("noalias")
        outer = self.build
        self.build = ir.IRBuilder(made.append_basic_block("entry"))
        yield list(made.args)
        if result is VOID:
            self.build.ret_void()
        self.build = outer

    def call(self, name: str, arguments: Sequence[Value]) -> Value:
        return self.build.call(self.module.get_global(name), arguments)

    def external(self, name: str, result: Any, kinds: Sequence[Any], arguments: Sequence[Value]) -> Value:
        """A call of an LLVM intrinsic, or of a function of another module or of the C library."""
        found = self.module.globals.get(name)
        if found is None:
            found = ir.Function(self.module, ir.FunctionType(result, kinds), name)
        return self.build.call(found, arguments)

    # control

    def variable(self, kind: Any, initial: Value | None = None) -> Variable:
        with self.build.goto_entry_block():
            slot = self.build.alloca(kind)
        made = Variable(self, kind, slot)
        if initial is not None:
            made.value = initial
        return made

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: Value | int = 1) -> Iterator[Value]:
        """Counts from `start` below `stop`; runs zero times when there is nothing to count."""
        start, stop, step = self.integer(start), self.integer(stop), self.integer(step)
        build = self.build
        before, body, after = build.block, build.append_basic_block("loop"), build.append_basic_block("after")
        build.cbranch(build.icmp_signed("<", start, stop), body, after)
        build.position_at_end(body)
        index = build.phi(I64)
        index.add_incoming(start, before)
        yield index
        following = build.add(index, step)
        index.add_incoming(following, build.block)
        build.cbranch(build.icmp_signed("<", following, stop), body, after)
        build.position_at_end(after)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.build.if_then(condition):
            yield

    # integers and addresses

    def integer(self, value: Value | int) -> Value:
        return ir.Constant(I64, value) if isinstance(value, int) else value

    def add(self, left: Value, right: Value | int) -> Value:
        return self.build.add(left, self.integer(right))

    def sub(self, left: Value, right: Value | int) -> Value:
        return self.build.sub(left, self.integer(right))

    def mul(self, left: Value, right: Value | int) -> Value:
        return self.build.mul(left, self.integer(right))

    def div(self, left: Value, right: Value | int) -> Value:
        """Of non-negative integers."""
        return self.build.udiv(left, self.integer(right))

    def rem(self, left: Value, right: Value | int) -> Value:
        return self.build.urem(left, self.integer(right))

    def smaller(self, left: Value, right: Value | int) -> Value:
        right = self.integer(right)
        return self.build.select(self.build.icmp_signed("<", left, right), left, right)

    def larger(self, left: Value, right: Value | int) -> Value:
        right = self.integer(right)
        return self.build.select(self.build.icmp_signed(">", left, right), left, right)

    def is_nonzero(self, value: Value) -> Value:
        return self.build.icmp_signed("!=", value, self.integer(0))

    def at(self, pointer: Value, index: Value | int, kind: Any = I8) -> Value:
        """The address of element `index` of an array of `kind`."""
        return self.build.gep(pointer, [self.integer(index)], source_etype=kind)

    def load(self, kind: Any, pointer: Value, align: int = 1) -> Value:
        return self.build.load(pointer, typ=kind, align=align)

    def load_at(self, kind: Any, pointer: Value, index: Value | int, align: int | None = None) -> Value:
        """Element `index` of an array of scalars."""
        return self.load(kind, self.at(pointer, index, kind), align or kind.width // 8 if kind is not F32 else 4)

    def store(self, value: Value, pointer: Value, align: int = 1) -> None:
        self.build.store(value, pointer, align=align)

    def pointer(self, address: Value) -> Value:
        return self.build.inttoptr(address, POINTER)

    def atomic_pointer(self, pointer: Value, index: Value | int) -> Value:
        """The address of a 64-bit integer, typed, which the builder wants for atomic operations."""
        address = self.build.ptrtoint(self.at(pointer, index, I64), I64)
        return self.build.inttoptr(address, I64.as_pointer())

    def prefetch(self, pointer: Value, *, nearest: bool = True) -> None:
        """To every level of cache, or to all but the nearest."""
        hints = [ir.Constant(I32, hint) for hint in (0, 3 if nearest else 2, 1)]  # read, locality, data
        self.external("llvm.prefetch.p0", VOID, [POINTER, I32, I32, I32], [pointer, *hints])

    # vectors of 16

    def floats(self, value: float) -> Value:
        return ir.Constant(F32X16, [ir.Constant(F32, value)] * LANES)

    def ints(self, value: int | Sequence[int]) -> Value:
        values = [value] * LANES if isinstance(value, int) else list(value)
        return ir.Constant(I32X16, values)

    def splat(self, value: Value) -> Value:
        kind = ir.VectorType(value.type, LANES)
        first = self.build.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        return self.build.shuffle_vector(first, ir.Constant(kind, ir.Undefined), self.ints(0))

    def load_floats(self, pointer: Value, index: Value | int = 0) -> Value:
        """16 floats from element `index` on."""
        return self.load(F32X16, self.at(pointer, index, F32), 4)

    def store_floats(self, value: Value, pointer: Value, index: Value | int = 0) -> None:
        self.store(value, self.at(pointer, index, F32), 4)

    def broadcast(self, pointer: Value, index: Value | int = 0) -> Value:
        """One float of memory in all lanes."""
        return self.splat(self.load_at(F32, pointer, index))

    def multiply_add(self, left: Value, right: Value, addend: Value) -> Value:
        """left * right + addend: fused where the instruction set fuses, and then always."""
        if not self.isa.has_fma:
            return self.build.fadd(self.build.fmul(left, right), addend)
        suffix = "v16f32" if left.type == F32X16 else "f32"
        return self.external(f"llvm.fma.{suffix}", left.type, [left.type] * 3, [left, right, addend])

    def magnitude(self, value: Value) -> Value:
        return self.external("llvm.fabs.v16f32", F32X16, [F32X16], [value])

    def larger_float(self, left: Value, right: Value) -> Value:
        """The larger; `left` when `right` is NaN. One instruction, for what a later NaN will reveal anyway."""
        return self.build.select(self.build.fcmp_ordered(">", right, left), right, left)

    def larger_integer(self, left: Value, right: Value) -> Value:
        return self.build.select(self.build.icmp_signed(">", left, right), left, right)

    def square_root(self, value: Value) -> Value:
        return self.external("llvm.sqrt.f32", F32, [F32], [value])

    def reduce(self, value: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """All lanes to one, by halves: one fixed order."""
        width = LANES
        while width > 1:
            width //= 2
            undefined = ir.Constant(value.type, ir.Undefined)
            halves = [
                self.build.shuffle_vector(
                    value, undefined, ir.Constant(ir.VectorType(I32, width), list(range(first, first + width)))
                )
                for first in (0, width)
            ]
            value = combine(*halves) if width > 1 else combine(*(self.first_lane(half) for half in halves))
        return value

    def first_lane(self, vector: Value) -> Value:
        return self.build.extract_element(vector, ir.Constant(I32, 0))

    def reduce_sum(self, value: Value) -> Value:
        return self.reduce(value, self.build.add if value.type == I32X16 else self.build.fadd)

    # f16

    def load_halves(self, pointer: Value, index: Value | int = 0) -> Value:
        """16 finite f16 values, widened."""
        address = self.at(pointer, index, I16)
        if self.isa.has_half:
            return self.build.fpext(self.load(F16X16, address, 2), F32X16)
        bits = self.build.zext(self.load(I16X16, address, 2), I32X16)
        magnitude = self.build.shl(self.build.and_(bits, self.ints(0x7FFF)), self.ints(13))
        sign = self.build.shl(self.build.and_(bits, self.ints(0x8000)), self.ints(16))
        # The exponent is 112 too small; a multiplication mends it, and is right for subnormals as well.
        scaled = self.build.fmul(self.build.bitcast(magnitude, F32X16), self.floats(2.0**112))
        return self.build.bitcast(self.build.or_(self.build.bitcast(scaled, I32X16), sign), F32X16)

    def to_halves(self, value: Value) -> Value:
        """16 floats to the bits of f16, to nearest even, saturating: what is stored is always finite."""
        limit = 65504.0
        low, high = self.floats(-limit), self.floats(limit)
        value = self.build.select(self.build.fcmp_ordered(">", value, low), value, low)  # NaN becomes finite too
        value = self.build.select(self.build.fcmp_ordered("<", value, high), value, high)
        if self.isa.has_half:
            return self.build.bitcast(self.build.fptrunc(value, F16X16), I16X16)
        build, bits = self.build, self.build.bitcast(value, I32X16)
        magnitude = build.and_(bits, self.ints(0x7FFFFFFF))
        sign = build.and_(build.lshr(bits, self.ints(16)), self.ints(0x8000))
        odd = build.and_(build.lshr(magnitude, self.ints(13)), self.ints(1))
        rounded = build.add(build.add(magnitude, self.ints(0xFFF)), odd)
        normal = build.lshr(build.sub(rounded, self.ints(112 << 23)), self.ints(13))
        units = build.fmul(build.bitcast(magnitude, F32X16), self.floats(2.0**24))  # an f16 subnormal counts these
        small = build.sub(self.nearest_bits(units), self.ints(0x4B400000))
        chosen = build.select(build.icmp_unsigned("<", magnitude, self.ints(113 << 23)), small, normal)
        return build.trunc(build.or_(chosen, sign), I16X16)

    # functions

    def nearest_bits(self, value: Value) -> Value:
        """Integer lanes whose low bits are those of the nearest integer; the magic's own bits lie above."""
        return self.build.bitcast(self.build.fadd(value, self.floats(ROUND_MAGIC)), I32X16)

    def exponential(self, value: Value) -> Value:
        """e^x to about one unit in the last place; 0 below -87, at most e^88; NaN stays NaN."""
        build = self.build
        tiny = build.fcmp_ordered("<", value, self.floats(-87.0))
        clamped = build.select(tiny, self.floats(-87.0), value)
        clamped = build.select(build.fcmp_ordered(">", clamped, self.floats(88.0)), self.floats(88.0), clamped)
        shifted = build.fadd(build.fmul(clamped, self.floats(1 / math.log(2))), self.floats(ROUND_MAGIC))
        whole = build.fsub(shifted, self.floats(ROUND_MAGIC))
        high = 0.693359375  # ln 2 in two parts: the first has few bits, so its product is exact
        rest = self.multiply_add(whole, self.floats(-high), clamped)
        rest = self.multiply_add(whole, self.floats(high - math.log(2)), rest)
        series = self.floats(1 / math.factorial(7))
        for power in range(6, -1, -1):
            series = self.multiply_add(series, rest, self.floats(1 / math.factorial(power)))
        exponent = build.shl(build.bitcast(shifted, I32X16), self.ints(23))
        result = build.bitcast(build.add(build.bitcast(series, I32X16), exponent), F32X16)
        return build.select(tiny, self.floats(0.0), result)

    def power_of_two(self, value: Value, degree: int) -> Value:
        """2^x for x from -127 (which gives 0) to 127, by a series of this degree: exactly 1 at 0; NaN stays NaN."""
        build, (*lower, series) = self.build, [self.floats(number) for number in POWER_SERIES[degree]]
        shifted = build.fadd(value, self.floats(ROUND_MAGIC))
        rest = build.fsub(value, build.fsub(shifted, self.floats(ROUND_MAGIC)))
        for coefficient in reversed(lower):
            series = self.multiply_add(series, rest, coefficient)
        exponent = build.shl(build.bitcast(shifted, I32X16), self.ints(23))
        return build.bitcast(build.add(build.bitcast(series, I32X16), exponent), F32X16)

    def sigmoid_product(self, factor: Value, argument: Value) -> Value:
        """factor / (1 + e^-argument), to a few units in the last place. Beyond 87 nothing changes but what is next to 0
        anyway."""
        build = self.build
        power = self.larger_float(build.fmul(argument, self.floats(-1 / math.log(2))), self.floats(-126.0))
        power = build.select(build.fcmp_ordered(">", power, self.floats(126.0)), self.floats(126.0), power)
        below = build.fadd(self.power_of_two(power, 5), self.floats(1.0))
        return build.fmul(factor, self.reciprocal(below))

    def reciprocal(self, value: Value) -> Value:
        """1 / x for x from 1 to 2^127; by an estimate and a step of Newton's where that is cheaper than dividing."""
        if self.isa.name != "avx512-vnni":
            return self.build.fdiv(self.floats(1.0), value)
        mask = ir.Constant(I16, -1)
        kinds = [F32X16, F32X16, I16]
        near = self.external("llvm.x86.avx512.rcp14.ps.512", F32X16, kinds, [value, self.floats(0.0), mask])
        error = self.multiply_add(self.build.fneg(value), near, self.floats(1.0))
        return self.multiply_add(near, error, near)

    def highest_everywhere(self, value: Value) -> Value:
        """The largest of 16 integers, in all lanes: never by way of a scalar."""
        for distance in (8, 4, 2, 1):
            turned = self.ints([(lane ^ distance) for lane in range(LANES)])
            value = self.larger_integer(value, self.build.shuffle_vector(value, value, turned))
        return value

    def soft_cap(self, value: Value, cap: Value) -> Value:
        """cap * tanh(value / cap), by way of e^x."""
        doubled = self.build.fmul(self.build.fdiv(value, cap), self.floats(2.0))
        below = self.build.fadd(self.exponential(doubled), self.floats(1.0))
        tanh = self.build.fsub(self.floats(1.0), self.build.fdiv(self.floats(2.0), below))
        return self.build.fmul(cap, tanh)
