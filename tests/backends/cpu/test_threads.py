"""The thread pool: every thread runs every entry, barriers hold, and nothing is left running or waiting."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import threading
import time
import weakref
from enum import IntEnum

import numpy as np
import pytest
from tests.backends.cpu.native import SHAPE, native_code

from twostroke.backends.cpu import isa as instruction_sets
from twostroke.backends.cpu.arguments import (
    POOL_LINE,
    WORD_COUNT_BITS,
    WORD_STAGE_BITS,
    LineField,
    NormField,
    PoolField,
    StepField,
    TimeField,
    Wait,
    float_bits,
)
from twostroke.backends.cpu.memory import address_of, float_zeros
from twostroke.backends.cpu.tape import Tape
from twostroke.backends.cpu.threads import PIN_VARIABLE, ThreadPool
from twostroke.core.errors import BackendError

WIDTH = 32


def pool_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("cpu-")]


class Chain:
    """Each entry reads what the one before it wrote, all rows of it: a barrier that leaks shows in the end."""

    def __init__(self, threads: int, length: int, rows: int | None = None, wait: Wait = Wait.ALWAYS) -> None:
        code = native_code(SHAPE, instruction_sets.choose())
        self.rows = threads if rows is None else rows
        self.values, self.weight = float_zeros(self.rows, WIDTH), float_zeros(WIDTH)
        self.values[:] = 1.0
        self.weight[:] = 1.0
        self.tape = Tape(code)
        fields: dict[IntEnum, int] = {
            NormField.INPUT: address_of(self.values),
            NormField.WIDTH: WIDTH,
            NormField.WEIGHT: address_of(self.weight),
            NormField.ROWS: StepField.NUM_TOKENS,
            NormField.ADD_TO: address_of(self.values),
            NormField.FACTOR: float_bits(1.0),
        }
        for _ in range(length):
            self.tape.add("norm_add", fields, wait=wait)
        self.entries = self.tape.entries()
        self.step = np.array([self.rows, 0, 0, 0, 0, 0, 0], dtype=np.int64)
        self.pool = ThreadPool(code, threads, 4096)

    def run(self) -> None:
        self.pool.run(self.entries, self.step)

    @property
    def last_stage_began_at(self) -> set[int]:
        """The first entry of the stage that was run last, as each thread's word has it."""
        words = self.pool._pool[PoolField.LINES + LineField.WORD :: POOL_LINE][: self.pool.threads]
        return {int(word) >> 2 * WORD_COUNT_BITS & (1 << WORD_STAGE_BITS) - 1 for word in words}


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_steps_one_after_the_other(threads: int) -> None:
    chain = Chain(threads, 50)
    try:
        for _ in range(40):
            chain.run()
        # A row of equal values x becomes x + 1 by each norm_add.
        assert np.array_equal(chain.values, np.full((threads, WIDTH), 1.0 + 50 * 40, dtype=np.float32))
    finally:
        chain.pool.close()


@pytest.mark.parametrize(
    ("threads", "rows", "stay"),
    [
        (2, 32, True),
        (2, 31, True),
        (2, 29, True),
        (2, 28, False),  # tiles of 16, 8 and 4: a thread would have more of them than the other
        (2, 33, False),
        (2, 48, False),
        (2, 64, True),
        (2, 16, False),
        (3, 48, True),
        (2, 191, False),
        (2, 192, True),
        (2, 203, True),
    ],
)
def test_threads_whose_rows_stay_do_not_wait(threads: int, rows: int, stay: bool) -> None:
    chain = Chain(threads, 20, rows, Wait.UNLESS_ROWS_STAY)
    last: dict[IntEnum, int] = {NormField.ROWS: StepField.NUM_LOGITS}
    chain.tape.add("norm_add", last)  # as every tape ends: the caller must not return before all are done
    chain.entries = chain.tape.entries()
    try:
        chain.run()
        assert chain.last_stage_began_at == {0 if stay else 20}
        assert np.array_equal(chain.values, np.full((rows, WIDTH), 21.0, dtype=np.float32))
    finally:
        chain.pool.close()


def test_workers_that_fell_asleep_wake_up() -> None:
    chain = Chain(3, 5)
    try:
        for _ in range(3):
            time.sleep(0.05)
            chain.run()
        assert chain.values[0, 0] == 16.0
    finally:
        chain.pool.close()


def test_idle_workers_use_no_cpu() -> None:
    chain = Chain(3, 5)
    try:
        chain.run()
        time.sleep(0.1)
        before = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - before < 0.1
    finally:
        chain.pool.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_fewer_threads_do_the_same(threads: int) -> None:
    chain = Chain(3, 40)
    try:
        for used in (3, threads, 3, threads):
            chain.pool.run(chain.entries, chain.step, threads=used)
        assert np.array_equal(chain.values, np.full((3, WIDTH), 1.0 + 4 * 40, dtype=np.float32))
    finally:
        chain.pool.close()


