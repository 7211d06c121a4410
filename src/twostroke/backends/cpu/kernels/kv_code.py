"""One class for each kind of KV: how a token is written into its block, and how queries and weights are multiplied
with what is there. `attention.py` holds what all kinds share: spans, masks, softmax, merging.
A block of one KV head holds K, then V, then scales where the kind has them; each in runs of 16 tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from llvmlite import ir

from twostroke.backends.cpu.kernels import numbers
from twostroke.backends.cpu.kernels.dot import BIAS, dot_biased, dot_words, unbiases_itself
from twostroke.backends.cpu.kernels.emitter import (
    F32,
    F32X16,
    I8,
    I8X16,
    I8X64,
    I16,
    I16X16,
    I32,
    I32X16,
    ROUND_MAGIC,
    Emitter,
    Value,
)
from twostroke.backends.cpu.kv_kind import STEPS_A_DOUBLING, KVKind
from twostroke.backends.cpu.shape import RUN, KernelShape

_LARGEST_F16 = 65504.0
LARGEST_INT8, _LARGEST_WEIGHT = 127.0, 32767.0
_SMALLEST_TOP = 1e-15
LOG_BEND, LOG_ROOM = 0.3444, 0.012
"""The logarithm of 1 + x is x + 0.3444 x (1 - x) for x up to 1, to within 0.008; and truncation takes a step or two."""


def kv_code(e: Emitter, shape: KernelShape) -> KVCode:
    kinds: dict[KVKind, type[HalfCode | PairCode | QuantisedCode]] = {
        KVKind.F16: HalfCode,
        KVKind.BF16: PairCode,
        KVKind.INT8: QuantisedCode,
    }
    return kinds[shape.kv_kind](e, shape)


class KVCode(ABC):
    """A step multiplies one vector of K (16 keys) or V (16 dimensions) with one broadcast of a query or a weight."""

    dims_a_step: int
    """That a step of q . k sums."""
    keys_a_step: int
    """That a step of the weighted sum takes."""
    query_bytes: int
    """Of one dimension of a prepared query."""
    weight_bytes: int
    series_degree: int
    """Of the series for weights: what their rounding hides need not be computed."""
    total_kind: Any = F32X16
    """What steps are added up in."""

    def __init__(self, e: Emitter, shape: KernelShape) -> None:
        self._e, self._shape = e, shape

    @property
    def run_bytes(self) -> int:
        """K or V of one run."""
        return RUN * self._shape.head_dim * self._shape.kv_kind.element_bytes

    @property
    def query_row_bytes(self) -> int:
        """A prepared query vector."""
        return self._shape.head_dim * self.query_bytes

    @abstractmethod
    def store(self, key: Value, value: Value, block: Value, offset: Value) -> None:
        """Writes one token's K and V, f32 [head_dim] each, to place `offset` of a block."""

    @abstractmethod
    def prepare_query(self, source: Value, factor: Value, target: Value) -> None:
        """A query vector times a factor, as steps read it."""

    @abstractmethod
    def load_key(self, keys: Value, step: Value) -> Value: ...

    @abstractmethod
    def load_value(self, values: Value, step: Value, column: Value) -> Value:
        """16 dimensions, from 16 * column on."""

    @abstractmethod
    def broadcast(self, numbers: Value, step: Value) -> Value:
        """What a step takes of a prepared query or of stored weights, in all lanes."""

    @abstractmethod
    def multiply(self, total: Value, left: Value, right: Value) -> Value: ...

    @abstractmethod
    def store_weights(self, weights: Value, shares: Value | None, place: Value, total: Value) -> Value:
        """Stores the weights of 16 keys; returns the total with these added, each times its share where there are
        shares: what its value's scale made of it is then undone."""

    def store_key(self, key: Value, block: Value, offset: Value) -> None:
        """Writes what is kept of a token where that is one vector, f32 [head_dim]."""
        raise NotImplementedError

    @property
    def nothing(self) -> Value:
        """What a weighted sum begins with."""
        return ir.Constant(self.total_kind, None) if self.total_kind == I32X16 else self._e.floats(0.0)

    def dot_start(self, query: Value) -> Value:
        """What a sum of q . k begins with."""
        return self.nothing

    def query_scale(self, query: Value) -> Value:
        """Of a prepared query, of kinds that have scales."""
        raise NotImplementedError

    def multiply_value(self, total: Value, value: Value, weight: Value) -> Value:
        return self.multiply(total, value, weight)

    def weighted_sum(self, total: Value) -> Value:
        """What steps added up, as floats."""
        return total


