"""How threads run the tape: each runs every operation over its own part, and waits for all where an entry says so.
A barrier is one store and a few loads; who waits long gives its core away, and idle workers sleep."""

from __future__ import annotations

from llvmlite import ir

from twostroke.backends.cpu.arguments import POOL_LINE, PoolField, StepField, TapeField, TimeField, Wait
from twostroke.backends.cpu.kernels.emitter import I32, I64, POINTER, VOID, Emitter, Value
from twostroke.backends.cpu.kernels.operation import PARAMETERS, rows_stay

SPINS_BEFORE_YIELD = 100
"""A few microseconds: enough when every thread has a core, short when two of them share one."""
SPINS_BEFORE_SLEEP = 20000
"""About half a millisecond: longer than the gap between two decode steps, shorter than a user notices."""


def emit_threads(e: Emitter) -> None:
    _emit_run_tape(e)
    _emit_initialise(e)
    _emit_run_step(e)
    _emit_work(e)
    _emit_publish(e)


def _field(e: Emitter, pool: Value, field: PoolField) -> Value:
    return e.load_at(I64, pool, int(field))


def _pause(e: Emitter) -> None:
    if e.isa.architecture == "x86_64":
        e.external("llvm.x86.sse2.pause", VOID, [], [])
    else:
        e.external("llvm.aarch64.hint", VOID, [I32], [ir.Constant(I32, 1)])


def _clock(e: Emitter) -> Value:
    """The counter that runs at one rate on all cores."""
    name = "llvm.readcyclecounter" if e.isa.architecture == "x86_64" else "llvm.readsteadycounter"
    return e.external(name, I64, [], [])


def _emit_barrier(e: Emitter, pool: Value, thread: Value, threads: Value) -> None:
    build = e.build
    mine = e.atomic_pointer(pool, e.add(e.mul(thread, POOL_LINE), int(PoolField.FLAGS)))
    epoch = e.add(build.load_atomic(mine, "monotonic", 8, typ=I64), 1)
    build.store_atomic(epoch, mine, "release", 8)
    spins = e.variable(I64, e.integer(0))
    with e.loop(0, threads) as other:
        flag = e.atomic_pointer(pool, e.add(e.mul(other, POOL_LINE), int(PoolField.FLAGS)))
        check, wait, passed = (build.append_basic_block(name) for name in ("check", "wait", "passed"))
        build.branch(check)
        build.position_at_end(check)
        reached = build.icmp_signed(">=", build.load_atomic(flag, "acquire", 8, typ=I64), epoch)
        build.cbranch(reached, passed, wait)
        build.position_at_end(wait)
        _pause(e)
        spins.value = e.add(spins.value, 1)
        with e.when(build.icmp_signed(">", spins.value, e.integer(SPINS_BEFORE_YIELD))):
            e.external("sched_yield", I32, [], [])
        build.branch(check)
        build.position_at_end(passed)


def _emit_run_tape(e: Emitter) -> None:
    with e.function("run_tape", (("pool", POINTER), ("thread", I64))) as (pool, thread):
        tape, length = e.pointer(_field(e, pool, PoolField.TAPE)), _field(e, pool, PoolField.TAPE_LENGTH)
        step, threads = e.pointer(_field(e, pool, PoolField.STEP)), _field(e, pool, PoolField.THREADS)
        scratch_bytes = _field(e, pool, PoolField.SCRATCH_BYTES)
        scratch = e.at(e.pointer(_field(e, pool, PoolField.SCRATCH)), e.mul(scratch_bytes, thread))
        kind = ir.FunctionType(VOID, [kind for _, kind in PARAMETERS])
        times = _field(e, pool, PoolField.TIMES)
        stay = rows_stay(e, e.load_at(I64, step, int(StepField.NUM_TOKENS)), threads)
        needless = e.build.select(stay, e.integer(int(Wait.UNLESS_ROWS_STAY)), e.integer(int(Wait.NEVER)))

        def note(index: Value, field: TimeField) -> None:
            with e.when(e.is_nonzero(times)):
                entry_number = e.add(e.mul(length, thread), index)
                place = e.at(e.pointer(times), e.add(e.mul(entry_number, len(TimeField)), int(field)), I64)
                e.store(_clock(e), place, 8)

        with e.loop(0, length) as index:
            note(index, TimeField.BEGIN)
            entry = e.at(tape, e.mul(index, len(TapeField)), I64)
            address = e.load_at(I64, entry, int(TapeField.FUNCTION))
            arguments = e.pointer(e.load_at(I64, entry, int(TapeField.ARGUMENTS)))
            e.build.call(e.build.inttoptr(address, kind.as_pointer()), [arguments, step, thread, threads, scratch])
            note(index, TimeField.DONE)
            wait = e.load_at(I64, entry, int(TapeField.WAIT))
            never = e.build.icmp_signed("==", wait, e.integer(int(Wait.NEVER)))
            with e.when(e.build.not_(e.build.or_(never, e.build.icmp_signed("==", wait, needless)))):
                _emit_barrier(e, pool, thread, threads)
            note(index, TimeField.LEAVE)


