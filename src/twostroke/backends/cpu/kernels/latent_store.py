"""What a token leaves behind with latent attention: its latent, normed, and a key for all heads, rotated. Queries are
rotated in place, as keys are: in what order pairs lie changes none of their products."""

from __future__ import annotations

from collections.abc import Callable

from twostroke.backends.cpu.arguments import KVGroupField, LatentField, StepField
from twostroke.backends.cpu.kernels.emitter import F32, I32, I64, Emitter, Value
from twostroke.backends.cpu.kernels.kv_code import kv_code
from twostroke.backends.cpu.kernels.norms import inverse_rms
from twostroke.backends.cpu.kernels.operation import Operation, operation
from twostroke.backends.cpu.kernels.rope_kv import grow, position_of
from twostroke.backends.cpu.shape import KernelShape, LatentShape


def emit_latent_store(e: Emitter, shape: KernelShape) -> None:
    """Work is shared by (token, head), and what is kept counts as a head."""
    own = shape.latent
    assert own is not None
    with operation(e, "latent_store") as op:
        units = own.num_heads + 1
        first, last = op.own_rows(op.step_integer(StepField.NUM_TOKENS))
        with e.loop(e.mul(first, units), e.mul(last, units)) as item:
            token, unit = e.div(item, units), e.rem(item, units)
            with e.build.if_else(e.build.icmp_signed("<", unit, e.integer(own.num_heads))) as (is_query, is_kept):
                with is_query:
                    row = e.mul(token, op.integer(LatentField.QUERY_STRIDE))
                    place = e.add(row, e.mul(unit, own.key_dim))
                    query = e.at(op.address(LatentField.QUERIES), place, F32)
                    _rotate(op, own, e.at(query, own.plain_dim, F32), token)
                    grow(op, query, own.key_dim, op.integer(LatentField.GROWTH), position_of(op, token))
                with is_kept:
                    row = e.mul(token, op.integer(LatentField.STRIDE))
                    kept = e.at(op.address(LatentField.INPUT), row, F32)
                    _norm(op, own, kept)
                    _rotate(op, own, e.at(kept, own.rank, F32), token)
                    for index in range(own.rank + own.rotated_dim, own.kept_width):
                        e.store(F32(0.0), e.at(kept, index, F32), 4)
                    _store(op, shape, kept, token)


def _norm(op: Operation, own: LatentShape, values: Value) -> None:
    e, weight = op.emitter, op.address(LatentField.NORM)
    inverse = inverse_rms(e, values, e.integer(own.rank), op.float(LatentField.EPSILON))
    with e.loop(0, own.rank, 16) as place:
        normed = e.build.fmul(e.load_floats(values, place), inverse)
        e.store_floats(e.build.fmul(normed, e.load_floats(weight, place)), values, place)


def _rotate(op: Operation, own: LatentShape, values: Value, token: Value) -> None:
    e, half = op.emitter, own.rotated_dim // 2
    start = e.mul(position_of(op, token), half)
    cosines, sines = (e.at(op.address(table), start, F32) for table in (LatentField.COSINES, LatentField.SINES))

    def turn(low_place: Callable[[Value], Value], distance: int) -> None:
        build = e.build
        with e.loop(0, half) as index:
            place = low_place(index)
            low, high = e.load_at(F32, values, place), e.load_at(F32, values, e.add(place, distance))
            cosine, sine = e.load_at(F32, cosines, index), e.load_at(F32, sines, index)
            e.store(build.fsub(build.fmul(low, cosine), build.fmul(high, sine)), e.at(values, place, F32), 4)
            turned = build.fadd(build.fmul(high, cosine), build.fmul(low, sine))
            e.store(turned, e.at(values, e.add(place, distance), F32), 4)

    with e.build.if_else(e.is_nonzero(op.integer(LatentField.NEIGHBOURS))) as (neighbours, halves):
        with neighbours:
            turn(lambda index: e.mul(index, 2), 1)
        with halves:
            turn(lambda index: index, half)


def _store(op: Operation, shape: KernelShape, kept: Value, token: Value) -> None:
    e = op.emitter
    slots = op.step_address(e.add(op.integer(LatentField.GROUP), int(KVGroupField.SLOTS)))
    slot = e.build.sext(e.load_at(I32, slots, token), I64)
    block, offset = e.div(slot, shape.block_size), e.rem(slot, shape.block_size)
    place = e.at(op.address(LatentField.STORE), e.mul(block, shape.block_bytes))
    kv_code(e, shape).store_key(kept, place, offset)