class HalfCode(KVCode):
    """f16, multiplied as f32. K is [head_dim][16 keys], V is [16 keys][head_dim]."""

    dims_a_step = keys_a_step = 1
    query_bytes = weight_bytes = 4
    series_degree = 6

    def store(self, key: Value, value: Value, block: Value, offset: Value) -> None:
        e, head_dim = self._e, self._shape.head_dim
        self.store_key(key, block, offset)
        values = e.at(e.at(block, self._shape.value_offset), e.mul(offset, head_dim), I16)
        for first in range(0, head_dim, 16):
            e.store(e.to_halves(e.load_floats(value, first)), e.at(values, first, I16), 2)

    def store_key(self, key: Value, block: Value, offset: Value) -> None:
        e, head_dim = self._e, self._shape.head_dim
        run = e.at(block, e.mul(e.div(offset, RUN), RUN * head_dim), I16)
        column = e.at(run, e.rem(offset, RUN), I16)
        with e.loop(0, head_dim, 16) as first:
            halves = e.to_halves(e.load_floats(key, first))
            for lane in range(16):
                number = e.build.extract_element(halves, ir.Constant(I32, lane))
                e.store(number, e.at(column, e.mul(e.add(first, lane), RUN), I16), 2)

    def prepare_query(self, source: Value, factor: Value, target: Value) -> None:
        e = self._e
        for place in range(0, self._shape.head_dim, 16):
            e.store_floats(e.build.fmul(e.load_floats(source, place), factor), target, place)

    def load_key(self, keys: Value, step: Value) -> Value:
        return self._e.load_halves(keys, self._e.mul(step, RUN))

    def load_value(self, values: Value, step: Value, column: Value) -> Value:
        e = self._e
        return e.load_halves(values, e.add(e.mul(step, self._shape.value_dim), e.mul(column, 16)))

    def broadcast(self, numbers: Value, step: Value) -> Value:
        return self._e.broadcast(numbers, step)

    def multiply(self, total: Value, left: Value, right: Value) -> Value:
        return self._e.multiply_add(left, right, total)

    def store_weights(self, weights: Value, shares: Value | None, place: Value, total: Value) -> Value:
        self._e.store_floats(weights, place)
        return self._e.build.fadd(total, weights)


class FloatCode(HalfCode):
    """f32, of keys and values that were made of latents and are kept nowhere."""

    def load_key(self, keys: Value, step: Value) -> Value:
        return self._e.load_floats(keys, self._e.mul(step, RUN))

    def load_value(self, values: Value, step: Value, column: Value) -> Value:
        e = self._e
        return e.load_floats(values, e.add(e.mul(step, self._shape.value_dim), e.mul(column, 16)))


