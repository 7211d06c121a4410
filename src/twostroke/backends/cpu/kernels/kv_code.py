"""One class for each kind of KV: how a token is written into its block, and how queries and weights are multiplied
with what is there. `attention.py` holds what all kinds share: spans, masks, softmax, merging.
A block of one KV head holds K, then V, then scales where the kind has them; each in runs of 16 tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod

from llvmlite import ir

from twostroke.backends.cpu.kernels import numbers
from twostroke.backends.cpu.kernels.emitter import F32, I8, I8X16, I16, I32, I32X16, I64, POINTER, Emitter, Value
from twostroke.backends.cpu.kv_kind import KVKind
from twostroke.backends.cpu.shape import RUN, KernelShape

_LARGEST_F16 = 65504.0


def kv_code(e: Emitter, shape: KernelShape) -> KVCode:
    kinds: dict[KVKind, type[HalfCode | PairCode]] = {
        KVKind.F16: HalfCode,
        KVKind.BF16: PairCode,
        KVKind.INT8: QuantisedCode,
    }
    return kinds[shape.kv_kind](e, shape)


class KVCode(ABC):
    """A step multiplies one vector of K (16 keys) or V (16 dimensions) with one broadcast of a query or a weight."""

    numbers_a_step: int
    """Dimensions that a step of q . k sums, and keys that a step of the weighted sum takes."""
    query_bytes: int
    """Of one dimension of a prepared query."""
    weight_bytes: int
    series_degree: int
    """Of the series for weights: what their rounding hides need not be computed."""

    def __init__(self, e: Emitter, shape: KernelShape) -> None:
        self._e, self._shape = e, shape

    @property
    def run_bytes(self) -> int:
        """K or V of one run, as it is multiplied."""
        return 2 * RUN * self._shape.head_dim

    @abstractmethod
    def store(self, key: Value, value: Value, block: Value, offset: Value) -> None:
        """Writes one token's K and V, f32 [head_dim] each, to place `offset` of a block."""

    @abstractmethod
    def prepare_query(self, source: Value, factor: Value, target: Value) -> None:
        """A query vector times a factor, as steps read it."""

    @abstractmethod
    def load_key(self, keys: Value, step: Value) -> Value: ...

    @abstractmethod
    def load_value(self, values: Value, step: Value, column: int) -> Value:
        """16 dimensions, from 16 * column on."""

    @abstractmethod
    def broadcast(self, numbers: Value, step: Value) -> Value:
        """What a step takes of a prepared query or of stored weights, in all lanes."""

    @abstractmethod
    def multiply(self, total: Value, left: Value, right: Value) -> Value: ...

    @abstractmethod
    def store_weights(self, weights: Value, scales: Value | None, place: Value, total: Value) -> Value:
        """Stores the weights of 16 keys (times the scales of their values); returns the total with these added."""


class HalfCode(KVCode):
    """f16, multiplied as f32. K is [head_dim][16 keys], V is [16 keys][head_dim]."""

    numbers_a_step = 1
    query_bytes = weight_bytes = 4
    series_degree = 6

    def store(self, key: Value, value: Value, block: Value, offset: Value) -> None:
        e, head_dim = self._e, self._shape.head_dim
        run = e.at(block, e.mul(e.div(offset, RUN), RUN * head_dim), I16)
        column = e.at(run, e.rem(offset, RUN), I16)
        values = e.at(e.at(block, self._shape.value_offset), e.mul(offset, head_dim), I16)
        for first in range(0, head_dim, 16):
            halves = e.to_halves(e.load_floats(key, first))
            for lane in range(16):
                number = e.build.extract_element(halves, ir.Constant(I32, lane))
                e.store(number, e.at(column, RUN * (first + lane), I16), 2)
            e.store(e.to_halves(e.load_floats(value, first)), e.at(values, first, I16), 2)

    def prepare_query(self, source: Value, factor: Value, target: Value) -> None:
        e = self._e
        for place in range(0, self._shape.head_dim, 16):
            e.store_floats(e.build.fmul(e.load_floats(source, place), factor), target, place)

    def load_key(self, keys: Value, step: Value) -> Value:
        return self._e.load_halves(keys, self._e.mul(step, RUN))

    def load_value(self, values: Value, step: Value, column: int) -> Value:
        return self._e.load_halves(values, self._e.add(self._e.mul(step, self._shape.head_dim), 16 * column))

    def broadcast(self, numbers: Value, step: Value) -> Value:
        return self._e.broadcast(numbers, step)

    def multiply(self, total: Value, left: Value, right: Value) -> Value:
        return self._e.multiply_add(left, right, total)

    def store_weights(self, weights: Value, scales: Value | None, place: Value, total: Value) -> Value:
        self._e.store_floats(weights, place)
        return self._e.build.fadd(total, weights)