def test_a_thread_that_is_not_needed_uses_no_cpu() -> None:
    chain = Chain(2, 5)
    try:
        chain.pool.run(chain.entries, chain.step, threads=1)
        before_s, worker = time.process_time(), time.thread_time()
        while time.process_time() - before_s < 0.2:  # steps all the time, none of which wants the worker
            chain.pool.run(chain.entries, chain.step, threads=1)
        others_s = (time.process_time() - before_s) - (time.thread_time() - worker)
        assert others_s < 0.05
    finally:
        chain.pool.close()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="there is no affinity here")
def test_a_worker_that_cannot_run_stops_nobody() -> None:
    """Its core belongs to another program nearly all of the time: waiting for it at each of 400 stages would take a
    minute and more. What it has in hand when its core is taken it may keep the others waiting for."""
    chain = Chain(2, 400)
    core = min(os.sched_getaffinity(0))
    busy = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"])
    try:
        (worker,) = chain.pool._workers
        assert worker.native_id is not None
        os.sched_setaffinity(worker.native_id, {core})
        os.setpriority(os.PRIO_PROCESS, worker.native_id, 19)
        best_s = math.inf
        for _ in range(5):
            started_s = time.perf_counter()
            chain.run()
            best_s = min(best_s, time.perf_counter() - started_s)
        assert best_s < 5.0
        assert chain.values[0, 0] == 1.0 + 5 * 400
    finally:
        busy.kill()
        busy.wait()
        chain.pool.close()


def test_close_ends_the_threads_and_twice_is_fine() -> None:
    before = len(pool_threads())
    chain = Chain(4, 1)
    assert len(pool_threads()) == before + 3
    chain.pool.close()
    chain.pool.close()
    assert len(pool_threads()) == before
    with pytest.raises(BackendError, match="closed"):
        chain.run()


def test_a_forgotten_pool_ends_its_threads() -> None:
    before = len(pool_threads())
    chain = Chain(4, 1)
    chain.run()
    memory = weakref.ref(chain.pool._scratch.base)
    del chain
    gc.collect()
    deadline_s = time.monotonic() + 30
    while len(pool_threads()) > before or memory() is not None:  # told to leave; nobody waits until they have
        assert time.monotonic() < deadline_s
        time.sleep(1e-3)


_COLLECTED_UNDER_THE_LOCK = """
import gc, threading
from tests.backends.cpu.test_threads import Chain, pool_threads

chain = Chain(3, 1)
chain.run()
chain.itself = chain  # only the collector finds it
del chain
with threading._active_limbo_lock:  # as inside `threading.enumerate`; a thread takes it to end
    gc.collect()
while pool_threads():
    pass
print("ended")
"""


def test_the_collector_may_strike_under_the_lock_that_threads_end_with() -> None:
    command = [sys.executable, "-c", _COLLECTED_UNDER_THE_LOCK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "ended\n"


def test_a_process_ends_with_a_pool_open() -> None:
    code = "from tests.backends.cpu.test_threads import Chain\nchain = Chain(3, 1)\nchain.run()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_two_pools_run_side_by_side() -> None:
    chains = [Chain(2, 30), Chain(3, 30)]
    workers = [threading.Thread(target=lambda c=chain: [c.run() for _ in range(20)]) for chain in chains]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert [chain.values[0, 0] for chain in chains] == [601.0, 601.0]
    for chain in chains:
        chain.pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_does_not_hang() -> None:
    chain = Chain(2, 1)
    child = os.fork()
    if child == 0:
        try:
            chain.run()
        except BackendError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    chain.run()
    chain.pool.close()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="there is no affinity here")
@pytest.mark.parametrize(("extra", "variable", "pinned"), [(0, None, True), (0, "0", False), (1, None, False)])
def test_workers_have_a_core_each_where_they_use_all(
    extra: int, variable: str | None, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PIN_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(PIN_VARIABLE, variable)
    before = os.sched_getaffinity(0)
    running = set(pool_threads())
    chain = Chain(len(before) + extra, 1)
    try:
        chain.run()  # every worker has come as far as its work
        found = [os.sched_getaffinity(worker.native_id or 0) for worker in set(pool_threads()) - running]
    finally:
        chain.pool.close()
    assert os.sched_getaffinity(0) == before
    if pinned:
        assert all(len(cores) == 1 for cores in found)
        assert len(set.union(set(), *found)) == len(before) - 1
    else:
        assert all(cores == before for cores in found)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_note_when_they_come_and_go(threads: int) -> None:
    chain = Chain(threads, 6)
    times = np.zeros((threads, 6, len(TimeField)), dtype=np.int64)
    try:
        chain.pool.run(chain.entries, chain.step, times)
        chain.run()  # and so all are through with what they note of the run before
        noted = times.copy()
        chain.run()
    finally:
        chain.pool.close()
    assert np.array_equal(times, noted)
    flat = times.reshape(threads, -1)
    assert (flat > 0).all()
    assert (np.diff(flat, axis=1) >= 0).all()  # in order, within a thread
    # Nobody leaves a stage before all of it is done; a thread that found nothing to do may come when all have left.
    did_something = times[:, :, TimeField.DONE] > times[:, :, TimeField.BEGIN]
    last_done = np.where(did_something, times[:, :, TimeField.DONE], 0).max(axis=0)
    assert (last_done > 0).all()
    assert (times[:, :, TimeField.LEAVE] >= last_done).all()
