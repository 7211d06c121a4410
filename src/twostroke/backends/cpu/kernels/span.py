"""One span of keys met by a few queries: scores, weights and the weighted sum of values, merged into what earlier spans
left. Knows pages, masks and softmax; which queries and spans there are is `attention.py`'s to say."""

from __future__ import annotations

import math

from llvmlite import ir

from twostroke.backends.cpu.kernels.emitter import (
    F32,
    F32X16,
    I16X16,
    I32,
    I32X16,
    I64,
    LANES,
    POINTER,
    Emitter,
    Value,
    Variable,
)
from twostroke.backends.cpu.kernels.kv_code import KVCode, kv_code
from twostroke.backends.cpu.kernels.numbers import power_of_two
from twostroke.backends.cpu.kv_kind import SCALE_BYTES, STEPS_A_DOUBLING
from twostroke.backends.cpu.shape import RUN, SPAN, KernelShape

RUNS_A_SPAN = SPAN // RUN
MASKED, NOTHING_YET = -3.0e38, -1.0e30
"""A masked score lies so far below an empty maximum that its weight is exactly zero."""
LOG2_E = 1 / math.log(2)
"""Scores are in units of ln 2, so that weights are powers of two."""
_MERGE_DEGREE = 6
_UNROLL = 8
_MOST_PASSES = 8
"""Over a span's values that are written out one by one."""
TURNS = 8
"""Of queries over a span, in which the next one is fetched."""
RUNS_AHEAD = 8
"""Of a query alone: how many runs before they are read keys are fetched."""
LINE_BYTES = 64


def first_run(e: Emitter, position: Value, window: Value) -> Value:
    """The first run of 16 keys that a query at this position reads."""
    return e.div(e.larger(e.add(e.sub(position, window), 1), 0), RUN)


def reach(e: Emitter, shape: KernelShape, position: Value, window: Value, last: Value) -> Value:
    """The last key that a query at this position reads: its own, or where tokens see each other both ways one as far
    ahead as its window, up to the segment's `last`."""
    if not shape.both_ways:
        return position
    return e.smaller(e.add(position, e.sub(window, 1)), last)


class Pages:
    """Where runs of keys lie: a block table over the store of one KV head."""

    fetches = True
    """Whether what lies ahead is worth fetching."""

    def __init__(
        self, e: Emitter, shape: KernelShape, store: Value, block_stride: Value, table: Value, made: Value | None = None
    ) -> None:
        """`made`: what was made of the span's latents, for those that read it."""
        self._e, self._shape, self._made = e, shape, made
        self._store, self._block_stride, self._table = store, block_stride, table

    def block_of(self, run: Value) -> tuple[Value, Value]:
        """The address of the block that holds a run of 16 positions, and the run's index in it."""
        e = self._e
        runs_a_block = self._shape.block_size // RUN
        block = e.build.sext(e.load_at(I32, self._table, e.div(run, runs_a_block)), I64)
        return e.at(self._store, e.mul(block, self._block_stride)), e.rem(run, runs_a_block)

    def keys(self, run: Value) -> Value:
        return self._part(run, 0)

    def values(self, run: Value) -> Value:
        return self._part(run, self._shape.value_offset)

    def _part(self, run: Value, offset: int) -> Value:
        e = self._e
        block, index = self.block_of(run)
        run_bytes = RUN * self._shape.head_dim * self._shape.kv_kind.element_bytes
        return e.at(block, e.add(e.mul(index, run_bytes), offset))

    def key_scales(self, run: Value) -> Value:
        """16 of bf16, widened."""
        e = self._e
        bits = e.build.zext(self._halves(run, 0), I32X16)
        return e.build.bitcast(e.build.shl(bits, e.ints(16)), F32X16)

    def value_scale_logs(self, run: Value) -> Value:
        """Of the scales of 16 values, to the base of 2."""
        e = self._e
        steps = e.build.sext(self._halves(run, SCALE_BYTES * self._shape.block_size), I32X16)
        return e.build.fmul(e.build.sitofp(steps, F32X16), e.floats(1 / STEPS_A_DOUBLING))

    def _halves(self, run: Value, offset: int) -> Value:
        e = self._e
        block, index = self.block_of(run)
        place = e.add(e.mul(index, SCALE_BYTES * RUN), self._shape.scales_offset + offset)
        return e.load(I16X16, e.at(block, place), 2)