class PairCode(KVCode):
    """bf16 in pairs: K is [head_dim / 2][16 keys][2 dimensions], V is [16 keys / 2][head_dim][2 keys]. Queries are
    rounded once, and weights too; the sum that divides is that of the rounded weights, so that means stay means."""

    numbers_a_step = 2
    query_bytes = weight_bytes = 2
    series_degree = 3

    def store(self, key: Value, value: Value, block: Value, offset: Value) -> None:
        for first in range(0, self._shape.head_dim, 16):
            key_part, value_part = (
                numbers.to_bf16(self._e, numbers.saturate(self._e, self._e.load_floats(x, first), numbers.LARGEST_BF16))
                for x in (key, value)
            )
            self._store_part(key_part, value_part, first, block, offset)

    def _store_part(self, key: Value, value: Value, first: int, block: Value, offset: Value) -> None:
        """16 dimensions of K and V, from `first` on, each number of `element_bytes`."""
        e, shape = self._e, self._shape
        element = I8 if shape.kv_kind is KVKind.INT8 else I16
        pair = ir.IntType(2 * element.width)
        run, lane = e.div(offset, RUN), e.rem(offset, RUN)
        keys = e.at(block, e.mul(run, RUN * shape.head_dim), element)
        column = e.at(keys, lane, pair)
        pairs = e.build.bitcast(key, ir.VectorType(pair, 8))
        for index in range(8):
            number = e.build.extract_element(pairs, ir.Constant(I32, index))
            e.store(number, e.at(column, RUN * (first // 2 + index), pair), 1)
        values = e.at(e.at(block, shape.value_offset), e.mul(run, RUN * shape.head_dim), element)
        row = e.at(values, e.add(e.mul(e.div(lane, 2), 2 * shape.head_dim), e.rem(lane, 2)), element)
        for index in range(16):
            number = e.build.extract_element(value, ir.Constant(I32, index))
            e.store(number, e.at(row, 2 * (first + index), element), 1)

    def prepare_query(self, source: Value, factor: Value, target: Value) -> None:
        e = self._e
        for place in range(0, self._shape.head_dim, 16):
            rounded = numbers.to_bf16(e, e.build.fmul(e.load_floats(source, place), factor))
            e.store(rounded, e.at(target, place, I16), 2)

    def load_key(self, keys: Value, step: Value) -> Value:
        return self._e.load(I32X16, self._e.at(keys, self._e.mul(step, RUN), I32), 4)

    def load_value(self, values: Value, step: Value, column: int) -> Value:
        e = self._e
        return e.load(I32X16, e.at(values, e.add(e.mul(step, self._shape.head_dim), 16 * column), I32), 4)

    def broadcast(self, numbers: Value, step: Value) -> Value:
        return self._e.splat(self._e.load_at(I32, numbers, step))

    def multiply(self, total: Value, left: Value, right: Value) -> Value:
        return numbers.dot_pairs(self._e, total, left, right)

    def store_weights(self, weights: Value, scales: Value | None, place: Value, total: Value) -> Value:
        rounded = numbers.to_bf16(self._e, weights)
        self._e.store(rounded, place, 2)
        ones = self._e.ints(0x3F803F80)  # pairs of 1.0
        return numbers.dot_pairs(self._e, total, numbers.as_pairs(self._e, rounded), ones)


class QuantisedCode(PairCode):
    """8 bits in the order of bf16 pairs, and a scale for each token. A span is widened to bf16 (exactly) before the
    queries of a tile meet it; scales of K multiply scores, scales of V multiply weights."""

    def store(self, key: Value, value: Value, block: Value, offset: Value) -> None:
        e, shape = self._e, self._shape
        scales = e.at(block, shape.scales_offset)
        inverses = []
        for index, source in enumerate((key, value)):
            scale, inverse = self._scale_of(source)
            e.store(scale, e.at(scales, e.add(offset, index * shape.block_size), F32), 4)
            inverses.append(e.splat(inverse))
        for first in range(0, shape.head_dim, 16):
            parts = []
            for source, inverse in zip((key, value), inverses, strict=True):
                number = numbers.saturate(e, e.load_floats(source, first), _LARGEST_F16)
                parts.append(e.build.trunc(e.nearest_bits(e.build.fmul(number, inverse)), I8X16))
            self._store_part(parts[0], parts[1], first, block, offset)

    def _scale_of(self, source: Value) -> tuple[Value, Value]:
        """The largest magnitude over 127, and 127 over it."""
        e = self._e
        largest = e.floats(0.0)
        for first in range(0, self._shape.head_dim, 16):
            number = numbers.saturate(e, e.load_floats(source, first), _LARGEST_F16)
            largest = e.larger_float(largest, e.magnitude(number))
        top = e.larger_float(F32(1e-20), e.reduce(largest, e.larger_float))
        return e.build.fmul(top, F32(1 / 127)), e.build.fdiv(F32(127.0), top)

    def emit_widen(self) -> None:
        """A function that widens numbers of 8 bits to bf16, in the same order. Left to itself, LLVM would inline it,
        unroll it whole and spill."""
        e = self._e
        pointers = [(name, POINTER) for name in ("source", "ahead", "target")]
        with e.function("widen", [*pointers, ("count", I64)], apart=True) as values:
            self._widen(*values)

    def _widen(self, source: Value, ahead: Value, target: Value, count: Value) -> None:
        e = self._e
        with e.loop(0, count, 32) as place:
            e.prefetch(e.at(ahead, place))
            halves = [e.load(I8X16, e.at(source, e.add(place, offset))) for offset in (0, 16)]
            floats = [e.build.sitofp(e.build.sext(half, I32X16), ir.VectorType(F32, 16)) for half in halves]
            e.store(numbers.exact_bf16(e, *floats), e.at(target, place, I16), 2)

    def open_run(self, source: Value, ahead: Value, target: Value) -> None:
        """K or V of one run; what lies `ahead` will be wanted next."""
        self._e.call("widen", [source, ahead, target, self._e.integer(RUN * self._shape.head_dim)])

    def store_weights(self, weights: Value, scales: Value | None, place: Value, total: Value) -> Value:
        e = self._e
        e.store(numbers.to_bf16(e, e.build.fmul(weights, scales)), place, 2)
        return e.build.fadd(total, weights)
