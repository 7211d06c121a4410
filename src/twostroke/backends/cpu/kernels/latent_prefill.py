"""Prefill with latent attention: of each span of latents, keys and values of one head are made in scratch, and a tile
of a chunk's queries attends to them, span after span. Spans lie at fixed places whatever the chunk, so a prompt's
numbers do not depend on how it was cut."""

from __future__ import annotations

from twostroke.backends.cpu.arguments import LatentAttentionField, QueryBlockField, StepField
from twostroke.backends.cpu.kernels import numbers
from twostroke.backends.cpu.kernels.attention import Block, Piece
from twostroke.backends.cpu.kernels.emitter import F32, I32, I32X16, I64, LANES, POINTER, Emitter, Value
from twostroke.backends.cpu.kernels.kv_code import FloatCode, KVCode, PairCode, kv_code
from twostroke.backends.cpu.kernels.latent_decode import ALL_KEYS, LatentPages, table_of
from twostroke.backends.cpu.kernels.latent_products import divisor_up_to
from twostroke.backends.cpu.kernels.operation import Operation, operation
from twostroke.backends.cpu.kernels.span import RUNS_A_SPAN, Accumulate, Pages, lane_of
from twostroke.backends.cpu.kv_kind import KVKind
from twostroke.backends.cpu.shape import RUN, SPAN, KernelShape, LatentScratch, expanded_bytes

_RUNS_TOGETHER = 2
_ACCUMULATOR = "accumulate_expanded"
_LARGEST = 1e30
"""Of what is made of latents that another sequence left: its share is zero, and zero times it must be, too."""


class ExpandedPages(Pages):
    """One span, made of latents: keys where the store would be, values behind them."""

    fetches = False

    def keys(self, run: Value) -> Value:
        return self._of(self._store, run, self._shape.head_dim)

    def values(self, run: Value) -> Value:
        return self._of(self._made, run, self._shape.value_dim)

    def _of(self, part: Value, run: Value, width: int) -> Value:
        e = self._e
        return e.at(part, e.mul(e.rem(run, RUNS_A_SPAN), RUN * width * expanded_bytes(self._shape.kv_kind)))


def expanded_code(e: Emitter, shape: KernelShape) -> KVCode:
    return PairCode(e, shape) if shape.kv_kind is KVKind.BF16 else FloatCode(e, shape)


def emit_latent_prefill(e: Emitter, shape: KernelShape) -> None:
    """Work is (tile of a chunk, head), dealt to parts in turn."""
    own, latent = shape.expanded, shape.latent
    assert latent is not None
    for queries in sorted({1, own.queries_together(e.isa.accumulators)}):
        Accumulate(e, own, queries, ExpandedPages, expanded_code(e, own), _ACCUMULATOR).emit()
    _Expansion(e, shape).emit()
    _ExpandedPiece(e, shape).emit_tile()
    with operation(e, "attend_expanded") as op:
        items = e.mul(op.step_integer(StepField.NUM_CHUNK_BLOCKS), latent.num_heads)
        with e.loop(op.part, items, op.parts) as item:
            block = Block(op, e.div(item, latent.num_heads), int(StepField.CHUNK_BLOCKS))
            e.call("attend_tile", _arguments(op, shape, block, e.rem(item, latent.num_heads)))


_PARAMETERS = (
    ("query", POINTER),
    ("query_stride", I64),
    ("count", I64),
    ("store", POINTER),
    ("table", POINTER),
    ("position", I64),
    ("scale", F32),
    ("key_b", POINTER),
    ("value_b", POINTER),
    ("output", POINTER),
    ("output_stride", I64),
    ("scratch", POINTER),
)


