"""Paged attention, for both phases: causal, windowed, soft-capped, the query heads of a KV head sharing each load.
Keys are taken in spans of SPAN positions, at fixed places whatever the query: each span gives a maximum, a sum and a
weighted sum of values, and spans are merged in order. A query's arithmetic therefore never depends on its neighbours,
on chunking or on threads, and no score matrix is larger than a span."""

from __future__ import annotations

from twostroke.backends.cpu.arguments import AttentionField, KVGroupField, StepField
from twostroke.backends.cpu.kernels.emitter import F32, F32X16, I32, I64, POINTER, Emitter, Value, Variable
from twostroke.backends.cpu.kernels.operation import Operation, operation
from twostroke.backends.cpu.shape import SPAN, KernelShape

RUN = 16
"""Keys that lie side by side in a block."""
MASKED, NOTHING_YET = -3.0e38, -1.0e30
"""A masked score lies so far below an empty maximum that its weight is exactly zero."""


def emit_attention(e: Emitter, shape: KernelShape) -> None:
    """Work is (block of queries, group of heads), dealt to threads in turn: neighbours cost nearly the same."""
    together = shape.queries_together(e.isa.accumulators)
    for queries in sorted({1, together}):
        _Attend(e, shape, queries).emit()
    with operation(e, "attention") as op:
        groups_per_kv_head = shape.queries_per_kv_head // shape.heads_together
        head_groups = e.mul(op.integer(AttentionField.NUM_KV_HEADS), groups_per_kv_head)
        items = e.mul(op.step_integer(StepField.NUM_QUERY_BLOCKS), head_groups)
        with e.loop(op.thread, items, op.threads) as item:
            block, head_group = e.div(item, head_groups), e.rem(item, head_groups)
            record = e.at(op.step_address(StepField.QUERY_BLOCKS), e.mul(block, 4), I32)
            token, count, position, segment = (e.build.sext(e.load_at(I32, record, i), I64) for i in range(4))
            arguments = _attend_arguments(op, shape, token, position, segment, head_group)
            if together == 1:
                e.call(_attend_name(1), arguments)
            else:
                with e.build.if_else(e.build.icmp_signed("==", count, e.integer(1))) as (single, several):
                    with single:
                        e.call(_attend_name(1), arguments)
                    with several:
                        e.call(_attend_name(together), arguments)


def _attend_name(queries: int) -> str:
    return f"attend_{queries}"


_ATTEND_PARAMETERS = (
    ("query", POINTER),
    ("query_stride", I64),
    ("store", POINTER),
    ("block_stride", I64),
    ("table", POINTER),
    ("position", I64),
    ("window", I64),
    ("scale", F32),
    ("cap", F32),
    ("output", POINTER),
    ("output_stride", I64),
    ("scratch", POINTER),
)


