"""Rows to experts: which ones each row is sent to, where it lies among theirs, and what they find, summed by shares.
Ties go to the expert with the lower number, and sums follow a row's own order: who is beside it changes nothing."""

from __future__ import annotations

from llvmlite import ir

from twostroke.backends.cpu.arguments import MOST_LACKING_ROWS
from twostroke.backends.cpu.kernels.emitter import F32, F32X16, I32, I64, LANES, VOID, Emitter, Value, Variable
from twostroke.backends.cpu.kernels.operation import PARAMETERS, OperandWriter, Operation, operation
from twostroke.backends.cpu.routing_arguments import (
    ELSEWHERE,
    CallsField,
    GroupField,
    PlanPlace,
    RecordsField,
    RouteField,
    SendField,
    SumField,
)

_BELOW_ALL, _LOWEST, _ABOVE_ALL = -3.4e38, -3.0e38, 3.4e38
"""What no score is, what an expert is worth that may not be met, and what no score is above."""


def emit_routing(e: Emitter) -> None:
    _emit_choose(e)
    _emit_group(e)
    _emit_send(e)
    _emit_records(e)
    _emit_calls(e)
    _emit_sum(e)


def _emit_choose(e: Emitter) -> None:
    with operation(e, "choose_experts") as op:
        first, last = op.share(op.step_integer(op.integer(RouteField.ROWS)))
        with e.loop(first, last) as row:
            _Choice(op, row).emit()


