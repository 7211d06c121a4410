"""Paged attention, for both phases: causal, windowed, soft-capped, the query heads of a KV head sharing each load.
Keys are taken in spans of SPAN positions, at fixed places whatever the query: each span gives a maximum, a sum and a
weighted sum of values, and spans are merged in order. A query's arithmetic therefore never depends on its neighbours,
on chunking or on threads, and no score matrix is larger than a span."""

from __future__ import annotations

from twostroke.backends.cpu.arguments import AttentionField, KVGroupField, QueryBlockField, StepField
from twostroke.backends.cpu.kernels.emitter import F32, F32X16, I32, I64, POINTER, Emitter, Value, Variable
from twostroke.backends.cpu.kernels.operation import Operation, operation
from twostroke.backends.cpu.shape import SPAN, KernelShape

RUN = 16
"""Keys that lie side by side in a block."""
RUNS_A_SPAN = SPAN // RUN
MASKED, NOTHING_YET = -3.0e38, -1.0e30
"""A masked score lies so far below an empty maximum that its weight is exactly zero."""


def emit_attention(e: Emitter, shape: KernelShape) -> None:
    """Work is (block of queries, group of heads), dealt to threads in turn: neighbours cost nearly the same."""
    together = shape.queries_together(e.isa.accumulators)
    for queries in sorted({1, together}):
        _Attend(e, shape, queries).emit_whole()
    _Attend(e, shape, 1).emit_span()
    _Attend(e, shape, 1).emit_merge()
    with operation(e, "attention") as op:
        groups_per_kv_head = shape.queries_per_kv_head // shape.heads_together
        head_groups = e.mul(op.integer(AttentionField.NUM_KV_HEADS), groups_per_kv_head)
        items = e.mul(op.step_integer(StepField.NUM_QUERY_BLOCKS), head_groups)
        with e.loop(op.thread, items, op.threads) as item:
            block = _Block(op, e.div(item, head_groups))
            head_group = e.rem(item, head_groups)
            arguments = _attend_arguments(op, shape, block, head_group)
            with e.build.if_else(e.is_nonzero(block[QueryBlockField.NUM_SPANS])) as (split, whole):
                with split:
                    _attend_span(op, shape, block, head_groups, head_group, arguments)
                with whole:
                    single = e.build.icmp_signed("==", block[QueryBlockField.COUNT], e.integer(1))
                    with e.build.if_else(single) as (one, several):
                        with one:
                            e.call(_attend_name(1), arguments)
                        with several:
                            e.call(_attend_name(together), arguments)


class _Block:
    def __init__(self, op: Operation, index: Value) -> None:
        e = self._e = op.emitter
        self._record = e.at(op.step_address(StepField.QUERY_BLOCKS), e.mul(index, len(QueryBlockField)), I32)

    def __getitem__(self, field: QueryBlockField) -> Value:
        return self._e.build.sext(self._e.load_at(I32, self._record, int(field)), I64)


def _attend_span(
    op: Operation, shape: KernelShape, block: _Block, head_groups: Value, head_group: Value, arguments: list[Value]
) -> None:
    """Whoever finishes a query's last span merges them, in their order: who that is changes nothing."""
    e = op.emitter
    spans, first = block[QueryBlockField.NUM_SPANS], block[QueryBlockField.FIRST_RESULT]
    before = e.add(e.mul(first, head_groups), e.mul(head_group, spans))
    results = e.at(op.step_address(StepField.SPAN_RESULTS), e.mul(before, shape.span_result_floats), F32)
    span = block[QueryBlockField.SPAN]
    e.call("attend_span", [*arguments, span, e.at(results, e.mul(span, shape.span_result_floats), F32)])
    counter = e.atomic_pointer(op.step_address(StepField.SPAN_COUNTS), before)
    done = e.build.atomic_rmw("add", counter, e.integer(1), "acq_rel")
    with e.when(e.build.icmp_signed("==", e.add(done, 1), spans)):
        e.build.store_atomic(e.integer(0), counter, "monotonic", 8)
        e.call("merge_spans", [results, spans, arguments[9], op.scratch])


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