def _lock(e: Emitter, pool: Value, function: str) -> None:
    e.external(function, I32, [POINTER], [e.at(pool, int(PoolField.MUTEX), I64)])


def _emit_initialise(e: Emitter) -> None:
    with e.function("initialise_pool", (("pool", POINTER),)) as (pool,):
        for function, field in (
            ("pthread_mutex_init", PoolField.MUTEX),
            ("pthread_cond_init", PoolField.CONDITION),
        ):
            e.external(function, I32, [POINTER, POINTER], [e.at(pool, int(field), I64), e.pointer(e.integer(0))])


def _emit_publish(e: Emitter) -> None:
    """Tells the workers: the number of a new step, or a negative number to leave."""
    with e.function("publish", (("pool", POINTER), ("number", I64))) as (pool, number):
        _publish(e, pool, number)


def _publish(e: Emitter, pool: Value, number: Value) -> None:
    _lock(e, pool, "pthread_mutex_lock")
    e.build.store_atomic(number, e.atomic_pointer(pool, int(PoolField.GO)), "release", 8)
    e.external("pthread_cond_broadcast", I32, [POINTER], [e.at(pool, int(PoolField.CONDITION), I64)])
    _lock(e, pool, "pthread_mutex_unlock")


def _emit_run_step(e: Emitter) -> None:
    """The caller is thread 0. Waking the others and working is one call, so that no interrupt of Python's can fall
    between and leave them waiting at a barrier."""
    with e.function("run_step", (("pool", POINTER),)) as (pool,):
        several = e.build.icmp_signed(">", _field(e, pool, PoolField.THREADS), e.integer(1))
        with e.when(several):
            number = e.build.load_atomic(e.atomic_pointer(pool, int(PoolField.GO)), "monotonic", 8, typ=I64)
            _publish(e, pool, e.add(number, 1))
        e.call("run_tape", [pool, e.integer(0)])


def _emit_work(e: Emitter) -> None:
    """A worker's life: wait for a number it has not seen, run the tape, until the number is negative."""
    with e.function("work", (("pool", POINTER), ("thread", I64))) as (pool, thread):
        build = e.build
        go = e.atomic_pointer(pool, int(PoolField.GO))
        seen = e.variable(I64, e.integer(0))
        spins = e.variable(I64)
        rest, check, idle, asleep, doze, awake, act, run, leave = (
            build.append_basic_block(name)
            for name in ("rest", "check", "idle", "asleep", "doze", "awake", "act", "run", "leave")
        )

        def is_new() -> Value:
            return build.icmp_signed("!=", build.load_atomic(go, "acquire", 8, typ=I64), seen.value)

        build.branch(rest)
        build.position_at_end(rest)
        spins.value = e.integer(0)
        build.branch(check)
        build.position_at_end(check)
        build.cbranch(is_new(), act, idle)
        build.position_at_end(idle)
        _pause(e)
        spins.value = e.add(spins.value, 1)
        tired = build.icmp_signed(">", spins.value, e.integer(SPINS_BEFORE_SLEEP))
        build.cbranch(tired, asleep, check)
        build.position_at_end(asleep)
        _lock(e, pool, "pthread_mutex_lock")
        build.branch(doze)
        build.position_at_end(doze)
        with e.build.if_else(is_new()) as (woken, still):
            with woken:
                build.branch(awake)
            with still:
                places = [e.at(pool, int(field), I64) for field in (PoolField.CONDITION, PoolField.MUTEX)]
                e.external("pthread_cond_wait", I32, [POINTER, POINTER], places)
                build.branch(doze)
        build.unreachable()
        build.position_at_end(awake)
        _lock(e, pool, "pthread_mutex_unlock")
        build.branch(act)
        build.position_at_end(act)
        seen.value = build.load_atomic(go, "acquire", 8, typ=I64)
        build.cbranch(build.icmp_signed("<", seen.value, e.integer(0)), leave, run)
        build.position_at_end(run)
        e.call("run_tape", [pool, thread])
        build.branch(rest)
        build.position_at_end(leave)
