"""Decode with latent attention: queries that were brought into the latents' space read one vector a token, which is key
and value to all heads. A span of latents is read from memory once: what values are summed from is the same numbers,
turned about in scratch, for all heads of a query."""

from __future__ import annotations

from llvmlite import ir

from twostroke.backends.cpu.arguments import KVGroupField, LatentAttentionField, QueryBlockField, StepField
from twostroke.backends.cpu.kernels.attention import Block, Piece
from twostroke.backends.cpu.kernels.emitter import F32, I16, I16X16, I32, I32X16, I64, LANES, POINTER, Emitter, Value
from twostroke.backends.cpu.kernels.numbers import I16X32
from twostroke.backends.cpu.kernels.operation import Operation, operation
from twostroke.backends.cpu.kernels.span import RUNS_A_SPAN, Accumulate, Pages, State, accumulate_name
from twostroke.backends.cpu.kv_kind import KVKind
from twostroke.backends.cpu.shape import RUN, SPAN, KernelShape, LatentScratch

ALL_KEYS = 1 << 30
"""As a window: every query reads all keys up to its own."""


class LatentPages(Pages):
    """Keys are latents in their blocks; values are what was made of the span's."""

    def keys(self, run: Value) -> Value:
        e = self._e
        block, index = self.block_of(run)
        return e.at(block, e.mul(index, RUN * self._shape.head_dim * self._shape.kv_kind.element_bytes))

    def values(self, run: Value) -> Value:
        e, run_bytes = self._e, RUN * self._shape.value_dim * self._shape.kv_kind.element_bytes
        return e.at(self._made, e.mul(e.rem(run, RUNS_A_SPAN), run_bytes))


def emit_latent_decode(e: Emitter, shape: KernelShape) -> None:
    """Work is (query, or a span of its keys; some of the heads), dealt to parts in turn."""
    Accumulate(e, shape, 1, LatentPages).emit()
    _emit_turn(e, shape)
    piece = _LatentPiece(e, shape)
    piece.emit_merge()
    piece.emit_whole()
    piece.emit_span()
    with operation(e, "attend_latents") as op:
        parts = op.step_integer(StepField.HEAD_PARTS)
        items = e.mul(op.step_integer(StepField.NUM_QUERY_BLOCKS), parts)
        with e.loop(op.part, items, op.parts) as item:
            block, part = Block(op, e.div(item, parts), int(StepField.QUERY_BLOCKS)), e.rem(item, parts)
            groups = shape.head_groups_per_kv_head
            bounds = [e.div(e.mul(e.add(part, end), groups), parts) for end in (0, 1)]
            arguments = _arguments(op, shape, block, bounds)
            with e.build.if_else(e.is_nonzero(block[QueryBlockField.NUM_SPANS])) as (split, whole):
                with split:
                    spans, before = block[QueryBlockField.NUM_SPANS], e.mul(block[QueryBlockField.FIRST_RESULT], groups)
                    results = e.at(
                        op.step_address(StepField.SPAN_RESULTS), e.mul(before, shape.span_result_floats), F32
                    )
                    counts = e.at(op.step_address(StepField.SPAN_COUNTS), before, I64)
                    e.call("attend_latent_span", [*arguments, block[QueryBlockField.SPAN], spans, results, counts])
                with whole:
                    e.call("attend_latent_query", arguments)


_PARAMETERS = (
    ("query", POINTER),
    ("store", POINTER),
    ("table", POINTER),
    ("position", I64),
    ("scale", F32),
    ("output", POINTER),
    ("scratch", POINTER),
    ("first_group", I64),
    ("last_group", I64),
)


def _arguments(op: Operation, shape: KernelShape, block: Block, bounds: list[Value]) -> list[Value]:
    e, token = op.emitter, block[QueryBlockField.TOKEN]
    query = e.mul(token, op.integer(LatentAttentionField.STRIDE))
    output = e.mul(token, op.integer(LatentAttentionField.OUTPUT_STRIDE))
    return [
        e.at(op.address(LatentAttentionField.QUERIES), query, F32),
        op.address(LatentAttentionField.STORE),
        table_of(op, block),
        block[QueryBlockField.POSITION],
        op.float(LatentAttentionField.SCALE),
        e.at(op.address(LatentAttentionField.OUTPUT), output, F32),
        op.scratch,
        *bounds,
    ]


def table_of(op: Operation, block: Block) -> Value:
    e, group = op.emitter, op.integer(LatentAttentionField.GROUP)
    stride = op.step_integer(e.add(group, int(KVGroupField.TABLE_STRIDE)))
    tables = op.step_address(e.add(group, int(KVGroupField.TABLES)))
    return e.at(tables, e.mul(block[QueryBlockField.SEGMENT], stride), I32)


