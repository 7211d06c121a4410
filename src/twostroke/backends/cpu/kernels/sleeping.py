"""Waiting for another thread: spinning a while, then asleep on the pool's condition (a futex, on Linux), so that a
thread that waits long gives its core away; and waking who sleeps. Nobody asleep costs a waker one load."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from twostroke.backends.cpu.arguments import PoolField
from twostroke.backends.cpu.kernels.emitter import I32, I64, POINTER, VOID, Emitter, Value


def initialise(e: Emitter, pool: Value) -> None:
    for function, field in (("pthread_mutex_init", PoolField.MUTEX), ("pthread_cond_init", PoolField.CONDITION)):
        e.external(function, I32, [POINTER, POINTER], [e.at(pool, int(field), I64), e.pointer(e.integer(0))])


def wait_until(e: Emitter, pool: Value, condition: Callable[[], Value], spins_before_sleep: Value | int) -> None:
    """Returns when the condition holds. Whoever makes it hold calls `wake_sleepers` behind it."""
    build = e.build
    spins = e.variable(I64, e.integer(0))
    check, spin, sleep, passed = (build.append_basic_block(name) for name in ("check", "spin", "sleep", "passed"))
    build.branch(check)
    build.position_at_end(check)
    build.cbranch(condition(), passed, spin)
    build.position_at_end(spin)
    _pause(e)
    spins.value = e.add(spins.value, 1)
    build.cbranch(build.icmp_signed(">", spins.value, e.integer(spins_before_sleep)), sleep, check)
    build.position_at_end(sleep)
    _sleep(e, pool, condition)
    build.branch(passed)
    build.position_at_end(passed)


def _sleep(e: Emitter, pool: Value, condition: Callable[[], Value]) -> None:
    """Who sleeps is counted before it looks once more, and a waker looks for sleepers after it has made the condition
    hold: one of the two sees the other."""
    build, sleepers = e.build, e.atomic_pointer(pool, int(PoolField.SLEEPERS))
    doze, again, awake = (build.append_basic_block(name) for name in ("doze", "again", "awake"))
    build.atomic_rmw("add", sleepers, e.integer(1), "seq_cst")
    _on_mutex(e, pool, "pthread_mutex_lock")
    build.branch(doze)
    build.position_at_end(doze)
    build.cbranch(condition(), awake, again)
    build.position_at_end(again)
    places = [e.at(pool, int(field), I64) for field in (PoolField.CONDITION, PoolField.MUTEX)]
    e.external("pthread_cond_wait", I32, [POINTER, POINTER], places)
    build.branch(doze)
    build.position_at_end(awake)
    _on_mutex(e, pool, "pthread_mutex_unlock")
    build.atomic_rmw("sub", sleepers, e.integer(1), "seq_cst")


def wake_sleepers(e: Emitter, pool: Value) -> None:
    build, sleepers = e.build, e.atomic_pointer(pool, int(PoolField.SLEEPERS))
    with e.when(e.is_nonzero(build.load_atomic(sleepers, "seq_cst", 8, typ=I64))):
        _on_mutex(e, pool, "pthread_mutex_lock")
        e.external("pthread_cond_broadcast", I32, [POINTER], [e.at(pool, int(PoolField.CONDITION), I64)])
        _on_mutex(e, pool, "pthread_mutex_unlock")


def _on_mutex(e: Emitter, pool: Value, function: str) -> None:
    e.external(function, I32, [POINTER], [e.at(pool, int(PoolField.MUTEX), I64)])


def _pause(e: Emitter) -> None:
    if e.isa.architecture == "x86_64":
        e.external("llvm.x86.sse2.pause", VOID, [], [])
    else:
        e.external("llvm.aarch64.hint", VOID, [I32], [ir.Constant(I32, 1)])
