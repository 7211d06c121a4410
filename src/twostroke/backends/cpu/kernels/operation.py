"""The shape every operation of the tape shares: its argument record, the step's record, and this thread's part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from twostroke.backends.cpu.arguments import (
    ALIASED_BYTES,
    BYTE_MIDDLE,
    FEW_ROWS,
    HALF_OFFSET,
    MOST_LACKING_ROWS,
    ORIGIN,
    START_MIDDLE,
    STRIDE_PADDING_BYTES,
    OperandField,
)
from twostroke.backends.cpu.kernels.emitter import (
    F32,
    F32X16,
    I1,
    I8X16,
    I16,
    I32,
    I32X16,
    I64,
    POINTER,
    Emitter,
    Value,
)

PEAK_RATIO = 3.0
"""How much larger than the second largest of its group a value must be to get a second digit. Smaller is closer to
float32 and slower (docs/performance.md has the figures)."""

_MANY_ROWS_OF_A_THREAD = 96
_MANY_ROWS_UNIT, _FEW_ROWS_UNIT = 4, 16
"""Rows are cut between threads at multiples of these, the heights of the tallest tiles."""

_SMALLEST_SCALE_BITS, _LARGEST_SCALE_BITS = (exponent + 127 << 23 for exponent in (-66, 127))

PARAMETERS = (
    ("arguments", POINTER),
    ("step", POINTER),
    ("part", I64),
    ("parts", I64),
    ("thread", I64),
    ("threads", I64),
    ("scratch", POINTER),
)
"""The part of the work that is wanted, of how many; the thread that does it, of how many: its copies, its scratch."""


class Operation:
    def __init__(self, emitter: Emitter, values: list[Value], stay: Value | None = None) -> None:
        """`stay`: whether the rows of this operation's operands stay with their threads."""
        self.emitter, self.stay = emitter, stay
        self.arguments, self.step, self.part, self.parts, self.thread, self.threads, self.scratch = values

    def integer(self, field: IntEnum) -> Value:
        return self.emitter.load_at(I64, self.arguments, int(field))

    def address(self, field: IntEnum) -> Value:
        return self.emitter.pointer(self.integer(field))

    def float(self, field: IntEnum) -> Value:
        bits = self.emitter.build.trunc(self.integer(field), I32)
        return self.emitter.build.bitcast(bits, F32)

    def step_integer(self, field: Value | int) -> Value:
        return self.emitter.load_at(I64, self.step, field)

    def step_address(self, field: Value | int) -> Value:
        return self.emitter.pointer(self.step_integer(field))

    def share(self, count: Value) -> tuple[Value, Value]:
        """The wanted part of `count` items, a contiguous one."""
        e = self.emitter
        first = e.div(e.mul(count, self.part), self.parts)
        return first, e.div(e.mul(count, e.add(self.part, 1)), self.parts)

    def operand_address(self, field: OperandField) -> Value:
        """In this thread's copy, where threads have one each; where a part's rows are kept apart, so that its own
        rows lie at their places from here on."""
        e = self.emitter
        assert self.stay is not None
        apart = e.build.select(self.stay, self.integer(OperandField.APART_BYTES), e.integer(0))
        copy = e.mul(self.thread, self.integer(OperandField.THREAD_BYTES))
        return e.pointer(e.add(self.integer(field), e.add(copy, e.mul(self.part, apart))))

    def shifted(self, field: IntEnum) -> Operation:
        """This operation, its argument record read from another field on."""
        arguments = self.emitter.at(self.arguments, int(field), I64)
        rest = [self.step, self.part, self.parts, self.thread, self.threads, self.scratch]
        return Operation(self.emitter, [arguments, *rest], self.stay)

    def rows_in(self, field: IntEnum) -> Value:
        """How many rows this operation has: its argument `field` says which field of the step's record has it."""
        rows = self.step_integer(self.integer(field))
        self.stay = rows_stay(self.emitter, rows, self.threads)
        return rows

    def own_rows(self, count: Value) -> tuple[Value, Value]:
        """The wanted part of `count` rows: where rows stay, the same in every operation."""
        e, select = self.emitter, self.emitter.build.select
        few = e.build.icmp_signed("<", count, e.integer(FEW_ROWS))
        cut = select(few, e.integer(_FEW_ROWS_UNIT), e.integer(_MANY_ROWS_UNIT))
        unit = select(rows_stay(e, count, self.threads), cut, e.integer(1))
        first, last = self.share(e.div(e.add(count, e.sub(unit, 1)), unit))
        return e.mul(first, unit), e.smaller(e.mul(last, unit), count)

    def share_rows(self, count: Value) -> tuple[Value, Value]:
        """The rows of an operand to be written: a part of them, or all where the thread has a copy of its own."""
        e = self.emitter
        own = e.is_nonzero(self.integer(OperandField.THREAD_BYTES))
        first, last = self.own_rows(count)
        return e.build.select(own, e.integer(0), first), e.build.select(own, count, last)