class _LatentPiece(Piece):
    """A query is all its heads, group by group: what `Piece` calls a query is a group of heads here."""

    def __init__(self, e: Emitter, shape: KernelShape) -> None:
        self._room = LatentScratch.of(shape, e.isa.accumulators)
        super().__init__(e, shape, self._room)

    def emit_whole(self) -> None:
        e = self._e
        with e.function("attend_latent_query", _PARAMETERS) as values:
            self._bind_latent(values)
            running, state = self._running_in(self._scratch)
            first_row = e.mul(self._first, self._heads)
            mine = e.at(running, e.mul(self._first, self._result_floats), F32)
            self._start(mine, state.from_row(first_row), e.sub(self._last, self._first))
            with e.loop(0, e.add(e.div(self._position, SPAN), 1)) as span:
                self._turn(span)
                with e.loop(self._first, self._last) as group:
                    self._accumulate_group(
                        group,
                        span,
                        e.at(running, e.mul(group, self._result_floats), F32),
                        state.from_row(e.mul(group, self._heads)),
                    )
            with e.loop(self._first, self._last) as group:
                self._finish(group, running, state)

    def emit_span(self) -> None:
        """Whoever finishes a group's last span merges them, in their order: who that is changes nothing."""
        e = self._e
        parameters = (*_PARAMETERS, ("span", I64), ("spans", I64), ("results", POINTER), ("counts", POINTER))
        with e.function("attend_latent_span", parameters) as values:
            *shared, span, spans, results, counts = values
            self._bind_latent(shared)
            self._turn(span)
            with e.loop(self._first, self._last) as group:
                before = e.mul(group, spans)
                own = e.at(results, e.mul(before, self._shape.span_result_floats), F32)
                result = e.at(own, e.mul(span, self._shape.span_result_floats), F32)
                state = self._state_of_result(result)
                self._start(result, state, e.integer(1))
                self._accumulate_group(group, span, result, state)
                counter = e.atomic_pointer(counts, before)
                done = e.build.atomic_rmw("add", counter, e.integer(1), "acq_rel")
                with e.when(e.build.icmp_signed("==", e.add(done, 1), spans)):
                    e.build.store_atomic(e.integer(0), counter, "monotonic", 8)
                    output = e.at(self._output, e.mul(group, self._result_floats), F32)
                    e.call("merge_spans", [own, spans, output, self._scratch, POINTER(None)])

    def _bind_latent(self, values: list[Value]) -> None:
        e, shape = self._e, self._shape
        query, store, table, position, scale, output, scratch, self._first, self._last = values
        queries = [query, e.integer(self._heads * shape.head_dim), e.integer(0)]
        outputs = [output, e.integer(self._result_floats), scratch, POINTER(None)]
        pages = [store, e.integer(shape.block_bytes), table, position, e.integer(ALL_KEYS), e.integer(0)]
        self._bind([*queries, *pages, scale, F32(1.0), *outputs])
        self._made = scratch
        self._prepare_groups()

    def _prepared(self, query: Value) -> Value:
        return self._e.at(super()._prepared(query), self._room.queries)

    def _prepare_groups(self) -> None:
        with self._e.loop(self._first, self._last) as group:
            self._prepare_query(group)

    def _turn(self, span: Value) -> None:
        self._e.call("turn_latents", [*self._paging, self._position, span, self._scratch])

    def _accumulate_group(self, group: Value, span: Value, running: Value, state: State) -> None:
        e = self._e
        e.call(
            accumulate_name(1),
            [
                self._prepared(group),
                *self._paging,
                self._position,
                self._window,
                self._segment_last,
                self._cap,
                span,
                running,
                state.maxima,
                state.sums,
                e.at(self._scratch, self._places.scores),
                e.integer(0),
                self._made,
            ],
        )


def _emit_turn(e: Emitter, shape: KernelShape) -> None:
    """The latents of a span as values: what lies by dimensions, 16 keys side by side, to the order that weighted sums
    read it in."""
    parameters = (
        ("store", POINTER),
        ("block_stride", I64),
        ("table", POINTER),
        ("position", I64),
        ("span", I64),
        ("target", POINTER),
    )
    with e.function("turn_latents", parameters) as (store, block_stride, table, position, span, target):
        pages = LatentPages(e, shape, store, block_stride, table, target)
        first = e.mul(span, RUNS_A_SPAN)
        last = e.smaller(e.add(first, RUNS_A_SPAN), e.add(e.div(position, RUN), 1))
        turn = _turn_pairs if shape.kv_kind is KVKind.BF16 else _turn_halves
        with e.loop(first, last) as run:
            turn(e, shape.value_dim, pages.keys(run), pages.values(run))


def _turn_halves(e: Emitter, width: int, source: Value, target: Value) -> None:
    """[width][16 keys] to [16 keys][width]"""
    with e.loop(0, width, LANES) as first:
        rows = [e.load(I16X16, e.at(source, e.mul(e.add(first, index), RUN), I16), 2) for index in range(LANES)]
        for key, row in enumerate(_turned(e, rows)):
            e.store(row, e.at(target, e.add(first, key * width), I16), 2)


def _turn_pairs(e: Emitter, width: int, source: Value, target: Value) -> None:
    """[width / 2][16 keys][2] to [16 keys / 2][width][2]"""
    with e.loop(0, width // 2, LANES) as first:
        rows = [e.load(I32X16, e.at(source, e.mul(e.add(first, index), RUN), I32), 4) for index in range(LANES)]
        by_key = [e.build.bitcast(row, I16X32) for row in _turned(e, rows)]  # each 32 dimensions of a key
        for pair in range(LANES // 2):
            for half in range(2):
                mask = [place + 32 * other for place in range(16 * half, 16 * half + 16) for other in range(2)]
                lanes = ir.Constant(ir.VectorType(I32, 32), mask)
                joined = e.build.shuffle_vector(by_key[2 * pair], by_key[2 * pair + 1], lanes)
                place = e.add(e.mul(first, 2), pair * width + LANES * half)
                e.store(e.build.bitcast(joined, I32X16), e.at(target, place, I32), 4)


def _turned(e: Emitter, rows: list[Value]) -> list[Value]:
    """16 vectors of 16: what lay in lane i of vector j lies in lane j of vector i."""
    rows = list(rows)
    for distance in (8, 4, 2, 1):
        low = [lane if not lane & distance else 16 + (lane ^ distance) for lane in range(LANES)]
        high = [lane ^ distance if not lane & distance else 16 + lane for lane in range(LANES)]
        for index in (index for index in range(LANES) if not index & distance):
            pair = rows[index], rows[index + distance]
            rows[index], rows[index + distance] = (e.build.shuffle_vector(*pair, e.ints(mask)) for mask in (low, high))
    return rows