def _arguments(op: Operation, shape: KernelShape, block: Block, head: Value) -> list[Value]:
    e, own, token = op.emitter, shape.latent, block[QueryBlockField.TOKEN]
    assert own is not None
    stride, output_stride = op.integer(LatentAttentionField.STRIDE), op.integer(LatentAttentionField.OUTPUT_STRIDE)
    query, output = (
        e.add(e.mul(token, row), e.mul(head, width))
        for row, width in ((stride, own.key_dim), (output_stride, own.value_dim))
    )
    number_bytes = expanded_bytes(shape.kv_kind)
    key_b, value_b = (e.mul(head, width * own.rank * number_bytes) for width in (own.plain_dim, own.value_dim))
    return [
        e.at(op.address(LatentAttentionField.QUERIES), query, F32),
        stride,
        block[QueryBlockField.COUNT],
        op.address(LatentAttentionField.STORE),
        table_of(op, block),
        block[QueryBlockField.POSITION],
        op.float(LatentAttentionField.SCALE),
        e.at(op.address(LatentAttentionField.KEY_B), key_b),
        e.at(op.address(LatentAttentionField.VALUE_B), value_b),
        e.at(op.address(LatentAttentionField.OUTPUT), output, F32),
        output_stride,
        op.scratch,
    ]


class _ExpandedPiece(Piece):
    accumulator = _ACCUMULATOR

    def __init__(self, e: Emitter, shape: KernelShape) -> None:
        own = shape.expanded
        self._room = LatentScratch.of_expanded(shape, e.isa.accumulators)
        super().__init__(e, own, self._room, expanded_code(e, own))

    def emit_tile(self) -> None:
        e = self._e
        with e.function("attend_tile", _PARAMETERS) as values:
            query, stride, count, store, table, position, scale, key_b, value_b, output, output_stride, scratch = values
            pages = [scratch, e.integer(0), table, position, e.integer(ALL_KEYS), e.integer(0)]
            self._bind([query, stride, count, *pages, scale, F32(1.0), output, output_stride, scratch, POINTER(None)])
            self._made = e.at(scratch, self._room.values)
            running, state = self._running_in(scratch)
            last = e.add(position, e.sub(count, 1))
            self._prepare()
            self._start(running, state, count)
            with e.loop(0, e.add(e.div(last, SPAN), 1)) as span:
                e.call("expand_span", [store, table, last, span, key_b, value_b, scratch, self._made])
                self._accumulate_all(count, span, running, state)
            with e.loop(0, count) as row:
                self._finish(row, running, state)

    def _prepared(self, query: Value) -> Value:
        return self._e.at(super()._prepared(query), self._room.queries)


