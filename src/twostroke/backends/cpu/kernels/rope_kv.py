"""Between the projections and attention: q/k norm, rotary embedding, and the writing of K and V into their blocks.
A block of one KV head holds K as [tokens / 16][head_dim][16] and then V as [tokens][head_dim], in f16: scores read 16
keys at a time, the weighted sum reads whole values."""

from __future__ import annotations

from llvmlite import ir

from twostroke.backends.cpu.arguments import KVGroupField, RopeField, StepField
from twostroke.backends.cpu.kernels.emitter import F32, I16, I32, I64, Emitter, Value
from twostroke.backends.cpu.kernels.norms import inverse_rms
from twostroke.backends.cpu.kernels.operation import Operation, operation
from twostroke.backends.cpu.shape import KernelShape


def emit_rope_and_store(e: Emitter, shape: KernelShape) -> None:
    """Work is shared by (token, head): query heads are normed and rotated in place, KV heads are stored."""
    with operation(e, "rope_and_store") as op:
        heads, kv_heads = op.integer(RopeField.NUM_HEADS), op.integer(RopeField.NUM_KV_HEADS)
        units = e.add(heads, kv_heads)
        first, last = op.share(e.mul(op.step_integer(StepField.NUM_TOKENS), units))
        with e.loop(first, last) as item:
            token, unit = e.div(item, units), e.rem(item, units)
            row = e.at(op.address(RopeField.INPUT), e.mul(token, op.integer(RopeField.STRIDE)), F32)
            with e.build.if_else(e.build.icmp_signed("<", unit, heads)) as (is_query, is_key):
                with is_query:
                    query = e.at(row, e.mul(unit, shape.head_dim), F32)
                    _norm_and_rotate(op, shape, query, RopeField.Q_NORM, token)
                with is_key:
                    head = e.sub(unit, heads)
                    offset = e.mul(head, shape.head_dim)
                    key = e.at(row, e.add(op.integer(RopeField.K_OFFSET), offset), F32)
                    value = e.at(row, e.add(op.integer(RopeField.V_OFFSET), offset), F32)
                    _norm_and_rotate(op, shape, key, RopeField.K_NORM, token)
                    _store(op, shape, key, value, token, head)


def _norm_and_rotate(op: Operation, shape: KernelShape, values: Value, norm: RopeField, token: Value) -> None:
    e = op.emitter
    weight = op.integer(norm)
    with e.when(e.is_nonzero(weight)):
        inverse = inverse_rms(e, values, e.integer(shape.head_dim), op.float(RopeField.EPSILON))
        for place in range(0, shape.head_dim, 16):
            normed = e.build.fmul(e.load_floats(values, place), inverse)
            e.store_floats(e.build.fmul(normed, e.load_floats(e.pointer(weight), place)), values, place)
    half = op.integer(RopeField.HALF)
    position = e.build.sext(e.load_at(I32, op.step_address(StepField.POSITIONS), token), I64)
    cosines, sines = (
        e.at(op.address(table), e.mul(position, half), F32) for table in (RopeField.COSINES, RopeField.SINES)
    )
    upper = e.at(values, half, F32)
    with e.loop(0, half) as index:
        low, high = e.load_at(F32, values, index), e.load_at(F32, upper, index)
        cosine, sine = e.load_at(F32, cosines, index), e.load_at(F32, sines, index)
        build = e.build
        turned_low = build.fsub(build.fmul(low, cosine), build.fmul(high, sine))
        turned_high = build.fadd(build.fmul(high, cosine), build.fmul(low, sine))
        e.store(turned_low, e.at(values, index, F32), 4)
        e.store(turned_high, e.at(upper, index, F32), 4)


def _store(op: Operation, shape: KernelShape, key: Value, value: Value, token: Value, head: Value) -> None:
    e = op.emitter
    group = op.integer(RopeField.GROUP)
    slots = op.step_address(e.add(group, int(KVGroupField.SLOTS)))
    slot = e.build.sext(e.load_at(I32, slots, token), I64)
    block, offset = e.div(slot, shape.block_size), e.rem(slot, shape.block_size)
    index = e.add(e.mul(block, op.integer(RopeField.NUM_KV_HEADS)), head)
    place = e.at(op.address(RopeField.STORE), e.mul(index, shape.block_bytes))
    run = e.at(place, e.mul(e.div(offset, 16), 16 * shape.head_dim), I16)
    column = e.at(run, e.rem(offset, 16), I16)
    for first in range(0, shape.head_dim, 16):
        halves = e.to_halves(e.load_floats(key, first))
        for lane in range(16):
            number = e.build.extract_element(halves, ir.Constant(I32, lane))
            e.store(number, e.at(column, 16 * (first + lane), I16), 2)
    values = e.at(e.at(place, shape.value_offset), e.mul(offset, shape.head_dim), I16)
    for first in range(0, shape.head_dim, 16):
        e.store(e.to_halves(e.load_floats(value, first)), e.at(values, first, I16), 2)
