"""Paged attention, for both phases: causal, windowed, soft-capped, the query heads of a KV head sharing each load.
Keys are taken in spans of SPAN positions, at fixed places whatever the query: each span gives a maximum, a sum and a
weighted sum of values, and spans are merged in order. A query's arithmetic therefore never depends on its neighbours,
on chunking or on threads, and no score matrix is larger than a span. Numbers are the business of `kv_code.py`."""

from __future__ import annotations

from typing import Protocol

from twostroke.backends.cpu.arguments import AttentionField, KVGroupField, QueryBlockField, StepField
from twostroke.backends.cpu.kernels.emitter import F32, I32, I64, LANES, POINTER, Emitter, Value
from twostroke.backends.cpu.kernels.kv_code import KVCode, kv_code
from twostroke.backends.cpu.kernels.numbers import power_of_two
from twostroke.backends.cpu.kernels.operation import Operation, operation
from twostroke.backends.cpu.kernels.span import (
    LOG2_E,
    NOTHING_YET,
    RUNS_A_SPAN,
    Accumulate,
    Pages,
    State,
    accumulate_name,
    first_run,
    lane_of,
    merge_vector,
    reach,
)
from twostroke.backends.cpu.shape import SPAN, AttentionScratch, KernelShape

_MOST_DOUBLINGS = 120.0
"""A sink that is so far above every key takes all there is."""
_SINK_DEGREE = 6


def emit_attention(e: Emitter, shape: KernelShape) -> None:
    """Work is (block of queries, group of heads), dealt to parts in turn: neighbours cost nearly the same."""
    for queries in sorted({1, shape.queries_together(e.isa.accumulators)}):
        Accumulate(e, shape, queries).emit()
    piece = Piece(e, shape)
    piece.emit_whole()
    piece.emit_span()
    piece.emit_merge()
    with operation(e, "attention") as op:
        groups_per_kv_head = shape.queries_per_kv_head // shape.heads_together
        head_groups = e.mul(op.integer(AttentionField.NUM_KV_HEADS), groups_per_kv_head)
        items = e.mul(op.step_integer(op.integer(AttentionField.NUM_BLOCKS)), head_groups)
        by_rows = e.is_nonzero(op.step_integer(StepField.ATTENDS_BY_ROWS))
        first, last = op.share(items)
        start, stop = e.build.select(by_rows, first, op.part), e.build.select(by_rows, last, items)
        with e.loop(start, stop, e.build.select(by_rows, e.integer(1), op.parts)) as item:
            block = Block(op, e.div(item, head_groups), op.integer(AttentionField.BLOCKS))
            head_group = e.rem(item, head_groups)
            arguments = _piece_arguments(op, shape, block, head_group)
            with e.build.if_else(e.is_nonzero(block[QueryBlockField.NUM_SPANS])) as (split, whole):
                with split:
                    _attend_span(op, shape, block, head_groups, head_group, arguments)
                with whole:
                    e.call("attend", arguments)


class ScratchPlaces(Protocol):
    """Where parts of a thread's scratch begin."""

    @property
    def running(self) -> int: ...

    @property
    def maxima(self) -> int: ...

    @property
    def sums(self) -> int: ...

    @property
    def scores(self) -> int: ...


class Block:
    def __init__(self, op: Operation, index: Value, blocks: Value | int) -> None:
        """`blocks`: which field of the step's record has the address of all."""
        e = self._e = op.emitter
        blocks = op.step_address(blocks)
        self._record = e.at(blocks, e.mul(index, len(QueryBlockField)), I32)

    def __getitem__(self, field: QueryBlockField) -> Value:
        return self._e.build.sext(self._e.load_at(I32, self._record, int(field)), I64)


