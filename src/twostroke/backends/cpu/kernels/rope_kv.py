"""Between the projections and attention: q/k norm, rotary embedding, and the writing of K and V into their blocks, in
the layout of their kind (`kv_code.py`)."""

from __future__ import annotations

from twostroke.backends.cpu.arguments import KVGroupField, RopeField, StepField
from twostroke.backends.cpu.kernels.emitter import F32, F32X16, I32, I64, Emitter, Value
from twostroke.backends.cpu.kernels.kv_code import kv_code
from twostroke.backends.cpu.kernels.norms import inverse_rms
from twostroke.backends.cpu.kernels.operation import Operation, operation
from twostroke.backends.cpu.shape import KernelShape


def emit_rope_and_store(e: Emitter, shape: KernelShape) -> None:
    """Work is shared by (token, head): query heads are normed and rotated in place, KV heads are stored."""
    with operation(e, "rope_and_store") as op:
        heads, kv_heads = op.integer(RopeField.NUM_HEADS), op.integer(RopeField.NUM_KV_HEADS)
        units = e.add(heads, kv_heads)
        first, last = op.own_rows(op.step_integer(op.integer(RopeField.ROWS)))
        with e.loop(e.mul(first, units), e.mul(last, units)) as item:
            token, unit = e.div(item, units), e.rem(item, units)
            row = e.at(op.address(RopeField.INPUT), e.mul(token, op.integer(RopeField.STRIDE)), F32)
            with e.build.if_else(e.build.icmp_signed("<", unit, heads)) as (is_query, is_key):
                with is_query:
                    query = e.at(row, e.mul(unit, shape.head_dim), F32)
                    position = _position(op, token)
                    _norm_and_rotate(op, shape, query, position, RopeField.Q_NORM, RopeField.LATE_Q_NORM)
                    grow(op, query, shape.head_dim, op.integer(RopeField.GROWTH), position)
                with is_key:
                    head = e.sub(unit, heads)
                    offset = e.mul(head, shape.head_dim)
                    key = e.at(row, e.add(op.integer(RopeField.K_OFFSET), offset), F32)
                    value = e.at(row, e.add(op.integer(RopeField.V_OFFSET), offset), F32)
                    position = _position(op, token)
                    _norm_and_rotate(op, shape, key, position, RopeField.K_NORM, RopeField.LATE_K_NORM)
                    _store(op, shape, key, value, token, head)


def _norm_and_rotate(
    op: Operation, shape: KernelShape, values: Value, position: Value, norm: RopeField, late_norm: RopeField
) -> None:
    _norm(op, shape, values, norm)
    _rotate(op, values, position)
    _norm(op, shape, values, late_norm)


def _norm(op: Operation, shape: KernelShape, values: Value, norm: RopeField) -> None:
    """Of one head, where there is a weight to norm it by."""
    e = op.emitter
    weight = op.integer(norm)
    with e.when(e.is_nonzero(weight)):
        inverse = inverse_rms(e, values, e.integer(shape.head_dim), op.float(RopeField.EPSILON))
        for place in range(0, shape.head_dim, 16):
            normed = e.build.fmul(e.load_floats(values, place), inverse)
            e.store_floats(e.build.fmul(normed, e.load_floats(e.pointer(weight), place)), values, place)


def _rotate(op: Operation, values: Value, position: Value) -> None:
    e = op.emitter
    half = op.integer(RopeField.HALF)
    cosines, sines = (
        e.at(op.address(table), e.mul(position, half), F32) for table in (RopeField.COSINES, RopeField.SINES)
    )
    upper = e.at(values, half, F32)
    whole = e.sub(half, e.rem(half, 16))
    for start, stop, lanes in ((e.integer(0), whole, 16), (whole, half, 1)):
        kind = F32X16 if lanes == 16 else F32
        with e.loop(start, stop, lanes) as index:
            low, high, cosine, sine = (
                e.load(kind, e.at(array, index, F32), 4) for array in (values, upper, cosines, sines)
            )
            build = e.build
            turned_low = build.fsub(build.fmul(low, cosine), build.fmul(high, sine))
            turned_high = build.fadd(build.fmul(high, cosine), build.fmul(low, sine))
            e.store(turned_low, e.at(values, index, F32), 4)
            e.store(turned_high, e.at(upper, index, F32), 4)


def _position(op: Operation, row: Value) -> Value:
    return position_of(op, row, op.integer(RopeField.POSITIONS))


def position_of(op: Operation, row: Value, positions: Value | int = StepField.POSITIONS) -> Value:
    """`positions`: which field of the step's record has the address of all rows'."""
    e = op.emitter
    return e.build.sext(e.load_at(I32, op.step_address(positions), row), I64)


def grow(op: Operation, query: Value, width: int, factors: Value, position: Value) -> None:
    """A query times what its position gives, where `factors` is the address of such numbers."""
    e = op.emitter
    with e.when(e.is_nonzero(factors)):
        factor = e.broadcast(e.pointer(factors), position)
        with e.loop(0, width, 16) as place:
            e.store_floats(e.build.fmul(e.load_floats(query, place), factor), query, place)


def _store(op: Operation, shape: KernelShape, key: Value, value: Value, token: Value, head: Value) -> None:
    e = op.emitter
    group = op.integer(RopeField.GROUP)
    slots = op.step_address(e.add(group, int(KVGroupField.SLOTS)))
    slot = e.build.sext(e.load_at(I32, slots, token), I64)
    block, offset = e.div(slot, shape.block_size), e.rem(slot, shape.block_size)
    index = e.add(e.mul(block, op.integer(RopeField.NUM_KV_HEADS)), head)
    place = e.at(op.address(RopeField.STORE), e.mul(index, shape.block_bytes))
    kv_code(e, shape).store(key, value, place, offset)