def _attend_arguments(op: Operation, shape: KernelShape, block: _Block, head_group: Value) -> list[Value]:
    e = op.emitter
    token, segment = block[QueryBlockField.TOKEN], block[QueryBlockField.SEGMENT]
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
        block[QueryBlockField.POSITION],
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

    def emit_whole(self) -> None:
        """All keys of the block's queries, span after span."""
        e = self._e
        with e.function(_attend_name(self._queries), _ATTEND_PARAMETERS) as values:
            self._bind(values)
            first_run, last_run = self._runs()
            maxima, sums = self._start()
            with e.loop(e.div(first_run, RUNS_A_SPAN), e.div(e.add(last_run, RUNS_A_SPAN - 1), RUNS_A_SPAN)) as span:
                span_maxima, span_sums = self._attend_span(span, first_run, last_run)
                self._merge(maxima, sums, span_maxima, span_sums, self._partial)
            self._finish(sums)

    def emit_span(self) -> None:
        """One span of one query's keys; its result goes to memory: [rows][head_dim], maxima, sums. A span behind the
        query's window leaves a result that merging ignores."""
        e, rows = self._e, len(self._rows)
        with e.function("attend_span", (*_ATTEND_PARAMETERS, ("span", I64), ("result", POINTER))) as values:
            *shared, span, result = values
            self._bind(shared)
            self._partial = result
            span_maxima, span_sums = self._attend_span(span, *self._runs())
            tail = e.at(result, rows * self._shape.head_dim, F32)
            for row in range(rows):
                e.store(span_maxima[row], e.at(tail, row, F32), 4)
                e.store(span_sums[row], e.at(tail, rows + row, F32), 4)

    def emit_merge(self) -> None:
        """The results of a query's spans, in order, as `emit_whole` would have merged them."""
        e, rows, size = self._e, len(self._rows), self._shape.span_result_floats
        parameters = (("results", POINTER), ("spans", I64), ("output", POINTER), ("scratch", POINTER))
        with e.function("merge_spans", parameters) as (results, spans, output, scratch):
            self._running, self._output, self._output_stride = scratch, output, e.integer(0)
            maxima, sums = self._start()
            with e.loop(0, spans) as span:
                result = e.at(results, e.mul(span, size), F32)
                tail = e.at(result, rows * self._shape.head_dim, F32)
                span_maxima = [e.load_at(F32, tail, row) for row in range(rows)]
                span_sums = [e.load_at(F32, tail, rows + row) for row in range(rows)]
                self._merge(maxima, sums, span_maxima, span_sums, result)
            self._finish(sums)

    def _runs(self) -> tuple[Value, Value]:
        """The first run of 16 keys that any query reads, and the one after the last."""
        e = self._e
        first_key = e.larger(e.add(e.sub(self._position, self._window), 1), 0)
        return e.div(first_key, RUN), e.add(e.div(e.add(self._position, self._queries - 1), RUN), 1)

    def _start(self) -> tuple[list[Variable], list[Variable]]:
        e = self._e
        for place in range(0, len(self._rows) * self._shape.head_dim, 16):
            e.store_floats(e.floats(0.0), self._running, place)
        return [e.variable(F32, F32(NOTHING_YET)) for _ in self._rows], [e.variable(F32, F32(0.0)) for _ in self._rows]

    def _attend_span(self, span: Value, first_run: Value, last_run: Value) -> tuple[list[Value], list[Value]]:
        """The part of a span that lies between two runs: its maxima and sums; the weighted values go to `partial`."""
        e = self._e
        start = e.larger(e.mul(span, RUNS_A_SPAN), first_run)
        stop = e.smaller(e.mul(e.add(span, 1), RUNS_A_SPAN), last_run)
        maxima = self._score(start, stop)
        sums = self._weigh(start, stop, maxima)
        self._sum_values(start, stop)
        return maxima, sums

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
        self,
        maxima: list[Variable],
        sums: list[Variable],
        span_maxima: list[Value],
        span_sums: list[Value],
        partial: Value,
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
                grown = e.build.fmul(e.load_floats(partial, place), new)
                e.store_floats(e.multiply_add(e.load_floats(self._running, place), old, grown), self._running, place)

    def _finish(self, sums: list[Variable]) -> None:
        e, shape = self._e, self._shape
        for row, (query, head) in enumerate(self._rows):
            total = e.splat(sums[row].value)
            output = e.at(self._output, e.add(e.mul(self._output_stride, query), head * shape.head_dim), F32)
            for place in range(0, shape.head_dim, 16):
                mean = e.build.fdiv(e.load_floats(self._running, row * shape.head_dim + place), total)
                e.store_floats(mean, output, place)