def _attend_span(
    op: Operation, shape: KernelShape, block: Block, head_groups: Value, head_group: Value, arguments: list[Value]
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
        output = arguments[[name for name, _ in _PIECE_PARAMETERS].index("output")]
        sinks = arguments[[name for name, _ in _PIECE_PARAMETERS].index("sinks")]
        e.call("merge_spans", [results, spans, output, op.scratch, sinks])


_PIECE_PARAMETERS = (
    ("query", POINTER),
    ("query_stride", I64),
    ("count", I64),
    ("store", POINTER),
    ("block_stride", I64),
    ("table", POINTER),
    ("position", I64),
    ("window", I64),
    ("last", I64),
    ("scale", F32),
    ("cap", F32),
    ("output", POINTER),
    ("output_stride", I64),
    ("scratch", POINTER),
    ("sinks", POINTER),
)


def _piece_arguments(op: Operation, shape: KernelShape, block: Block, head_group: Value) -> list[Value]:
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
        block[QueryBlockField.COUNT],
        e.at(op.address(AttentionField.STORE), e.mul(kv_head, shape.block_bytes)),
        e.mul(op.integer(AttentionField.NUM_KV_HEADS), shape.block_bytes),
        e.at(op.step_address(e.add(group, int(KVGroupField.TABLES))), e.mul(segment, table_stride), I32),
        block[QueryBlockField.POSITION],
        op.integer(AttentionField.WINDOW),
        block[QueryBlockField.LAST],
        op.float(AttentionField.SCALE),
        op.float(AttentionField.CAP),
        e.at(op.address(AttentionField.OUTPUT), e.add(e.mul(token, output_stride), first_dim), F32),
        output_stride,
        op.scratch,
        e.at(op.address(AttentionField.SINKS), e.mul(head_group, shape.heads_together), F32),
    ]