class _Choice:
    """Of one row; the thread's scratch has its scores, what experts are worth, and what groups are."""

    def __init__(self, op: Operation, row: Value) -> None:
        e = self._e = op.emitter
        self._op = op
        self._experts, self._per_token = op.integer(RouteField.NUM_EXPERTS), op.integer(RouteField.PER_TOKEN)
        self._padded = e.mul(e.div(e.add(self._experts, LANES - 1), LANES), LANES)
        logits = e.mul(row, op.integer(RouteField.STRIDE))
        self._logits = e.at(op.address(RouteField.LOGITS), logits, F32)
        self._scores = op.scratch
        self._wanted = e.at(self._scores, self._padded, F32)
        self._groups = e.at(self._wanted, self._padded, F32)
        place = e.mul(row, self._per_token)
        self._chosen = e.at(op.address(RouteField.CHOSEN), place, I64)
        self._shares = e.at(op.address(RouteField.SHARES), place, F32)

    def emit(self) -> None:
        e, op = self._e, self._op
        with e.build.if_else(e.is_nonzero(op.integer(RouteField.IS_SIGMOID))) as (sigmoid, softmax):
            with sigmoid, e.loop(0, self._padded, LANES) as place:
                value = e.sigmoid_product(e.floats(1.0), e.load_floats(self._logits, place))
                e.store_floats(value, self._scores, place)
            with softmax:
                self._softmax()
        self._correct()
        groups = op.integer(RouteField.NUM_GROUPS)
        with e.when(e.build.icmp_signed(">", groups, e.integer(1))):
            self._keep_best_groups(groups, e.div(self._experts, groups))
        self._take()

    def _are_experts(self, place: Value) -> Value:
        """Which lanes from `place` on are: behind the last lies what a product was padded with."""
        e, build = self._e, self._e.build
        left = e.splat(build.trunc(e.sub(self._experts, place), I32))
        return build.icmp_signed("<", e.ints(range(LANES)), left)

    def _softmax(self) -> None:
        e, build = self._e, self._e.build
        highest, total = e.variable(F32X16, e.floats(_BELOW_ALL)), e.variable(F32X16, e.floats(0.0))
        with e.loop(0, self._padded, LANES) as place:
            value = build.select(self._are_experts(place), e.load_floats(self._logits, place), e.floats(_BELOW_ALL))
            highest.value = e.larger_float(highest.value, value)
        most = e.splat(e.reduce(highest.value, e.larger_float))
        with e.loop(0, self._padded, LANES) as place:
            value = e.exponential(build.fsub(e.load_floats(self._logits, place), most))
            value = build.select(self._are_experts(place), value, e.floats(0.0))
            e.store_floats(value, self._scores, place)
            total.value = build.fadd(total.value, value)
        whole = e.splat(e.reduce_sum(total.value))
        with e.loop(0, self._padded, LANES) as place:
            e.store_floats(build.fdiv(e.load_floats(self._scores, place), whole), self._scores, place)

    def _correct(self) -> None:
        """What counts in the choice, and is no part of a share."""
        e, correction = self._e, self._op.integer(RouteField.CORRECTION)
        with e.loop(0, self._padded, LANES) as place:
            e.store_floats(e.load_floats(self._scores, place), self._wanted, place)
        with e.when(e.is_nonzero(correction)), e.loop(0, self._padded, LANES) as place:
            more = e.load_floats(e.pointer(correction), place)
            e.store_floats(e.build.fadd(e.load_floats(self._wanted, place), more), self._wanted, place)

    def _keep_best_groups(self, groups: Value, size: Value) -> None:
        """Experts of others are worth less than any. A group is as good as some of its best together."""
        e, build, op = self._e, self._e.build, self._op
        with e.loop(0, groups) as group:
            start, total = e.mul(group, size), e.variable(F32, F32(0.0))
            search = _Search(e, self._wanted, start, e.add(start, size))
            with e.loop(0, op.integer(RouteField.RANKED_BY)):
                total.value = build.fadd(total.value, search.next()[0])
            e.store(total.value, e.at(self._groups, group, F32), 4)
        kept = e.at(self._groups, groups, F32)
        with e.loop(0, groups) as group:
            e.store(F32(0.0), e.at(kept, group, F32), 4)
        search = _Search(e, self._groups, e.integer(0), groups)
        with e.loop(0, op.integer(RouteField.GROUPS_PER_TOKEN)):
            e.store(F32(1.0), e.at(kept, search.next()[1], F32), 4)
        with e.loop(0, self._experts) as expert:
            is_kept = build.fcmp_ordered(">", e.load_at(F32, kept, e.div(expert, size)), F32(0.0))
            worth = build.select(is_kept, e.load_at(F32, self._wanted, expert), F32(_LOWEST))
            e.store(worth, e.at(self._wanted, expert, F32), 4)

    def _take(self) -> None:
        e, build, op = self._e, self._e.build, self._op
        total = e.variable(F32, F32(0.0))
        search = _Search(e, self._wanted, e.integer(0), self._experts)
        with e.loop(0, self._per_token) as choice:
            expert = search.next()[1]
            share = e.load_at(F32, self._scores, expert)
            e.store(expert, e.at(self._chosen, choice, I64), 8)
            e.store(share, e.at(self._shares, choice, F32), 4)
            total.value = build.fadd(total.value, share)
        divisor = build.select(e.is_nonzero(op.integer(RouteField.NORMALISES)), total.value, F32(1.0))
        with e.loop(0, self._per_token) as choice:
            place = e.at(self._shares, choice, F32)
            share = build.fdiv(e.load(F32, place, 4), divisor)
            e.store(build.fmul(share, op.float(RouteField.SHARE_SCALE)), place, 4)
        scales = op.integer(RouteField.EXPERT_SCALES)
        with e.when(e.is_nonzero(scales)), e.loop(0, self._per_token) as choice:
            place, expert = e.at(self._shares, choice, F32), e.load_at(I64, self._chosen, choice)
            scale = e.load_at(F32, e.pointer(scales), expert)
            e.store(build.fmul(e.load(F32, place, 4), scale), place, 4)