def _attend_arguments(
    op: Operation, shape: KernelShape, token: Value, position: Value, segment: Value, head_group: Value
) -> list[Value]:
    e = op.emitter
    kv_head = e.div(head_group, shape.queries_per_kv_head // shape.heads_together)
    first_dim = e.mul(head_group, shape.heads_together * shape.head_dim)
    stride, output_stride = op.integer(AttentionField.STRIDE), op.integer(AttentionField.OUTPUT_STRIDE)
    group = op.integer(AttentionField.GROUP)
    table_stride = op.step_integer(e.add(group, int(KVGroupField.TABLE_STRIDE)))
    return [
        e.at(op.address(AttentionField.QUERIES), e.add(e.mul(token, stride), first_dim), F32),
        stride,
        e.at(op.address(AttentionField.STORE), e.mul(kv_head, shape.block_bytes)),
        e.mul(op.integer(AttentionField.NUM_KV_HEADS), shape.block_bytes),
        e.at(op.step_address(e.add(group, int(KVGroupField.TABLES))), e.mul(segment, table_stride), I32),
        position,
        op.integer(AttentionField.WINDOW),
        op.float(AttentionField.SCALE),
        op.float(AttentionField.CAP),
        e.at(op.address(AttentionField.OUTPUT), e.add(e.mul(token, output_stride), first_dim), F32),
        output_stride,
        op.scratch,
    ]


class _Attend:
    """One block of queries (consecutive positions) and one group of heads: `rows` query vectors, query by query."""

    def __init__(self, e: Emitter, shape: KernelShape, queries: int) -> None:
        self._e, self._shape, self._queries = e, shape, queries
        self._rows = [(query, head) for query in range(queries) for head in range(shape.heads_together)]

    def emit(self) -> None:
        e, shape = self._e, self._shape
        with e.function(_attend_name(self._queries), _ATTEND_PARAMETERS) as values:
            self._bind(values)
            first_key = e.larger(e.add(e.sub(self._position, self._window), 1), 0)
            first_run = e.div(first_key, RUN)
            last_run = e.add(e.div(e.add(self._position, self._queries - 1), RUN), 1)
            maxima = [e.variable(F32, F32(NOTHING_YET)) for _ in self._rows]
            sums = [e.variable(F32, F32(0.0)) for _ in self._rows]
            for row in range(len(self._rows)):
                for place in range(0, shape.head_dim, 16):
                    e.store_floats(e.floats(0.0), self._running, row * shape.head_dim + place)
            runs_a_span = SPAN // RUN
            with e.loop(e.div(first_run, runs_a_span), e.div(e.add(last_run, runs_a_span - 1), runs_a_span)) as span:
                start = e.larger(e.mul(span, runs_a_span), first_run)
                stop = e.smaller(e.mul(e.add(span, 1), runs_a_span), last_run)
                span_maxima = self._score(start, stop)
                span_sums = self._weigh(start, stop, span_maxima)
                self._sum_values(start, stop)
                self._merge(maxima, sums, span_maxima, span_sums)
            self._finish(sums)

    def _bind(self, values: list[Value]) -> None:
        e, shape = self._e, self._shape
        (query, stride, self._store, self._block_stride, self._table, self._position) = values[:6]
        (self._window, scale, cap, self._output, self._output_stride, scratch) = values[6:]
        self._scale, self._cap = e.splat(scale), e.splat(cap)
        self._query_rows = [
            e.at(query, e.add(e.mul(stride, index), head * shape.head_dim), F32) for index, head in self._rows
        ]
        self._scores = scratch  # f32 [rows][SPAN]
        self._partial = e.at(scratch, len(self._rows) * SPAN, F32)  # f32 [rows][head_dim]
        self._running = e.at(self._partial, len(self._rows) * shape.head_dim, F32)  # f32 [rows][head_dim]

    def _block_of(self, run: Value) -> tuple[Value, Value]:
        """The address of the block that holds a run of 16 positions, and the run's index in it."""
        e = self._e
        runs_a_block = self._shape.block_size // RUN
        block = e.build.sext(e.load_at(I32, self._table, e.div(run, runs_a_block)), I64)
        return e.at(self._store, e.mul(block, self._block_stride)), e.rem(run, runs_a_block)

    def _score_place(self, row: int, start: Value, run: Value) -> Value:
        e = self._e
        return e.at(self._scores, e.add(e.mul(e.sub(run, start), RUN), row * SPAN), F32)

    def _score(self, start: Value, stop: Value) -> list[Value]:
        """scores = cap(q . k * scale), masked; the maximum of each row."""
        e, shape = self._e, self._shape
        highest = [e.variable(F32X16, e.floats(NOTHING_YET)) for _ in self._rows]
        with e.loop(start, stop) as run:
            block, index = self._block_of(run)
            keys = e.at(block, e.mul(index, 2 * RUN * shape.head_dim))
            # Even and odd dimensions sum apart: two chains a row, added once, in every variant of this code.
            dots = [[e.variable(F32X16, e.floats(0.0)) for _ in range(2)] for _ in self._rows]
            with e.loop(0, shape.head_dim, 8) as first:
                for offset in range(8):
                    dim = e.add(first, offset)
                    key = e.load_halves(keys, e.mul(dim, RUN))
                    for row, query in enumerate(self._query_rows):
                        chain = dots[row][offset % 2]
                        chain.value = e.multiply_add(key, e.broadcast(query, dim), chain.value)
            for row, (query, _) in enumerate(self._rows):
                even, odd = dots[row]
                score = e.build.fmul(e.build.fadd(even.value, odd.value), self._scale)
                if shape.soft_capped:
                    score = e.soft_cap(score, self._cap)
                score = e.build.select(self._visible(run, query), score, e.floats(MASKED))
                e.store_floats(score, self._score_place(row, start, run))
                highest[row].value = e.larger_float(highest[row].value, score)
        return [e.reduce(variable.value, e.larger_float) for variable in highest]

    def _visible(self, run: Value, query: int) -> Value:
        """Which of the run's 16 positions this query reads: not after it, not behind its window."""
        e = self._e
        position = e.add(self._position, query)
        ahead = e.splat(e.build.trunc(e.sub(position, e.mul(run, RUN)), I32))  # position minus the run's first
        lane = e.ints(range(16))
        behind = e.splat(e.build.trunc(e.sub(e.sub(position, self._window), e.mul(run, RUN)), I32))
        return e.build.and_(e.build.icmp_signed("<=", lane, ahead), e.build.icmp_signed(">", lane, behind))

    def _weigh(self, start: Value, stop: Value, maxima: list[Value]) -> list[Value]:
        """scores become e^(score - maximum); the sum of each row."""
        e = self._e
        sums = [e.variable(F32X16, e.floats(0.0)) for _ in self._rows]
        spread = [e.splat(maximum) for maximum in maxima]
        with e.loop(start, stop) as run:
            for row in range(len(self._rows)):
                place = self._score_place(row, start, run)
                weight = e.exponential(e.build.fsub(e.load_floats(place), spread[row]))
                e.store_floats(weight, place)
                sums[row].value = e.build.fadd(sums[row].value, weight)
        return [e.reduce_sum(variable.value) for variable in sums]

    def _sum_values(self, start: Value, stop: Value) -> None:
        """partial = weights x values, a few vectors of the head at a time so that sums stay in registers."""
        e, shape = self._e, self._shape
        vectors = shape.head_dim // 16
        width = max(1, min(vectors, e.isa.accumulators // len(self._rows)))
        for first in range(0, vectors, width):
            columns = range(first, min(first + width, vectors))
            totals = [[e.variable(F32X16, e.floats(0.0)) for _ in columns] for _ in self._rows]
            with e.loop(start, stop) as run:
                block, index = self._block_of(run)
                values = e.at(block, e.add(e.mul(index, 2 * RUN * shape.head_dim), shape.value_offset))
                weights = [self._score_place(row, start, run) for row in range(len(self._rows))]
                with e.loop(0, RUN, 2) as pair:
                    for offset in range(2):
                        self._add_value(e.add(pair, offset), values, weights, columns, totals)
            for row, total in enumerate(totals):
                for column, variable in zip(columns, total, strict=True):
                    e.store_floats(variable.value, self._partial, row * shape.head_dim + 16 * column)

    def _add_value(
        self, token: Value, values: Value, weights: list[Value], columns: range, totals: list[list[Variable]]
    ) -> None:
        e = self._e
        place = e.mul(token, self._shape.head_dim)
        loaded = [e.load_halves(values, e.add(place, 16 * column)) for column in columns]
        for row, total in enumerate(totals):
            weight = e.broadcast(weights[row], token)
            for value, variable in zip(loaded, total, strict=True):
                variable.value = e.multiply_add(value, weight, variable.value)

    def _merge(
        self, maxima: list[Variable], sums: list[Variable], span_maxima: list[Value], span_sums: list[Value]
    ) -> None:
        """Both sides are brought to the common maximum. A span that a query cannot see changes nothing, exactly."""
        e, shape = self._e, self._shape
        for row in range(len(self._rows)):
            common = e.larger_float(maxima[row].value, span_maxima[row])
            old = e.exponential(e.splat(e.build.fsub(maxima[row].value, common)))
            new = e.exponential(e.splat(e.build.fsub(span_maxima[row], common)))
            maxima[row].value = common
            grown = e.build.fmul(e.splat(span_sums[row]), new)
            total = e.multiply_add(e.splat(sums[row].value), old, grown)
            sums[row].value = e.first_lane(total)
            for place in range(row * shape.head_dim, (row + 1) * shape.head_dim, 16):
                grown = e.build.fmul(e.load_floats(self._partial, place), new)
                e.store_floats(e.multiply_add(e.load_floats(self._running, place), old, grown), self._running, place)

    def _finish(self, sums: list[Variable]) -> None:
        e, shape = self._e, self._shape
        for row, (query, head) in enumerate(self._rows):
            total = e.splat(sums[row].value)
            output = e.at(self._output, e.add(e.mul(self._output_stride, query), head * shape.head_dim), F32)
            for place in range(0, shape.head_dim, 16):
                mean = e.build.fdiv(e.load_floats(self._running, row * shape.head_dim + place), total)
                e.store_floats(mean, output, place)