class Piece:
    """A tile of queries over all their keys, or one query over one span of them, for one group of heads."""

    accumulator = "accumulate"

    def __init__(
        self, e: Emitter, shape: KernelShape, places: ScratchPlaces | None = None, code: KVCode | None = None
    ) -> None:
        self._e, self._shape, self._code = e, shape, code or kv_code(e, shape)
        self._heads, self._result_floats = shape.heads_together, shape.heads_together * shape.value_dim
        self._places = places or AttentionScratch.of(shape, e.isa.accumulators)
        self._made: Value = POINTER(None)

    def emit_whole(self) -> None:
        """Span after span."""
        e = self._e
        with e.function("attend", _PIECE_PARAMETERS) as values:
            self._bind(values)
            count = self._count
            running, state = self._running_in(self._scratch)
            farthest = e.add(self._position, e.sub(count, 1))
            last_position = reach(e, self._shape, farthest, self._window, self._segment_last)
            self._prepare()
            self._start(running, state, count)
            first_span = e.div(first_run(e, self._position, self._window), RUNS_A_SPAN)
            with e.loop(first_span, e.add(e.div(last_position, SPAN), 1)) as span:
                self._accumulate_all(count, span, running, state)
            with e.loop(0, count) as query:
                self._finish(query, running, state)

    def _accumulate_all(self, count: Value, span: Value, running: Value, state: State) -> None:
        """One span, a few queries at a time."""
        e, together = self._e, self._shape.queries_together(self._e.isa.accumulators)
        whole = e.sub(count, e.rem(count, together))
        with e.loop(0, whole, together) as query:
            self._accumulate(together, query, span, running, state)
        if together > 1:
            with e.loop(whole, count) as query:
                self._accumulate(1, query, span, running, state)

    def emit_span(self) -> None:
        """One span of one query's keys; its result goes to memory: [heads][head_dim], maxima, sums. A span behind the
        query's window leaves a result that merging ignores."""
        e = self._e
        with e.function("attend_span", (*_PIECE_PARAMETERS, ("span", I64), ("result", POINTER))) as values:
            *shared, span, result = values
            self._bind(shared)
            state = self._state_of_result(result)
            self._prepare()
            self._start(result, state, e.integer(1))
            self._accumulate(1, e.integer(0), span, result, state)

    def emit_merge(self) -> None:
        """The results of a query's spans, in order, as `emit_whole` would have merged them."""
        e, value_dim = self._e, self._shape.value_dim
        parameters = (
            ("results", POINTER),
            ("spans", I64),
            ("output", POINTER),
            ("scratch", POINTER),
            ("sinks", POINTER),
        )
        with e.function("merge_spans", parameters) as (results, spans, output, scratch, sinks):
            self._output, self._output_stride, self._sinks = output, e.integer(0), sinks
            running, state = self._running_in(scratch)
            self._start(running, state, e.integer(1))
            with e.loop(0, spans) as span:
                result = e.at(results, e.mul(span, self._shape.span_result_floats), F32)
                its = self._state_of_result(result)
                old, new = state.merge(e.load_floats(its.maxima), e.load_floats(its.sums), self._heads)
                for row in range(self._heads):
                    factors = lane_of(e, old, row), lane_of(e, new, row)
                    for place in range(row * value_dim, (row + 1) * value_dim, LANES):
                        merge_vector(e, running, place, e.load_floats(result, place), *factors)
            self._finish(e.integer(0), running, state)

    def _bind(self, values: list[Value]) -> None:
        e = self._e
        (self._query, self._query_stride, self._count, *self._paging, self._position, self._window) = values[:8]
        (self._segment_last, scale, self._cap, self._output, self._output_stride) = values[8:13]
        (self._scratch, self._sinks) = values[13:]
        self._pages = Pages(e, self._shape, *self._paging)
        self._factor = e.splat(scale if self._shape.soft_capped else e.build.fmul(scale, F32(LOG2_E)))

    def _running_in(self, scratch: Value) -> tuple[Value, State]:
        e, places = self._e, self._places
        running, maxima, sums = (e.at(scratch, place) for place in (places.running, places.maxima, places.sums))
        return running, State(e, maxima, sums)

    def _state_of_result(self, result: Value) -> State:
        maxima = self._e.at(result, self._result_floats, F32)
        return State(self._e, maxima, self._e.at(maxima, LANES, F32))

    def _prepared(self, query: Value) -> Value:
        return self._e.at(self._scratch, self._e.mul(query, self._code.query_row_bytes * self._heads))

    def _prepare(self) -> None:
        with self._e.loop(0, self._count) as query:
            self._prepare_query(query)

    def _prepare_query(self, query: Value) -> None:
        e, head_dim = self._e, self._shape.head_dim
        source, target = e.at(self._query, e.mul(query, self._query_stride), F32), self._prepared(query)
        for head in range(self._heads):
            place = e.at(target, head * self._code.query_row_bytes)
            self._code.prepare_query(e.at(source, head * head_dim, F32), self._factor, place)

    def _start(self, running: Value, state: State, count: Value) -> None:
        e = self._e
        with e.loop(0, e.mul(count, self._result_floats), LANES) as place:
            e.store_floats(e.floats(0.0), running, place)
        with e.loop(0, e.mul(count, self._heads), LANES) as row:
            e.store_floats(e.floats(NOTHING_YET), state.maxima, row)
            e.store_floats(e.floats(0.0), state.sums, row)

    def _accumulate(self, queries: int, query: Value, span: Value, running: Value, state: State) -> None:
        e = self._e
        mine = state.from_row(e.mul(query, self._heads))
        arguments = [
            self._prepared(query),
            *self._paging,
            e.add(self._position, query),
            self._window,
            self._segment_last,
            self._cap,
            span,
            e.at(running, e.mul(query, self._result_floats), F32),
            mine.maxima,
            mine.sums,
            e.at(self._scratch, self._places.scores),
            e.div(query, queries),
            self._made,
        ]
        e.call(accumulate_name(queries, self.accumulator), arguments)

    def _finish(self, query: Value, running: Value, state: State) -> None:
        e, value_dim = self._e, self._shape.value_dim
        output = e.at(self._output, e.mul(query, self._output_stride), F32)
        own = state.from_row(e.mul(query, self._heads))
        mine = e.at(running, e.mul(query, self._result_floats), F32)
        for head in range(self._heads):
            total = e.broadcast(own.sums, head)
            if self._shape.has_sinks:
                most = e.floats(_MOST_DOUBLINGS)
                above = e.build.fsub(e.broadcast(self._sinks, head), e.broadcast(own.maxima, head))
                bounded = e.build.select(e.build.fcmp_ordered(">", above, most), most, above)
                total = e.build.fadd(total, power_of_two(e, bounded, _SINK_DEGREE))
            for place in range(head * value_dim, (head + 1) * value_dim, LANES):
                e.store_floats(e.build.fdiv(e.load_floats(mine, place), total), output, place)
