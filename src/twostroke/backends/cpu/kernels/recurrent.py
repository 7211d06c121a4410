"""Layers that keep a state: convolutions over the last few tokens, and matrices that fade and are written to, by the
delta rule or Mamba's. A piece of work is a few numbers side by side of one sequence, which go through all its tokens of
the step one after the other: their part of the state stays in the nearest cache, and what a token gets never depends
on how its sequence was cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from twostroke.backends.cpu.arguments import KVGroupField, StepField
from twostroke.backends.cpu.kernels.emitter import F32, F32X16, I32, I64, LANES, Emitter, Value, Variable
from twostroke.backends.cpu.kernels.operation import Operation, operation
from twostroke.backends.cpu.recurrent_arguments import ConvolutionField, RecurrenceField, RunField, StateField
from twostroke.backends.cpu.shape import convolution_name

_CHAINS = 4
"""Sums over keys are this many, joined at last: each waits for the one before it in its own chain alone."""
_CHANNEL_VECTORS = 4
"""Vectors of 16 channels that a piece of work takes of each row, where the width is a multiple of them: rows lie far
apart in memory, and a single line of each costs as much time as several."""


class _Run:
    def __init__(self, op: Operation, index: Value) -> None:
        e = self._e = op.emitter
        self._op = op
        self._record = e.at(op.step_address(StepField.RUNS), e.mul(index, len(RunField)), I32)
        self.row, self.count = self._field(RunField.ROW), self._field(RunField.COUNT)
        self.aside = self._field(RunField.ASIDE)
        self.is_first = e.is_nonzero(self._field(RunField.IS_FIRST))
        self._floats = op.integer(StateField.SLOT_FLOATS)
        self._part = op.integer(StateField.PART)

    def _field(self, field: RunField) -> Value:
        return self._e.build.sext(self._e.load_at(I32, self._record, int(field)), I64)

    def slot(self, offset: Value) -> Value:
        """The address of a number of the sequence's own state."""
        e, op = self._e, self._op
        group = op.integer(StateField.GROUP)
        stride = op.step_integer(e.add(group, int(KVGroupField.TABLE_STRIDE)))
        tables = op.step_address(e.add(group, int(KVGroupField.TABLES)))
        entry = e.load_at(I32, tables, e.mul(self._field(RunField.SEGMENT), stride))
        return self._in(op.address(StateField.STATES), e.build.sext(entry, I64), offset)

    def after_draft(self, number: Value, offset: Value) -> Value:
        """The same of the state after a draft."""
        return self._in(self._op.address(StateField.ASIDE), self._e.add(self.aside, number), offset)

    def _in(self, states: Value, place: Value, offset: Value) -> Value:
        e = self._e
        return e.at(states, e.add(e.mul(place, self._floats), e.add(self._part, offset)), F32)

    def target(self, token: Value, slot: Value, offset: Value) -> Value:
        """Where the state after a token goes: the sequence's own, but for what follows a draft."""
        e, build = self._e, self._e.build
        is_draft = build.and_(
            build.icmp_signed(">=", self.aside, e.integer(0)), build.icmp_signed(">", token, e.integer(0))
        )
        return build.select(is_draft, self.after_draft(e.sub(token, 1), offset), slot)


@contextmanager
def _items(op: Operation, per_run: Value) -> Iterator[tuple[_Run, Value]]:
    """This part's pieces of all runs: the run, and which piece of it."""
    e = op.emitter
    first, last = op.share(e.mul(op.step_integer(StepField.NUM_RUNS), per_run))
    with e.loop(first, last) as item:
        yield _Run(op, e.div(item, per_run)), e.rem(item, per_run)


def emit_convolution(e: Emitter, taps: int, *, is_gated: bool) -> None:
    """output = out_gate * conv(in_gate * input), or silu(conv(input) + bias); a few vectors of channels at a time."""
    with operation(e, convolution_name(taps, is_gated=is_gated)) as op:
        left = e.rem(op.integer(ConvolutionField.WIDTH), LANES * _CHANNEL_VECTORS)
        with e.build.if_else(e.is_nonzero(left)) as (uneven, whole):
            with uneven:
                _convolve(op, taps, 1, is_gated=is_gated)
            with whole:
                _convolve(op, taps, _CHANNEL_VECTORS, is_gated=is_gated)