class _Search:
    """Numbers from the highest down, of equals the first one first. Where nothing compares, the first of all."""

    def __init__(self, e: Emitter, values: Value, start: Value, stop: Value) -> None:
        self._e, self._values, self._start, self._stop = e, values, start, stop
        self._last = e.variable(F32, F32(_ABOVE_ALL))
        self._last_place = e.variable(I64, start)

    def next(self) -> tuple[Value, Value]:
        """It, and its place."""
        e, build = self._e, self._e.build
        best: Variable = e.variable(F32, F32(_BELOW_ALL))
        place = e.variable(I64, self._start)
        last, last_place = self._last.value, self._last_place.value
        with e.loop(self._start, self._stop) as index:
            value = e.load_at(F32, self._values, index)
            is_next = build.and_(build.fcmp_ordered("==", value, last), build.icmp_signed(">", index, last_place))
            is_left = build.or_(build.fcmp_ordered("<", value, last), is_next)
            takes = build.and_(is_left, build.fcmp_ordered(">", value, best.value))
            best.value = build.select(takes, value, best.value)
            place.value = build.select(takes, index, place.value)
        self._last.value, self._last_place.value = best.value, place.value
        return best.value, place.value


def _emit_group(e: Emitter) -> None:
    """Rows in the order of their experts, and of one expert in their own: one thread counts them all."""
    with operation(e, "group_rows") as op, e.when(e.build.icmp_signed("==", op.part, e.integer(0))):
        held, tally = op.integer(GroupField.NUM_HELD), op.address(GroupField.TALLY)
        items = e.mul(op.step_integer(op.integer(GroupField.ROWS)), op.integer(GroupField.PER_TOKEN))
        with e.loop(0, held) as expert:
            e.store(e.integer(0), e.at(tally, expert, I64), 8)
        with e.loop(0, items) as item:
            expert, is_held = _held(op, item, held)
            with e.when(is_held):
                place = e.at(tally, expert, I64)
                e.store(e.add(e.load(I64, place, 8), 1), place, 8)
        _lay_out(op, held, tally)
        places = op.address(GroupField.PLACES)
        with e.loop(0, items) as item:
            expert, is_held = _held(op, item, held)
            e.store(e.integer(ELSEWHERE), e.at(places, item, I64), 8)
            with e.when(is_held):
                following = e.at(tally, expert, I64)
                place = e.load(I64, following, 8)
                e.store(place, e.at(places, item, I64), 8)
                e.store(e.add(place, 1), following, 8)


def _held(op: Operation, item: Value, held: Value) -> tuple[Value, Value]:
    """An item's expert, counted from the first that is held here, and whether it is."""
    e = op.emitter
    chosen = e.load_at(I64, op.address(GroupField.CHOSEN), item)
    expert = e.sub(chosen, op.integer(GroupField.FIRST_HELD))
    return expert, e.build.icmp_unsigned("<", expert, held)


def _lay_out(op: Operation, held: Value, tally: Value) -> None:
    """Counts become places: of each met expert, where its first row lies. Products may write a few rows beyond."""
    e = op.emitter
    met, start = e.variable(I64, e.integer(0)), e.variable(I64, e.integer(0))
    plan, met_list, starts = (op.address(field) for field in (GroupField.PLAN, GroupField.MET, GroupField.STARTS))
    with e.loop(0, held) as expert:
        place = e.at(tally, expert, I64)
        count = e.load(I64, place, 8)
        with e.when(e.is_nonzero(count)):
            e.store(expert, e.at(met_list, met.value, I64), 8)
            e.store(start.value, e.at(starts, met.value, I64), 8)
            e.store(count, e.at(plan, e.add(met.value, int(PlanPlace.COUNTS)), I64), 8)
            e.store(start.value, place, 8)
            start.value = e.add(start.value, e.add(count, MOST_LACKING_ROWS))
            met.value = e.add(met.value, 1)
    e.store(met.value, e.at(plan, int(PlanPlace.NUM_MET), I64), 8)
    e.store(start.value, e.at(plan, int(PlanPlace.NUM_ROWS), I64), 8)