class State:
    """The maxima and sums that softmax remembers, f32, one of each for a row: a query and a head."""

    def __init__(self, e: Emitter, maxima: Value, sums: Value) -> None:
        self._e, self.maxima, self.sums = e, maxima, sums

    def from_row(self, row: Value) -> State:
        return State(self._e, *(self._e.at(array, row, F32) for array in (self.maxima, self.sums)))

    def merge(self, maxima: Value, sums: Value, rows: int) -> tuple[Value, Value]:
        """With those of a span, a lane a row; returns what the running and the new weighted sums are multiplied by.
        A span that a query cannot see changes nothing, exactly."""
        e = self._e
        before, before_sums = e.load_floats(self.maxima), e.load_floats(self.sums)
        common = e.larger_float(before, maxima)
        old, new = (power_of_two(e, e.build.fsub(x, common), _MERGE_DEGREE) for x in (before, maxima))
        total = e.multiply_add(before_sums, old, e.build.fmul(sums, new))
        for vector, place in ((common, self.maxima), (total, self.sums)):
            lanes = ir.Constant(ir.VectorType(I32, rows), list(range(rows)))
            e.store(e.build.shuffle_vector(vector, vector, lanes), place, 4)  # others' lanes lie behind
        return old, new


def merge_vector(e: Emitter, running: Value, place: Value | int, new_sum: Value, old: Value, new: Value) -> None:
    merged = e.multiply_add(e.load_floats(running, place), old, e.build.fmul(new_sum, new))
    e.store_floats(merged, running, place)


def lane_of(e: Emitter, vector: Value, row: int) -> Value:
    return e.splat(e.build.extract_element(vector, ir.Constant(I32, row)))


def accumulate_name(queries: int, name: str = "accumulate") -> str:
    return f"{name}_{queries}"


_PARAMETERS = (
    ("queries", POINTER),
    ("store", POINTER),
    ("block_stride", I64),
    ("table", POINTER),
    ("position", I64),
    ("window", I64),
    ("last", I64),
    ("cap", F32),
    ("span", I64),
    ("running", POINTER),
    ("maxima", POINTER),
    ("sums", POINTER),
    ("scratch", POINTER),
    ("turn", I64),
    ("made", POINTER),
)