def _convolve(op: Operation, taps: int, vectors: int, *, is_gated: bool) -> None:
    e, build = op.emitter, op.emitter.build
    width, stride = op.integer(ConvolutionField.WIDTH), op.integer(ConvolutionField.STRIDE)
    with _items(op, e.div(width, LANES * vectors)) as (run, block):
        first = e.mul(block, LANES * vectors)
        slot = run.slot(first)
        lanes = [_Channels(op, e.add(first, LANES * index), LANES * index, slot, taps) for index in range(vectors)]
        with e.when(run.is_first):
            for one in (kept for channels in lanes for kept in channels.kept):
                one.value = e.floats(0.0)
        with e.loop(0, run.count) as token:
            row = e.add(run.row, token)
            output_row = e.mul(row, op.integer(ConvolutionField.OUTPUT_STRIDE))
            for channels in lanes:
                place = e.add(e.mul(row, stride), channels.first)
                output = e.add(output_row, channels.first)
                channels.convolve(place, output, is_gated=is_gated)
            # What becomes of a state is kept once, but for states after drafts.
            is_last = build.icmp_signed("==", e.add(token, 1), run.count)
            with e.when(build.or_(is_last, build.icmp_signed(">=", run.aside, e.integer(0)))):
                target = run.target(token, slot, first)
                for channels in lanes:
                    channels.store(target, width)


class _Channels:
    """Sixteen side by side: their weights, and what they were at the last tokens."""

    def __init__(self, op: Operation, first: Value, offset: int, slot: Value, taps: int) -> None:
        """`first`: of all channels; `offset`: behind the first of the piece, where `slot` has its numbers."""
        e = self._e = op.emitter
        width = op.integer(ConvolutionField.WIDTH)
        self._op, self.first, self._offset = op, first, offset
        self._weights = [
            e.load_floats(op.address(ConvolutionField.WEIGHT), e.add(e.mul(width, tap), first)) for tap in range(taps)
        ]
        places = [e.add(e.mul(width, tap), offset) for tap in range(taps - 1)]
        self.kept = [e.variable(F32X16, e.load_floats(slot, place)) for place in places]

    def convolve(self, place: Value, output: Value, *, is_gated: bool) -> None:
        e, op = self._e, self._op
        value = e.load_floats(op.address(ConvolutionField.INPUT), place)
        if is_gated:
            value = e.build.fmul(value, e.load_floats(op.address(ConvolutionField.IN_GATE), place))
        total = e.floats(0.0)
        window = [*(one.value for one in self.kept), value]
        for earlier, weight in zip(window, self._weights, strict=True):
            total = e.multiply_add(earlier, weight, total)
        if is_gated:
            total = e.build.fmul(total, e.load_floats(op.address(ConvolutionField.OUT_GATE), place))
        else:
            total = e.build.fadd(total, e.load_floats(op.address(ConvolutionField.BIAS), self.first))
            total = e.sigmoid_product(total, total)
        e.store_floats(total, op.address(ConvolutionField.OUTPUT), output)
        for one, later in zip(self.kept, window[1:], strict=True):
            one.value = later

    def store(self, target: Value, width: Value) -> None:
        e = self._e
        for tap, one in enumerate(self.kept):
            e.store_floats(one.value, target, e.add(e.mul(width, tap), self._offset))


@dataclass(frozen=True, slots=True)
class _Token:
    """What a block of values needs of one token."""

    query: Value
    key: Value
    values: Value
    fade: Value
    strength: Value


