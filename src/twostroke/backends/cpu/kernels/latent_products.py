"""The products of latent attention that go head by head: a decode's query brought into the space of latents, and the
latents that it mixed brought to values. A row's sums have one order, whichever rows are computed beside it."""

from __future__ import annotations

from collections.abc import Callable

from twostroke.backends.cpu.arguments import LatentAttentionField, StepField
from twostroke.backends.cpu.kernels.emitter import F32, F32X16, I16, I16X16, I32, I32X16, LANES, Emitter, Value
from twostroke.backends.cpu.kernels.numbers import high_floats, low_floats
from twostroke.backends.cpu.kernels.operation import Operation, operation
from twostroke.backends.cpu.kv_kind import KVKind
from twostroke.backends.cpu.shape import KernelShape

_ROWS = 4
"""That share each load of weights."""
_PANEL_VECTORS = 8
"""Outputs of a head that are one item of work, in vectors."""


def divisor_up_to(count: int, most: int) -> int:
    return max(number for number in range(1, max(1, most) + 1) if count % number == 0)


def emit_latent_products(e: Emitter, shape: KernelShape) -> None:
    own, wide = shape.latent, shape.kv_kind is not KVKind.BF16
    assert own is not None
    number_bytes = 4 if wide else 2
    with operation(e, "absorb_queries") as op:

        def key_weights(head: Value) -> Value:
            start = e.mul(head, own.plain_dim * own.rank * number_bytes)
            return e.at(op.address(LatentAttentionField.KEY_B), start)

        def of_key(weights: Value, step: Value, column: Value) -> list[Value]:
            place = e.add(e.mul(step, own.rank), column)
            if wide:
                return [e.load_floats(weights, place)]
            bits = e.build.zext(e.load(I16X16, e.at(weights, place, I16), 2), I32X16)
            return [e.build.bitcast(e.build.shl(bits, e.ints(16)), F32X16)]

        products = _Products(op, own.num_heads, (own.key_dim, own.kept_width), own.plain_dim, own.rank)
        products.emit(key_weights, of_key)
        _copy_rotated(op, shape)
    with operation(e, "expand_mixed") as op:

        def value_weights(head: Value) -> Value:
            start = e.mul(head, own.value_dim * own.rank * number_bytes)
            return e.at(op.address(LatentAttentionField.VALUE_B), start)

        def of_value(weights: Value, step: Value, column: Value) -> list[Value]:
            place = e.add(e.mul(step, own.value_dim), column)
            if wide:
                return [e.load_floats(weights, place)]
            pairs = e.load(I32X16, e.at(weights, place, I32), 4)
            return [low_floats(e, pairs), high_floats(e, pairs)]

        steps = own.rank if wide else own.rank // 2
        products = _Products(op, own.num_heads, (own.rank, own.value_dim), steps, own.value_dim)
        products.emit(value_weights, of_value)


def _copy_rotated(op: Operation, shape: KernelShape) -> None:
    """What is rotated of queries goes along as it is."""
    e, own = op.emitter, shape.latent
    assert own is not None
    first, last = op.share(e.mul(op.step_integer(StepField.NUM_DECODES), own.num_heads))
    with e.loop(first, last) as item:
        row, head = e.div(item, own.num_heads), e.rem(item, own.num_heads)
        source, target = _row(op, row, head, own.key_dim), _output(op, row, head, own.kept_width)
        with e.loop(0, own.rotated_dim) as place:
            number = e.load_at(F32, source, e.add(place, own.plain_dim))
            e.store(number, e.at(target, e.add(place, own.rank), F32), 4)


def _row(op: Operation, row: Value, head: Value, width: int) -> Value:
    e = op.emitter
    start = e.add(e.mul(row, op.integer(LatentAttentionField.STRIDE)), e.mul(head, width))
    return e.at(op.address(LatentAttentionField.QUERIES), start, F32)


def _output(op: Operation, row: Value, head: Value, width: int) -> Value:
    e = op.emitter
    start = e.add(e.mul(row, op.integer(LatentAttentionField.OUTPUT_STRIDE)), e.mul(head, width))
    return e.at(op.address(LatentAttentionField.OUTPUT), start, F32)


class _Products:
    """Of each head, [rows, inputs] x [inputs, outputs]; work is (head, panel of outputs)."""

    def __init__(self, op: Operation, heads: int, widths: tuple[int, int], steps: int, outputs: int) -> None:
        """`widths`: of a head in the input and in the output; `steps`: of weights, an input or a pair each."""
        self._op, self._heads, self._steps = op, heads, steps
        self._width_in, self._width_out = widths
        self._panel = LANES * divisor_up_to(outputs // LANES, _PANEL_VECTORS)
        self._panels = outputs // self._panel

    def emit(self, weights_of: Callable[[Value], Value], numbers: Callable[[Value, Value, Value], list[Value]]) -> None:
        """`numbers(weights, step, column)`: of 16 outputs from `column` on, for each input of a step."""
        op, e = self._op, self._op.emitter
        rows = op.step_integer(StepField.NUM_DECODES)
        live = e.build.select(e.is_nonzero(rows), e.integer(self._heads * self._panels), e.integer(0))
        first, last = op.share(live)
        whole = e.sub(rows, e.rem(rows, _ROWS))
        with e.loop(first, last) as item:
            head, start = e.div(item, self._panels), e.mul(e.rem(item, self._panels), self._panel)
            weights = weights_of(head)
            for count, begin, end in ((_ROWS, e.integer(0), whole), (1, whole, rows)):
                with e.loop(begin, end, count) as row:
                    self._multiply(weights, numbers, head, start, row, count)

    def _multiply(
        self,
        weights: Value,
        numbers: Callable[[Value, Value, Value], list[Value]],
        head: Value,
        start: Value,
        row: Value,
        count: int,
    ) -> None:
        e = self._op.emitter
        vectors = divisor_up_to(self._panel // LANES, e.isa.accumulators // count)
        sources = [_row(self._op, e.add(row, index), head, self._width_in) for index in range(count)]
        targets = [_output(self._op, e.add(row, index), head, self._width_out) for index in range(count)]
        with e.loop(start, e.add(start, self._panel), LANES * vectors) as first:
            columns = [e.add(first, LANES * index) for index in range(vectors)]
            totals = [[e.variable(F32X16, e.floats(0.0)) for _ in columns] for _ in sources]
            with e.loop(0, self._steps) as step:
                loaded = [numbers(weights, step, column) for column in columns]
                inputs = len(loaded[0])
                for index in range(inputs):
                    place = e.add(e.mul(step, inputs), index)
                    for source, own in zip(sources, totals, strict=True):
                        factor = e.broadcast(source, place)
                        for held, total in zip(loaded, own, strict=True):
                            total.value = e.multiply_add(held[index], factor, total.value)
            for target, own in zip(targets, totals, strict=True):
                for column, total in zip(columns, own, strict=True):
                    e.store_floats(total.value, target, column)
