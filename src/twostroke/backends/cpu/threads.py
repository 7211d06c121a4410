"""The threads of one engine: they live in native code between steps, spinning a while and then asleep, and never need
Python's lock to start working."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.arguments import MOST_ENTRIES, POOL_LINE, RUN_STEP_FIELDS, LineField, PoolField
from twostroke.backends.cpu.compile import NativeCode
from twostroke.backends.cpu.memory import address_of, padded, zeros
from twostroke.backends.host.cores import on_cores
from twostroke.core.errors import BackendError

_Record = npt.NDArray[np.int64]
PIN_VARIABLE = "TWOSTROKE_CPU_PIN"
_RECORD_VALUES = 1024
"""Room for a step's record: some fields, and three for each KV group."""


class ThreadPool:
    """Runs a tape on `threads` threads, the caller being one of them. One step at a time."""

    def __init__(self, code: NativeCode, threads: int, scratch_bytes: int) -> None:
        self.threads = threads
        self._process = os.getpid()
        self._scratch = zeros((threads, padded(scratch_bytes, 4096)), np.uint8)
        self._pool = zeros((int(PoolField.LINES) + POOL_LINE * (threads + 1),), np.int64)
        self._record = zeros((_RECORD_VALUES,), np.int64)
        self._pool[PoolField.STEP] = address_of(self._record)
        self._pool[PoolField.SCRATCH] = address_of(self._scratch)
        self._pool[PoolField.SCRATCH_BYTES] = self._scratch.shape[1]
        self._tapes: dict[int, _Record] = {}
        """All that were ever run: a worker that is behind may still look at one that nobody runs any more."""
        self._address = address_of(self._pool)
        numbers = [ctypes.c_int64] * len(RUN_STEP_FIELDS)
        run_step = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *numbers, ctypes.c_void_p, ctypes.c_int64)
        self._run_step = run_step(code.address("run_step"))
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address("initialise_pool"))(self._address)
        self._workers: list[threading.Thread] = []
        # Workers keep what they use alive, so that nobody has to wait for them before it may go.
        kept = (code, self._pool, self._scratch, self._record, self._tapes)
        publish = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(code.address("publish"))
        self._dismiss = weakref.finalize(self, _dismiss, publish, self._address, self._process, kept)
        _OPEN.add(self)
        work = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(code.address("work"))
        self._cores = cores = _cores(threads)
        try:
            for index in range(1, threads):
                core = None if cores is None else cores[index]
                arguments = (work, self._address, index, core, kept)
                worker = threading.Thread(target=_work, args=arguments, name=f"cpu-{index}", daemon=True)
                worker.start()
                self._workers.append(worker)
        except RuntimeError as error:
            self.close()
            raise BackendError(f"the system would not start {threads} threads; ask for fewer") from error

    def run(self, tape: _Record, step: _Record, times: _Record | None = None, *, threads: int | None = None) -> None:
        """Every operation of the tape, on all threads or on fewer; returns when all are done. With `times`, an array of
        [threads, entries, fields of TimeField], each thread notes when it came to and left every entry, and no part is
        cut into pieces."""
        if os.getpid() != self._process:
            raise BackendError("the cpu backend cannot be used in a forked process: create the engine there")
        if not self._dismiss.alive:
            raise BackendError("the cpu backend is closed")
        assert len(tape) <= MOST_ENTRIES and len(step) <= _RECORD_VALUES
        self._tapes.setdefault(id(tape), tape)
        used = self.threads if threads is None else threads
        # Fewer threads than cores are used where other programs are on some: the system knows which.
        core = self._cores[0] if self._cores is not None and used == self.threads else None
        with _on_core(core):
            self._run_step(
                self._address, address_of(tape), len(tape), used, address_of(times), address_of(step), len(step)
            )
        if times is not None:
            self._wait_until_left()

    def close(self) -> None:
        """Returns when all threads have ended. A pool that is forgotten instead only tells them to."""
        self._dismiss()
        for worker in self._workers:
            worker.join()

    def _wait_until_left(self) -> None:
        """Returns when no worker is in the last step any more, nor on its way to it."""
        go = self._pool[PoolField.GO]
        left = self._pool[PoolField.LINES + LineField.LEFT :: POOL_LINE][1 : self.threads]
        while (left != go).any():
            time.sleep(1e-4)


def _cores(threads: int) -> list[int] | None:
    """A core for each thread, or None where they are left to the system: unless there are as many threads as cores that
    this process may use (with fewer, a second engine would choose the same ones), and by $TWOSTROKE_CPU_PIN=0."""
    if os.environ.get(PIN_VARIABLE) == "0" or not hasattr(os, "sched_setaffinity"):
        return None
    allowed = sorted(os.sched_getaffinity(0))
    return allowed if len(allowed) == threads else None


def _on_core(core: int | None) -> AbstractContextManager[None]:
    """Without it the system may put the caller beside a worker, when another process keeps the caller's core busy: each
    barrier then waits for a switch between the two, and a step takes six times as long."""
    return on_cores(None if core is None else {core})


def _work(work: Callable[[int, int], None], address: int, index: int, core: int | None, kept: object) -> None:
    """A worker's life."""
    with _on_core(core):
        work(address, index)


def _dismiss(publish: Callable[[int, int], None], address: int, process: int, kept: object) -> None:
    """Tells the workers to leave. The collector may call this wherever it strikes, also while its thread holds a lock
    that a thread takes to end (as in `threading.enumerate`): so this waits for nobody."""
    if os.getpid() == process:  # a forked child has no workers
        publish(address, -1)


_OPEN: weakref.WeakSet[ThreadPool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """The interpreter must not end under threads that are still on their way out."""
    for pool in list(_OPEN):
        pool.close()