class Accumulate:
    """A few queries (consecutive positions) and one group of heads: a row is a query and a head, query by query."""

    def __init__(
        self,
        e: Emitter,
        shape: KernelShape,
        queries: int,
        pages: type[Pages] = Pages,
        code: KVCode | None = None,
        name: str = "accumulate",
    ) -> None:
        self._e, self._shape, self._queries, self._code = e, shape, queries, code or kv_code(e, shape)
        self._reading, self._name = pages, name
        self._rows = [(query, head) for query in range(queries) for head in range(shape.heads_together)]

    def emit(self) -> None:
        e = self._e
        with e.function(accumulate_name(self._queries, self._name), _PARAMETERS) as values:
            self._bind(values)
            with e.when(e.build.icmp_signed("<", self._start, self._stop)):
                maxima = self._score()
                sums = self._weigh(maxima)
                old, new = self._state.merge(self._in_lanes(maxima), self._in_lanes(sums), len(self._rows))
                self._sum_values(old, new)

    def _bind(self, values: list[Value]) -> None:
        e, shape = self._e, self._shape
        (queries, store, block_stride, table, self._position, self._window, self._segment_last, cap) = values[:8]
        (span, self._running, maxima, sums, scratch, self._turn, made) = values[8:]
        self._cap, self._state = e.splat(cap), State(e, maxima, sums)
        self._pages = self._reading(e, shape, store, block_stride, table, made)
        row_bytes = self._code.query_row_bytes
        self._query_rows = [e.at(queries, row * row_bytes) for row in range(len(self._rows))]
        self._first = e.mul(span, RUNS_A_SPAN)
        self._start = e.larger(self._first, first_run(e, self._position, self._window))
        after = e.add(e.div(self._reach(self._queries - 1), RUN), 1)
        self._stop, self._last = e.smaller(e.add(self._first, RUNS_A_SPAN), after), e.sub(after, 1)
        self._scores, self._weights = scratch, e.at(scratch, shape.span_bytes(e.isa.accumulators))

    def _reach(self, query: int) -> Value:
        return reach(self._e, self._shape, self._e.add(self._position, query), self._window, self._segment_last)

    def _in_lanes(self, values: list[Value]) -> Value:
        """One float a row, as a vector."""
        vector = self._e.floats(0.0)
        for row, value in enumerate(values):
            vector = self._e.build.insert_element(vector, value, ir.Constant(I32, row))
        return vector

    def _place(self, array: Value, number_bytes: int, row: int, run: Value) -> Value:
        """Of a run's scores or weights."""
        e = self._e
        return e.at(array, e.mul(e.add(e.mul(e.sub(run, self._first), RUN), row * SPAN), number_bytes))

    def _score_place(self, row: int, run: Value) -> Value:
        return self._place(self._scores, 4, row, run)

    def _weight_place(self, row: int, run: Value) -> Value:
        return self._place(self._weights, self._code.weight_bytes, row, run)

    def _score(self) -> list[Value]:
        """scores = cap(q . k), masked; the maximum of each row. Several runs at a time, then what is left singly: the
        arithmetic of a run is the same in both."""
        e = self._e
        highest = [e.variable(F32X16, e.floats(NOTHING_YET)) for _ in self._rows]
        together = min(4, max(1, e.isa.accumulators // len(self._rows)))
        whole = e.sub(self._stop, e.rem(e.sub(self._stop, self._start), together))
        with e.loop(self._start, whole, together) as run:
            self._score_runs(run, together, highest)
        if together > 1:
            with e.loop(whole, self._stop) as run:
                self._score_runs(run, 1, highest)
        return [e.reduce(variable.value, e.larger_float) for variable in highest]

    def _score_runs(self, first: Value, count: int, highest: list[Variable]) -> None:
        e, code = self._e, self._code
        runs = [e.add(first, index) for index in range(count)]
        keys = [self._pages.keys(run) for run in runs]
        starts = [code.dot_start(query) for query in self._query_rows]
        dots = [[e.variable(code.total_kind, start) for _ in runs] for start in starts]
        if self._queries > 1 and self._pages.fetches:
            for run in runs:
                self._fetch_ahead(run)
        soon = self._soon(runs)
        steps = self._shape.head_dim // code.dims_a_step
        unroll = math.gcd(steps, _UNROLL)
        with e.loop(0, steps, unroll) as start:
            for offset in range(unroll):
                step = e.add(start, offset)
                self._fetch_part(soon, step, steps)
                loaded = [code.load_key(place, step) for place in keys]
                for row, query in enumerate(self._query_rows):
                    number = code.broadcast(query, step)
                    for key, dot in zip(loaded, dots[row], strict=True):
                        dot.value = code.multiply(dot.value, key, number)
        scales = [self._run_scales(run) for run in runs]
        with e.build.if_else(self._all_visible(first, count)) as (plain, partly):
            for branch, masked in ((plain, False), (partly, True)):
                with branch:
                    for index, run in enumerate(runs):
                        for row in range(len(self._rows)):
                            score = self._finish_score(dots[row][index].value, row, scales[index])
                            if masked:
                                visible = self._visible(run, self._rows[row][0])
                                score = e.build.select(visible, score, e.floats(MASKED))
                            e.store_floats(score, self._score_place(row, run))
                            highest[row].value = e.larger_float(highest[row].value, score)

    def _soon(self, runs: list[Value]) -> list[Value]:
        """What a query alone has fetched while it reads these keys: their values, and keys a few runs on. It would wait
        for the lines of short runs, which end before the machine's own prefetchers have understood them."""
        e, pages = self._e, self._pages
        if self._queries > 1 or self._shape.kv_kind.element_bytes > 1:
            return []
        later = [e.smaller(e.add(run, RUNS_AHEAD), self._last) for run in runs]
        return [pages.values(run) for run in runs] + [pages.keys(run) for run in later]

    def _fetch_part(self, places: list[Value], step: Value, steps: int) -> None:
        """A few lines at every step: all at once would hold up the loads behind them."""
        e, part_bytes = self._e, -(-self._code.run_bytes // steps)
        for place in places:
            part = e.at(place, e.mul(step, part_bytes))
            for line in range(0, part_bytes, LINE_BYTES):
                e.prefetch(e.at(part, line), nearest=False)

    def _fetch_ahead(self, run: Value) -> None:
        """A part of what the next span has in this run's place: the first queries of a tile that come to it would wait
        for its lines, which lie in blocks apart. Those that take turns over this span fetch a part each."""
        e, part_bytes = self._e, self._code.run_bytes // TURNS
        next_run = e.smaller(e.add(run, RUNS_A_SPAN), self._last)
        for place in (self._pages.keys(next_run), self._pages.values(next_run)):
            part = e.at(place, e.mul(e.rem(self._turn, TURNS), part_bytes))
            for line in range(0, part_bytes, LINE_BYTES):
                e.prefetch(e.at(part, line), nearest=False)

    def _run_scales(self, run: Value) -> tuple[Value, Value] | None:
        """Of keys, and the logarithms of those of values."""
        if not self._shape.kv_kind.has_scales:
            return None
        return self._pages.key_scales(run), self._pages.value_scale_logs(run)

    def _finish_score(self, score: Value, row: int, scales: tuple[Value, Value] | None) -> Value:
        """Where values have scales, weights take them on: a score is then that of a key and its value's scale."""
        e = self._e
        if scales is not None:
            score = e.build.fmul(e.build.sitofp(score, F32X16), e.splat(self._code.query_scale(self._query_rows[row])))
            if not self._shape.soft_capped:
                return e.multiply_add(score, *scales)
            score = e.build.fmul(score, scales[0])
        if self._shape.soft_capped:
            score = e.build.fmul(e.soft_cap(score, self._cap), e.floats(LOG2_E))
        return score if scales is None else e.build.fadd(score, scales[1])

    def _all_visible(self, run: Value, count: int) -> Value:
        """Whether every query reads all keys of these runs."""
        e = self._e
        first_key = e.mul(run, RUN)
        last = e.build.icmp_signed("<", e.add(first_key, RUN * count - 1), e.add(self._reach(0), 1))
        behind = e.sub(e.add(self._position, self._queries - 1), self._window)
        return e.build.and_(last, e.build.icmp_signed(">", first_key, behind))

    def _visible(self, run: Value, query: int) -> Value:
        """Which of the run's 16 positions this query reads: not beyond its reach, not behind its window."""
        e = self._e
        position = e.add(self._position, query)
        ahead = e.splat(e.build.trunc(e.sub(self._reach(query), e.mul(run, RUN)), I32))  # less the run's first
        lane = e.ints(range(LANES))
        behind = e.splat(e.build.trunc(e.sub(e.sub(position, self._window), e.mul(run, RUN)), I32))
        return e.build.and_(e.build.icmp_signed("<=", lane, ahead), e.build.icmp_signed(">", lane, behind))

    def _weigh(self, maxima: list[Value]) -> list[Value]:
        """weights = 2^(score - maximum); the sum of each row."""
        e, code = self._e, self._code
        sums = [e.variable(F32X16, e.floats(0.0)) for _ in self._rows]
        spread = [e.splat(maximum) for maximum in maxima]
        with e.loop(self._start, self._stop) as run:
            shares = None
            if self._shape.kv_kind.has_scales:
                shares = power_of_two(e, e.build.fneg(self._pages.value_scale_logs(run)), _MERGE_DEGREE)
            for row, total in enumerate(sums):
                score = e.load_floats(self._score_place(row, run))
                weights = power_of_two(e, e.build.fsub(score, spread[row]), code.series_degree)
                total.value = code.store_weights(weights, shares, self._weight_place(row, run), total.value)
        return [e.reduce_sum(variable.value) for variable in sums]

    def _sum_values(self, old: Value, new: Value) -> None:
        """running = running * old + weights x values * new, a few vectors of the head at a time so that sums stay in
        registers. Wide values are a loop: their code would grow with them."""
        e = self._e
        vectors = self._shape.value_dim // LANES
        passes = -(-vectors // max(1, min(vectors, e.isa.accumulators // len(self._rows))))
        width = -(-vectors // passes)
        if passes > _MOST_PASSES:
            width = max(number for number in range(1, width + 1) if vectors % number == 0)
            with e.loop(0, vectors, width) as start:
                self._sum_columns([e.add(start, index) for index in range(width)], old, new)
            return
        for first in range(0, vectors, width):
            columns = [e.integer(column) for column in range(first, min(first + width, vectors))]
            self._sum_columns(columns, old, new)

    def _sum_columns(self, columns: list[Value], old: Value, new: Value) -> None:
        e, code, rows = self._e, self._code, range(len(self._rows))
        steps = RUN // code.keys_a_step
        unroll = math.gcd(steps, _UNROLL)
        totals = [[e.variable(code.total_kind, code.nothing) for _ in columns] for _ in rows]
        with e.loop(self._start, self._stop) as run:
            values, weights = self._pages.values(run), [self._weight_place(row, run) for row in rows]
            with e.loop(0, steps, unroll) as start:
                for offset in range(unroll):
                    self._add_values(e.add(start, offset), values, weights, columns, totals)
        for row in rows:
            factors = lane_of(e, old, row), lane_of(e, new, row)
            for column, total in zip(columns, totals[row], strict=True):
                place = e.add(e.mul(column, LANES), row * self._shape.value_dim)
                merge_vector(e, self._running, place, code.weighted_sum(total.value), *factors)

    def _add_values(
        self, step: Value, values: Value, weights: list[Value], columns: list[Value], totals: list[list[Variable]]
    ) -> None:
        code = self._code
        loaded = [code.load_value(values, step, column) for column in columns]
        for row, total in enumerate(totals):
            weight = code.broadcast(weights[row], step)
            for value, variable in zip(loaded, total, strict=True):
                variable.value = code.multiply_value(variable.value, value, weight)