class GroupedCode(KVCode):
    """K is [head_dim / group][16 keys][group], a group being `dims_a_step` numbers in 32 bits; V is
    [16 keys / group][head_dim][group], a group being `keys_a_step` numbers."""

    def _store_part(self, key: Value, value: Value, first: int, block: Value, offset: Value) -> None:
        """16 dimensions of K and V, from `first` on, as they are stored."""
        e, shape = self._e, self._shape
        run, lane = e.div(offset, RUN), e.rem(offset, RUN)
        self._store_key_part(key, e.integer(first), block, offset)
        group, element = self.keys_a_step, value.type.element
        values = e.at(e.at(block, shape.value_offset), e.mul(run, self.run_bytes))
        row = e.at(values, e.add(e.mul(e.div(lane, group), group * shape.head_dim), e.rem(lane, group)), element)
        for index in range(16):
            number = e.build.extract_element(value, ir.Constant(I32, index))
            e.store(number, e.at(row, group * (first + index), element), 1)

    def _store_key_part(self, key: Value, first: Value, block: Value, offset: Value) -> None:
        e, group = self._e, self.dims_a_step
        run, lane = e.div(offset, RUN), e.rem(offset, RUN)
        column = e.at(e.at(block, e.mul(run, self.run_bytes)), lane, I32)
        groups = e.build.bitcast(key, ir.VectorType(I32, 16 // group))
        for index in range(16 // group):
            number = e.build.extract_element(groups, ir.Constant(I32, index))
            e.store(number, e.at(column, e.mul(e.add(e.div(first, group), index), RUN), I32), 1)

    def load_key(self, keys: Value, step: Value) -> Value:
        return self._e.load(I32X16, self._e.at(keys, self._e.mul(step, RUN), I32), 4)


class PairCode(GroupedCode):
    """bf16 in pairs. Queries are rounded once, and weights too; the sum that divides is that of the rounded weights, so
    that means stay means."""

    dims_a_step = keys_a_step = 2
    query_bytes = weight_bytes = 2
    series_degree = 3

    def store(self, key: Value, value: Value, block: Value, offset: Value) -> None:
        for first in range(0, self._shape.head_dim, 16):
            key_part, value_part = (
                numbers.to_bf16(self._e, numbers.saturate(self._e, self._e.load_floats(x, first), numbers.LARGEST_BF16))
                for x in (key, value)
            )
            self._store_part(key_part, value_part, first, block, offset)

    def store_key(self, key: Value, block: Value, offset: Value) -> None:
        e = self._e
        with e.loop(0, self._shape.head_dim, 16) as first:
            part = numbers.to_bf16(e, numbers.saturate(e, e.load_floats(key, first), numbers.LARGEST_BF16))
            self._store_key_part(part, first, block, offset)

    def prepare_query(self, source: Value, factor: Value, target: Value) -> None:
        e = self._e
        for place in range(0, self._shape.head_dim, 16):
            rounded = numbers.to_bf16(e, e.build.fmul(e.load_floats(source, place), factor))
            e.store(rounded, e.at(target, place, I16), 2)

    def load_value(self, values: Value, step: Value, column: Value) -> Value:
        e = self._e
        return e.load(I32X16, e.at(values, e.add(e.mul(step, self._shape.value_dim), e.mul(column, 16)), I32), 4)

    def broadcast(self, numbers: Value, step: Value) -> Value:
        return self._e.splat(self._e.load_at(I32, numbers, step))

    def multiply(self, total: Value, left: Value, right: Value) -> Value:
        return numbers.dot_pairs(self._e, total, left, right)

    def store_weights(self, weights: Value, shares: Value | None, place: Value, total: Value) -> Value:
        rounded = numbers.to_bf16(self._e, weights)
        self._e.store(rounded, place, 2)
        ones = self._e.ints(0x3F803F80)  # pairs of 1.0
        return numbers.dot_pairs(self._e, total, numbers.as_pairs(self._e, rounded), ones)


class QuantisedCode(GroupedCode):
    """8 bits and a scale for each token. Queries are of 8 bits too, with a scale for each head, and products are of
    integers, exact. Weights are of 16 bits, times the scales of their values, the largest of a span being the largest
    number: the many small ones of a long context are not lost. K is stored as q + 128, V as it is."""

    dims_a_step, keys_a_step = 4, 2
    query_bytes = 1
    weight_bytes = 2
    series_degree = 3
    total_kind = I32X16

    @property
    def query_row_bytes(self) -> int:
        """With the scale and the start of sums behind the numbers."""
        return self._shape.head_dim + 16

    def store(self, key: Value, value: Value, block: Value, offset: Value) -> None:
        e, shape = self._e, self._shape
        key_bits, value_log = rounded_up_to_bf16(e, self._scale_of(key)), log_of_scale(e, self._scale_of(value))
        scales = e.at(e.at(block, shape.scales_offset), offset, I16)
        e.store(e.build.trunc(e.build.lshr(key_bits, ir.Constant(I32, 16)), I16), scales, 2)
        e.store(e.build.trunc(value_log, I16), e.at(scales, shape.block_size, I16), 2)
        log = e.build.fmul(e.build.sitofp(value_log, F32), F32(-1 / STEPS_A_DOUBLING))
        inverses = (
            e.splat(e.build.fdiv(F32(1.0), e.build.bitcast(key_bits, F32))),
            numbers.power_of_two(e, e.splat(log), 6),
        )
        for first in range(0, shape.head_dim, 16):
            key_part, value_part = (
                e.build.trunc(e.nearest_bits(e.build.fmul(self._saturated(source, first), inverse)), I8X16)
                for source, inverse in zip((key, value), inverses, strict=True)
            )
            biased = e.build.xor(key_part, ir.Constant(I8X16, [-BIAS] * 16))
            self._store_part(biased, value_part, first, block, offset)

    def _saturated(self, source: Value, first: int) -> Value:
        return numbers.saturate(self._e, self._e.load_floats(source, first), _LARGEST_F16)

    def _scale_of(self, source: Value) -> Value:
        """The largest magnitude over 127."""
        e = self._e
        largest = e.floats(_SMALLEST_TOP)
        for first in range(0, self._shape.head_dim, 16):
            largest = e.larger_float(largest, e.magnitude(self._saturated(source, first)))
        return e.build.fmul(e.reduce(largest, e.larger_float), F32(1 / LARGEST_INT8))

    def prepare_query(self, source: Value, factor: Value, target: Value) -> None:
        """A query that is not finite gets a scale that is not, which scores reveal."""
        e = self._e
        places = range(0, self._shape.head_dim, 16)
        largest, poison = e.floats(_SMALLEST_TOP), e.floats(0.0)
        for place in places:
            number = e.build.fmul(e.load_floats(source, place), factor)
            largest = e.larger_float(largest, e.magnitude(number))
            poison = e.multiply_add(number, e.floats(0.0), poison)
        top = e.reduce(largest, e.larger_float)
        inverse, total = e.splat(e.build.fdiv(F32(LARGEST_INT8), top)), e.ints(0)
        for place in places:
            number = e.build.fmul(e.build.fmul(e.load_floats(source, place), factor), inverse)
            rounded = e.build.trunc(e.nearest_bits(number), I8X16)
            e.store(rounded, e.at(target, place))
            total = e.build.add(total, e.build.sext(rounded, I32X16))
        behind = e.at(target, self._shape.head_dim)
        e.store(e.build.fadd(e.build.fmul(top, F32(1 / LARGEST_INT8)), e.reduce_sum(poison)), behind, 4)
        bias = 0 if unbiases_itself(e) else -BIAS
        e.store(e.build.mul(e.reduce_sum(total), ir.Constant(I32, bias)), e.at(behind, 4), 4)

    def query_scale(self, query: Value) -> Value:
        return self._e.load(F32, self._e.at(query, self._shape.head_dim), 4)

    def dot_start(self, query: Value) -> Value:
        """Stored keys are 128 too large."""
        return self._e.splat(self._e.load(I32, self._e.at(query, self._shape.head_dim + 4), 4))

    def load_value(self, values: Value, step: Value, column: Value) -> Value:
        e = self._e
        place = e.at(values, e.mul(e.add(e.mul(step, self._shape.head_dim), e.mul(column, 16)), 2))
        words = e.build.sext(e.load(ir.VectorType(I8, 32), place), ir.VectorType(I16, 32))
        return e.build.bitcast(words, I32X16)

    def broadcast(self, numbers: Value, step: Value) -> Value:
        """Products spread them."""
        return self._e.load_at(I32, numbers, step)

    def multiply(self, total: Value, left: Value, right: Value) -> Value:
        return dot_biased(self._e, total, self._e.build.bitcast(left, I8X64), right)

    def multiply_value(self, total: Value, value: Value, weight: Value) -> Value:
        return dot_words(self._e, total, value, weight)

    def store_weights(self, weights: Value, shares: Value | None, place: Value, total: Value) -> Value:
        e = self._e
        bits = e.build.bitcast(e.multiply_add(weights, e.floats(_LARGEST_WEIGHT), e.floats(ROUND_MAGIC)), I32X16)
        e.store(e.build.trunc(bits, I16X16), place, 2)
        return e.multiply_add(weights, shares, total)

    def weighted_sum(self, total: Value) -> Value:
        e = self._e
        return e.build.fmul(e.build.sitofp(total, F32X16), e.floats(1 / _LARGEST_WEIGHT))


def rounded_up_to_bf16(e: Emitter, scale: Value) -> Value:
    """The bits of the float."""
    bits = e.build.add(e.build.bitcast(scale, I32), ir.Constant(I32, 0xFFFF))
    return e.build.and_(bits, ir.Constant(I32, -65536))


def log_of_scale(e: Emitter, scale: Value) -> Value:
    """To the base of 2, in steps, such that no scale becomes smaller, and none larger by more than 2%."""
    build = e.build
    bits = build.sub(build.bitcast(scale, I32), ir.Constant(I32, 127 << 23))
    whole = build.sitofp(build.ashr(bits, ir.Constant(I32, 23)), F32)
    part = build.fmul(build.sitofp(build.and_(bits, ir.Constant(I32, (1 << 23) - 1)), F32), F32(2.0**-23))
    bend = build.fmul(build.fmul(part, build.fsub(F32(1.0), part)), F32(LOG_BEND))
    log = build.fadd(build.fadd(whole, part), build.fadd(bend, F32(LOG_ROOM)))
    return build.fptosi(build.fmul(log, F32(STEPS_A_DOUBLING)), I32)