def _emit_send(e: Emitter) -> None:
    """operand[place] = input[row], for each of the row's experts."""
    with operation(e, "send_rows") as op:
        width, per_token = op.integer(SendField.WIDTH), op.integer(SendField.PER_TOKEN)
        rows = op.rows_in(SendField.ROWS)
        op.stay = e.build.icmp_signed("<", rows, e.integer(0))  # they lie where experts are, never with a thread
        first, last = op.share(e.mul(rows, per_token))
        with e.loop(first, last) as item:
            place = e.load_at(I64, op.address(SendField.PLACES), item)
            values = e.at(op.address(SendField.INPUT), e.mul(e.div(item, per_token), width), F32)
            with e.when(e.build.icmp_signed(">=", place, e.integer(0))):
                writer = OperandWriter(op, place, width)
                with e.loop(0, e.div(width, 32)) as group:
                    at = e.mul(group, 32)
                    writer.write_group(group, e.load_floats(values, at), e.load_floats(values, e.add(at, 16)))


def _emit_records(e: Emitter) -> None:
    with operation(e, "place_records") as op:
        fields, strides = op.integer(RecordsField.NUM_FIELDS), op.address(RecordsField.STRIDES)
        met = e.load_at(I64, op.address(RecordsField.PLAN), int(PlanPlace.NUM_MET))
        first, last = op.share(met)
        with e.loop(first, last) as index:
            expert, start = (
                e.load_at(I64, op.address(field), index) for field in (RecordsField.MET, RecordsField.STARTS)
            )
            source = e.at(op.address(RecordsField.OF_LAYER), e.mul(expert, fields), I64)
            target = e.at(op.address(RecordsField.RECORDS), e.mul(index, fields), I64)
            with e.loop(0, fields) as field:
                value = e.load_at(I64, source, field)
                moved = e.add(value, e.mul(start, e.load_at(I64, strides, field)))
                # What no operand has must stay nowhere, wherever its rows would begin.
                e.store(e.build.select(e.is_nonzero(value), moved, value), e.at(target, field, I64), 8)
            counts = e.add(index, int(PlanPlace.COUNTS))
            e.store(counts, e.at(target, op.integer(RecordsField.ROWS_FIELD), I64), 8)
            call = e.at(op.address(RecordsField.CALLS), e.mul(index, 2), I64)
            e.store(e.load_at(I64, op.address(RecordsField.FUNCTIONS), expert), call, 8)
            e.store(e.build.ptrtoint(target, I64), e.at(call, 1, I64), 8)


def _emit_calls(e: Emitter) -> None:
    """A part of each of them: their step's record is the plan."""
    with operation(e, "run_calls") as op:
        plan = op.address(CallsField.PLAN)
        count = e.load_at(I64, plan, op.integer(CallsField.COUNT))
        kind = ir.FunctionType(VOID, [kind for _, kind in PARAMETERS])
        with e.loop(0, count) as index:
            call = e.at(op.address(CallsField.CALLS), e.mul(index, 2), I64)
            function = e.build.inttoptr(e.load(I64, call, 8), kind.as_pointer())
            record = e.pointer(e.load_at(I64, call, 1))
            e.build.call(function, [record, plan, op.part, op.parts, op.thread, op.threads, op.scratch])


def _emit_sum(e: Emitter) -> None:
    with operation(e, "sum_experts") as op:
        width, per_token = op.integer(SumField.WIDTH), op.integer(SumField.PER_TOKEN)
        accumulates = e.is_nonzero(op.integer(SumField.ACCUMULATE))
        first, last = op.share(op.step_integer(op.integer(SumField.ROWS)))
        with e.loop(first, last) as row:
            target = e.at(op.address(SumField.TARGET), e.mul(row, width), F32)
            choices = e.mul(row, per_token)
            with e.loop(0, width, LANES) as column:
                held = e.build.select(accumulates, e.load_floats(target, column), e.floats(0.0))
                total = e.variable(F32X16, held)
                with e.loop(choices, e.add(choices, per_token)) as choice:
                    place = e.load_at(I64, op.address(SumField.PLACES), choice)
                    with e.when(e.build.icmp_signed(">=", place, e.integer(0))):
                        start = e.add(e.mul(place, op.integer(SumField.STRIDE)), column)
                        found = e.load_floats(op.address(SumField.INPUT), start)
                        share = e.broadcast(op.address(SumField.SHARES), choice)
                        total.value = e.multiply_add(share, found, total.value)
                e.store_floats(total.value, target, column)