@contextmanager
def operation(emitter: Emitter, name: str) -> Iterator[Operation]:
    with emitter.function(name, PARAMETERS) as values:
        yield Operation(emitter, values)


def rows_stay(e: Emitter, rows: Value, threads: Value) -> Value:
    """Whether products are cut by rows too: a thread then only reads rows that it wrote itself, threads need not wait
    for each other, and cores that share no cache (two of a virtual machine, say) send no rows to each other. What it
    costs is that every thread reads all weights. Many rows for each thread outweigh that; of few, which are faster the
    taller their tiles are, equally many of the tallest do."""
    build = e.build
    tiles = e.div(e.add(rows, _FEW_ROWS_UNIT - 1), _FEW_ROWS_UNIT)
    even = build.icmp_signed("==", e.rem(tiles, threads), e.integer(0))
    whole = build.icmp_signed("<=", e.sub(e.mul(tiles, _FEW_ROWS_UNIT), rows), e.integer(MOST_LACKING_ROWS))
    few = build.icmp_signed("<", rows, e.integer(FEW_ROWS))
    many = build.icmp_signed(">=", rows, e.mul(threads, _MANY_ROWS_OF_A_THREAD))
    return build.or_(many, build.and_(few, build.and_(even, whole)))


def quantised_stride(e: Emitter, width: Value) -> Value:
    """As `arguments.quantised_stride`."""
    aliased = e.build.icmp_signed("==", e.rem(width, ALIASED_BYTES), e.integer(0))
    return e.build.select(aliased, e.add(width, STRIDE_PADDING_BYTES), width)


def sum_pairs(e: Emitter, width: Value) -> Value:
    """Pairs of groups in a row of `OperandField.SUMS`; the last one may have no second."""
    return e.div(e.add(width, 63), 64)