class _Expansion:
    """Keys and values of one head, of a span: a key's plain part is by key_b what a score is by a query."""

    def __init__(self, e: Emitter, shape: KernelShape) -> None:
        assert shape.latent is not None
        self._e, self._shape, self._own, self._code = e, shape, shape.latent, kv_code(e, shape)
        self._is_paired = shape.kv_kind is KVKind.BF16
        self._steps = self._own.rank // self._code.dims_a_step

    def emit(self) -> None:
        e = self._e
        parameters = (
            ("store", POINTER),
            ("table", POINTER),
            ("last", I64),
            ("span", I64),
            ("key_b", POINTER),
            ("value_b", POINTER),
            ("keys", POINTER),
            ("values", POINTER),
        )
        with e.function("expand_span", parameters) as (store, table, last, span, key_b, value_b, keys, values):
            latents = LatentPages(e, self._shape, store, e.integer(self._shape.block_bytes), table)
            made = ExpandedPages(e, self._shape.expanded, keys, e.integer(0), table, values)
            first = e.mul(span, RUNS_A_SPAN)
            stop = e.smaller(e.add(first, RUNS_A_SPAN), e.add(e.div(last, RUN), 1))
            whole = e.sub(stop, e.rem(e.sub(stop, first), _RUNS_TOGETHER))
            for count, start, end in ((_RUNS_TOGETHER, first, whole), (1, whole, stop)):
                with e.loop(start, end, count) as run:
                    runs = [e.add(run, index) for index in range(count)]
                    self._keys([latents.keys(one) for one in runs], key_b, [made.keys(one) for one in runs])
            with e.loop(first, stop) as run:
                self._rotated(latents.keys(run), made.keys(run))
                self._values(latents.keys(run), value_b, made.values(run))

    def _keys(self, latents: list[Value], weights: Value, targets: list[Value]) -> None:
        """16 keys in the lanes of a vector, a few of their dimensions at a time."""
        e, own, code = self._e, self._own, self._code
        group = code.dims_a_step
        together = group * divisor_up_to(own.plain_dim // group, e.isa.accumulators // (group * len(latents)))
        row_bytes = own.rank * code.query_bytes
        with e.loop(0, own.plain_dim, together) as first:
            rows = [e.at(weights, e.mul(e.add(first, index), row_bytes)) for index in range(together)]
            totals = [[e.variable(code.total_kind, code.nothing) for _ in rows] for _ in latents]
            with e.loop(0, self._steps) as step:
                loaded = [code.load_key(place, step) for place in latents]
                for index, row in enumerate(rows):
                    number = code.broadcast(row, step)
                    for key, own_totals in zip(loaded, totals, strict=True):
                        own_totals[index].value = code.multiply(own_totals[index].value, key, number)
            for target, own_totals in zip(targets, totals, strict=True):
                found = [self._bounded(total.value) for total in own_totals]
                for index in range(0, together, group):
                    self._store(found[index : index + group], target, e.mul(e.add(first, index), RUN // group))

    def _rotated(self, latents: Value, target: Value) -> None:
        """All heads have the same, as it is kept."""
        e, own, group = self._e, self._own, self._code.dims_a_step
        with e.loop(0, own.rotated_dim // group) as step:
            kept = self._code.load_key(latents, e.add(step, own.rank // group))
            place = e.mul(e.add(step, own.plain_dim // group), RUN)
            if self._is_paired:
                e.store(kept, e.at(target, place, I32), 4)
            else:
                e.store_floats(kept, target, place)

    def _values(self, latents: Value, weights: Value, target: Value) -> None:
        """16 dimensions in the lanes of a vector, of a few keys at a time."""
        e, own, code = self._e, self._own, self._code
        most = e.isa.accumulators
        keys = 8 if most >= 16 else 2
        vectors = divisor_up_to(own.value_dim // LANES, most // keys)
        for first_key in range(0, RUN, keys):
            with e.loop(0, own.value_dim, LANES * vectors) as column:
                columns = [e.add(column, LANES * index) for index in range(vectors)]
                totals = [[e.variable(code.total_kind, code.nothing) for _ in columns] for _ in range(keys)]
                with e.loop(0, self._steps) as step:
                    loaded = [self._load_weights(weights, step, place) for place in columns]
                    factors = self._latent_numbers(latents, step, first_key, keys)
                    for factor, own_totals in zip(factors, totals, strict=True):
                        for held, total in zip(loaded, own_totals, strict=True):
                            total.value = code.multiply(total.value, held, factor)
                group = code.keys_a_step
                for index, place in enumerate(columns):
                    found = [self._bounded(own_totals[index].value) for own_totals in totals]
                    for key in range(0, keys, group):
                        row = (first_key + key) // group * own.value_dim
                        self._store(found[key : key + group], target, e.add(place, row))

    def _load_weights(self, weights: Value, step: Value, column: Value) -> Value:
        e = self._e
        place = e.add(e.mul(step, self._own.value_dim), column)
        return e.load(I32X16, e.at(weights, place, I32), 4) if self._is_paired else e.load_floats(weights, place)

    def _latent_numbers(self, latents: Value, step: Value, first: int, count: int) -> list[Value]:
        """Of some keys, what a step takes of their latents, each in all lanes."""
        e = self._e
        if self._is_paired:
            row = e.at(latents, e.mul(step, RUN), I32)
            return [e.splat(e.load_at(I32, row, first + index)) for index in range(count)]
        vector = self._code.load_key(latents, step)
        return [lane_of(e, vector, first + index) for index in range(count)]

    def _bounded(self, value: Value) -> Value:
        return numbers.saturate(self._e, value, _LARGEST)

    def _store(self, parts: list[Value], target: Value, place: Value) -> None:
        """One vector of floats, or two as pairs of bf16: the first in the lower half."""
        e, build = self._e, self._e.build
        if not self._is_paired:
            e.store_floats(parts[0], target, place)
            return
        low, high = (build.zext(numbers.to_bf16(e, part), I32X16) for part in parts)
        e.store(build.or_(low, build.shl(high, e.ints(16))), e.at(target, place, I32), 4)