def emit_recurrence(e: Emitter, *, is_delta: bool) -> None:
    """A head's matrix fades; then it is written to along the token's key, by the delta rule what is missing to the
    token's values; then it is read along the query. 16 values at a time: columns do not meet."""
    with operation(e, "recur_delta" if is_delta else "recur") as op:
        field = RecurrenceField
        heads, key_dim, value_dim = (op.integer(one) for one in (field.NUM_HEADS, field.KEY_DIM, field.VALUE_DIM))
        blocks = e.div(value_dim, LANES)
        padded_heads = e.mul(e.div(e.add(heads, LANES - 1), LANES), LANES)
        with _items(op, e.mul(heads, blocks)) as (run, item):
            head, block = e.div(item, blocks), e.rem(item, blocks)
            offset = e.mul(item, e.mul(key_dim, LANES))
            slot = run.slot(offset)
            with e.when(run.is_first), e.loop(0, key_dim) as key:
                e.store_floats(e.floats(0.0), slot, e.mul(key, LANES))
            key_place = e.mul(_key_head(op, head), key_dim)
            value_place = e.add(e.mul(head, value_dim), e.mul(block, LANES))
            source = e.variable(slot.type, slot)
            with e.loop(0, run.count) as token:
                row = e.add(run.row, token)
                first = e.mul(row, op.integer(field.STRIDE))
                decays = e.at(op.address(field.DECAYS), e.add(e.mul(row, e.mul(padded_heads, 2)), head), F32)
                mine = _Token(
                    e.at(op.address(field.QUERIES), e.add(first, key_place), F32),
                    e.at(op.address(field.KEYS), e.add(first, key_place), F32),
                    e.load_floats(op.address(field.VALUES), e.add(first, value_place)),
                    e.broadcast(decays),
                    e.broadcast(decays, padded_heads),
                )
                target = run.target(token, slot, offset)
                found = _change(e, mine, key_dim, source.value, target, is_delta=is_delta)
                if not is_delta:
                    found = e.multiply_add(mine.values, e.broadcast(op.address(field.SKIP), head), found)
                output = e.add(e.mul(row, e.mul(heads, value_dim)), value_place)
                e.store_floats(found, op.address(field.OUTPUT), output)
                source.value = target


def _key_head(op: Operation, head: Value) -> Value:
    """Whose queries and keys a head has."""
    e, build = op.emitter, op.emitter.build
    shared = op.integer(RecurrenceField.HEADS_A_KEY)
    in_order = e.div(head, e.larger(shared, 1))
    in_turn = e.rem(head, op.integer(RecurrenceField.NUM_KEY_HEADS))
    return build.select(e.is_nonzero(shared), in_order, in_turn)


def _change(e: Emitter, token: _Token, key_dim: Value, source: Value, target: Value, *, is_delta: bool) -> Value:
    """target = what becomes of source; what the token reads of it."""
    build, written = e.build, token.values
    if is_delta:
        held = _sums(e)
        with e.loop(0, key_dim, _CHAINS) as first:
            for chain, total in enumerate(held):
                key = e.add(first, chain)
                state = e.load_floats(source, e.mul(key, LANES))
                total.value = e.multiply_add(state, e.broadcast(token.key, key), total.value)
        written = build.fsub(written, build.fmul(token.fade, _joined(e, held)))
    written = build.fmul(written, token.strength)
    read = _sums(e)
    with e.loop(0, key_dim, _CHAINS) as first:
        for chain, total in enumerate(read):
            key = e.add(first, chain)
            place = e.mul(key, LANES)
            faded = build.fmul(e.load_floats(source, place), token.fade)
            state = e.multiply_add(e.broadcast(token.key, key), written, faded)
            e.store_floats(state, target, place)
            total.value = e.multiply_add(state, e.broadcast(token.query, key), total.value)
    return _joined(e, read)


def _sums(e: Emitter) -> list[Variable]:
    return [e.variable(F32X16, e.floats(0.0)) for _ in range(_CHAINS)]


def _joined(e: Emitter, sums: list[Variable]) -> Value:
    first, second, third, fourth = (one.value for one in sums)
    return e.build.fadd(e.build.fadd(first, second), e.build.fadd(third, fourth))
