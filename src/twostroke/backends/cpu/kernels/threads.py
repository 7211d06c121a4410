"""The life of a pool's threads: a step is published, workers wait for it, spinning a while and then asleep, and run
its tape (`stages.py`). The caller never waits for a worker that has nothing in hand, so one may come to a step when it
is over: it then leaves without touching anything."""

from __future__ import annotations

from twostroke.backends.cpu.arguments import RUN_STEP_FIELDS, LineField, PoolField
from twostroke.backends.cpu.kernels.emitter import I64, POINTER, Emitter, Value
from twostroke.backends.cpu.kernels.sleeping import initialise, wait_until, wake_sleepers
from twostroke.backends.cpu.kernels.stages import emit_stages, line_pointer, pool_field

SPINS_BEFORE_REST = 20000
"""About half a millisecond: longer than the gap between two decode steps, shorter than a user notices."""


def emit_threads(e: Emitter) -> None:
    emit_stages(e)
    with e.function("initialise_pool", (("pool", POINTER),)) as (pool,):
        initialise(e, pool)
    _emit_publish(e)
    _emit_run_step(e)
    _emit_work(e)


def _go(e: Emitter, pool: Value) -> Value:
    return e.atomic_pointer(pool, int(PoolField.GO))


def _emit_publish(e: Emitter) -> None:
    """Tells all workers: a negative number to leave."""
    with e.function("publish", (("pool", POINTER), ("number", I64))) as (pool, number):
        e.build.store_atomic(number, _go(e, pool), "seq_cst", 8)
        wake_sleepers(e, pool)


def _emit_run_step(e: Emitter) -> None:
    """The caller is thread 0. Waking the others and working is one call, so that no interrupt of Python's can fall
    between. The record is copied: a worker may still look at it when the step is over."""
    parameters = (("pool", POINTER), *((field.name.lower(), I64) for field in RUN_STEP_FIELDS))
    with e.function("run_step", (*parameters, ("record", POINTER), ("record_length", I64))) as values:
        pool, *fields, record, record_length = values
        build = e.build
        go = e.add(build.load_atomic(_go(e, pool), "monotonic", 8, typ=I64), 2)
        build.store_atomic(e.sub(go, 1), _go(e, pool), "seq_cst", 8)
        build.fence("seq_cst")
        for field, value in zip(RUN_STEP_FIELDS, fields, strict=True):
            e.store(value, e.at(pool, int(field), I64), 8)
        target = e.pointer(pool_field(e, pool, PoolField.STEP))
        with e.loop(0, record_length) as index:
            e.store(e.load_at(I64, record, index), e.at(target, index, I64), 8)
        build.store_atomic(go, _go(e, pool), "seq_cst", 8)
        with e.when(build.icmp_signed(">", pool_field(e, pool, PoolField.THREADS), e.integer(1))):
            wake_sleepers(e, pool)
        e.call("run_tape", [pool, e.integer(0), go])


def _emit_work(e: Emitter) -> None:
    """A worker's life: wait for a step it has not seen, run its tape, until it is told to leave. A worker that the
    step has no use for goes to sleep at once: steps that others run do not keep it spinning."""
    with e.function("work", (("pool", POINTER), ("thread", I64))) as (pool, thread):
        build = e.build
        seen, spins = e.variable(I64, e.integer(0)), e.variable(I64, e.integer(SPINS_BEFORE_REST))
        rest, act, run, leave = (build.append_basic_block(name) for name in ("rest", "act", "run", "leave"))

        def is_settled(found: Value) -> Value:
            return build.icmp_signed("==", build.and_(found, e.integer(1)), e.integer(0))

        def is_new() -> Value:
            found = build.load_atomic(_go(e, pool), "acquire", 8, typ=I64)
            told_to_leave = build.icmp_signed("<", found, e.integer(0))
            changed = build.icmp_signed("!=", found, seen.value)
            return build.or_(told_to_leave, build.and_(changed, is_settled(found)))

        build.branch(rest)
        build.position_at_end(rest)
        wait_until(e, pool, is_new, spins.value)
        seen.value = build.load_atomic(_go(e, pool), "acquire", 8, typ=I64)
        build.cbranch(build.icmp_signed("<", seen.value, e.integer(0)), leave, act)
        build.position_at_end(act)
        build.cbranch(is_settled(seen.value), run, rest)
        build.position_at_end(run)
        is_used = build.icmp_signed("<", thread, pool_field(e, pool, PoolField.THREADS))
        spins.value = build.select(is_used, e.integer(SPINS_BEFORE_REST), e.integer(0))
        e.call("run_tape", [pool, thread, seen.value])
        build.store_atomic(seen.value, line_pointer(e, pool, thread, LineField.LEFT), "release", 8)
        build.branch(rest)
        build.position_at_end(leave)