class OperandWriter:
    """Writes one row of a matrix product's input, as floats, quantised in groups of 32, or both."""

    def __init__(self, op: Operation, row: Value, width: Value) -> None:
        e = self._emitter = op.emitter
        self._has_floats = e.is_nonzero(op.integer(OperandField.FLOATS))
        self._has_quantised = e.is_nonzero(op.integer(OperandField.QUANTISED))
        self._has_halves = e.is_nonzero(op.integer(OperandField.HALF_OFFSETS))
        groups = e.mul(row, e.div(width, 32))
        self._floats = e.at(op.operand_address(OperandField.FLOATS), e.mul(row, width), F32)
        self._quantised = e.at(op.operand_address(OperandField.QUANTISED), e.mul(row, quantised_stride(e, width)))
        self._origins = e.at(op.operand_address(OperandField.ORIGINS), groups, F32)
        self._sums = e.at(op.operand_address(OperandField.SUMS), e.mul(row, sum_pairs(e, width)), I32)
        self._starts, self._byte_starts, self._peaks, self._peak_digits = (
            e.at(op.operand_address(field), groups, I32)
            for field in (
                OperandField.STARTS,
                OperandField.BYTE_STARTS,
                OperandField.PEAKS,
                OperandField.PEAK_DIGITS,
            )
        )
        self._half_offsets = e.at(op.operand_address(OperandField.HALF_OFFSETS), e.mul(groups, 2), I32)

    def write_group(self, group: Value, low: Value, high: Value) -> None:
        """The 32 values of a group, in two vectors."""
        e = self._emitter
        with e.when(self._has_floats):
            e.store_floats(low, self._floats, e.mul(group, 32))
            e.store_floats(high, self._floats, e.add(e.mul(group, 32), 16))
        with e.when(self._has_quantised):
            self._quantise(group, (low, high))

    def _quantise(self, group: Value, halves: tuple[Value, Value]) -> None:
        """A value far larger than the rest of its group would cost them their precision. Then the scale is that of
        the second largest, and the largest, the group's peak, has two digits: 128 * upper + lower. NaN and infinity
        make the scale so, too: they are seen in the end."""
        e = self._emitter
        build = e.build
        # The bits of magnitudes are ordered as integers as they are as floats, NaN above infinity: one instruction.
        magnitudes = [build.and_(build.bitcast(half, I32X16), e.ints(0x7FFFFFFF)) for half in halves]
        largest = build.bitcast(e.highest_everywhere(e.larger_integer(*magnitudes)), F32X16)
        near = self._mask_of_at_least(magnitudes, build.fmul(largest, e.floats(1 / PEAK_RATIO)))
        others = build.and_(near, build.sub(near, I32(1)))  # all but the first of them
        alone = build.and_(build.icmp_signed("==", others, I32(0)), build.icmp_signed("!=", near, I32(0)))
        with build.if_else(alone) as (has_peak, has_none):
            with has_peak:
                self._write_with_peak(group, halves, magnitudes, largest, near)
            with has_none:
                scale = self._scale(build.fmul(largest, e.floats(1 / 127)))
                numbers = self._numbers(halves, scale)
                self._write_numbers(group, numbers)
                self._write_sums(group, scale, numbers)
                e.store(I32(0), e.at(self._peak_digits, group, I32), 4)

    def _write_with_peak(
        self, group: Value, halves: tuple[Value, Value], magnitudes: list[Value], largest: Value, near: Value
    ) -> None:
        e, build = self._emitter, self._emitter.build
        peak = e.external("llvm.cttz.i32", I32, [I32, I1], [near, I1(1)])
        lanes = [build.icmp_signed("==", e.ints(range(first, first + 16)), e.splat(peak)) for first in (0, 16)]
        others = [build.select(at, e.ints(0), m) for at, m in zip(lanes, magnitudes, strict=True)]
        second = build.bitcast(e.highest_everywhere(e.larger_integer(*others)), F32X16)
        beside = e.larger_float(build.fmul(second, e.floats(1 / 127)), build.fmul(largest, e.floats(1 / (127 * 128))))
        scale = self._scale(beside)
        numbers = self._numbers(halves, scale)
        at_peak = [build.select(at, n, e.ints(0)) for at, n in zip(lanes, numbers, strict=True)]
        upper = build.ashr(build.add(e.reduce_sum(build.add(*at_peak)), I32(64)), I32(7))
        raised = e.splat(build.shl(upper, I32(7)))
        self._write_numbers(
            group, [build.sub(n, build.select(at, raised, e.ints(0))) for at, n in zip(lanes, numbers, strict=True)]
        )
        self._write_sums(group, scale, numbers)
        self._write_peak(group, peak, upper)

    def _mask_of_at_least(self, magnitudes: list[Value], least: Value) -> Value:
        """A bit for each of the 32 places whose magnitude is at least this; none where it is NaN."""
        build = self._emitter.build
        found = [build.fcmp_ordered(">=", build.bitcast(m, F32X16), least) for m in magnitudes]
        low, high = (build.zext(build.bitcast(bits, I16), I32) for bits in found)
        return build.or_(low, build.shl(high, I32(16)))

    def _scale(self, wanted: Value) -> Value:
        """The power of two that is not below, in all lanes; of what is not finite, one whose origin is not either."""
        e, build = self._emitter, self._emitter.build
        bits = e.larger_integer(build.bitcast(wanted, I32X16), e.ints(_SMALLEST_SCALE_BITS))
        largest = e.ints(_LARGEST_SCALE_BITS)
        bits = build.select(build.icmp_signed("<", bits, largest), bits, largest)
        power = build.and_(build.add(bits, e.ints(0x7FFFFF)), e.ints(0x7F800000))
        return build.bitcast(power, F32X16)

    def _numbers(self, halves: tuple[Value, Value], scale: Value) -> list[Value]:
        """Values over the scale, to the nearest integer."""
        e, build = self._emitter, self._emitter.build
        inverse = build.bitcast(build.sub(e.ints(0x7F000000), build.bitcast(scale, I32X16)), F32X16)
        return [build.sub(e.nearest_bits(build.fmul(half, inverse)), e.ints(0x4B400000)) for half in halves]

    def _write_numbers(self, group: Value, numbers: list[Value]) -> None:
        e, build = self._emitter, self._emitter.build
        for index, number in enumerate(numbers):
            e.store(build.trunc(number, I8X16), e.at(self._quantised, e.add(e.mul(group, 32), 16 * index)))

    def _write_sums(self, group: Value, scale: Value, numbers: list[Value]) -> None:
        e, build = self._emitter, self._emitter.build
        origin = e.first_lane(build.fmul(scale, e.floats(ORIGIN)))
        e.store(origin, e.at(self._origins, group, F32), 4)
        count = e.reduce_sum(build.add(*numbers))
        sum_bits = build.bitcast(build.fmul(build.sitofp(count, F32), e.first_lane(scale)), I32)
        rounded = build.lshr(build.add(sum_bits, I32(0x8000)), I32(16))
        e.store(build.trunc(rounded, I16), e.at(self._sums, group, I16), 2)
        for middle, starts in ((START_MIDDLE, self._starts), (BYTE_MIDDLE, self._byte_starts)):
            start = build.sub(build.bitcast(origin, I32), build.mul(count, I32(middle)))
            e.store(start, e.at(starts, group, I32), 4)
        with e.when(self._has_halves):
            first = e.reduce_sum(numbers[0])
            for index, part in enumerate((first, build.sub(count, first))):
                place = e.at(self._half_offsets, e.add(e.mul(group, 2), index), I32)
                e.store(build.mul(part, I32(-HALF_OFFSET)), place, 4)

    def _write_peak(self, group: Value, peak: Value, upper: Value) -> None:
        e, build = self._emitter, self._emitter.build
        byte = build.shl(build.and_(peak, I32(3)), I32(3))
        step = build.or_(build.lshr(build.and_(peak, I32(12)), I32(1)), build.lshr(peak, I32(4)))
        e.store(build.or_(peak, build.shl(step, I32(5))), e.at(self._peaks, group, I32), 4)
        e.store(build.shl(build.and_(upper, I32(255)), byte), e.at(self._peak_digits, group, I32), 4)
