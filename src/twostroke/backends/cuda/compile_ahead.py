"""Compiling before launching. A rehearsal goes through the steps that a start will run, and hands every kernel that
they would launch to compilers beside each other; the steps, run behind it, wait for the kernel that they come to and
not for one after another. `_compilers` is the switch. `rehearsal` alone sets it, for its own thread: there `launcher`
compiles and launches nothing, and so does `native.py`. Knows how Triton is asked to compile only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import triton
from triton.compiler import CompiledKernel

from twostroke.core.errors import BackendError
from twostroke.machine import available_threads

MAX_THREADS = 8
"""Triton holds Python's lock for about a sixth of the time that it compiles: more threads would wait for it."""

_compilers: ContextVar[_Threads | None] = ContextVar("compilers of a rehearsal", default=None)


class _Threads(ThreadPoolExecutor):
    """Once given up, nothing more is begun. Not by cancelling, which Triton would wait for without end."""

    def __init__(self) -> None:
        super().__init__(min(MAX_THREADS, available_threads()), thread_name_prefix="compile")
        self._given_up = False
        self.begun: set[Any] = set()
        """Kernels, Triton's and others."""

    def submit(self, build: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        def unless_given_up() -> Any:
            if self._given_up:
                raise BackendError("The start was over before this kernel was compiled.")
            made = build(*arguments, **named)
            if isinstance(made, CompiledKernel):
                _build_launcher(made)
            return made

        return super().submit(unless_given_up)

    def give_up(self) -> None:
        self._given_up = True
        self.shutdown()


def _build_launcher(kernel: Any) -> None:
    """Triton has the host's C compiler make what launches kernels of one signature, and keeps that on disk, where the
    first launch finds it. An error is that launch's to raise."""
    with suppress(Exception):
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)


@contextmanager
def compilers() -> Iterator[_Threads]:
    """Threads for the kernels of a start: what a rehearsal began, launches within find. Leaving drops what has not
    begun, so that a start that fails, or is broken off, ends soon."""
    threads = _Threads()
    try:
        # An error is raised where the kernel is launched; here it would be one of a kernel that nobody launched.
        with triton.AsyncCompileMode(threads, ignore_errors=True):
            try:
                yield threads
            finally:
                threads.give_up()
    finally:
        for kernel in threads.begun:
            _forget_unfinished(kernel)


def _forget_unfinished(kernel: Any) -> None:
    """From Triton 3.7 on a kernel keeps what is to come, also what was dropped: the next start would find that."""
    for known, *_ in getattr(kernel, "device_caches", {}).values():  # the interpreter's and others have none
        for key in [key for key, held in known.items() if isinstance(held, triton.FutureKernel)]:
            del known[key]


@contextmanager
def rehearsal(compilers: _Threads) -> Iterator[None]:
    """Within, this thread launches no kernel of ours: each is compiled instead, and not waited for."""
    before = _compilers.set(compilers)
    try:
        yield
    finally:
        _compilers.reset(before)


@contextmanager
def compiled_ahead(rehearse: Callable[[], object], *, wanted: bool = True) -> Iterator[None]:
    """What `rehearse` would launch is compiled beside each other, and launches within find it. Where that is unwanted,
    they compile for themselves."""
    if not wanted:
        yield
        return
    with compilers() as threads:
        with rehearsal(threads):
            rehearse()
        yield


def is_rehearsal() -> bool:
    return _compilers.get() is not None


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """What launches a Triton kernel: `kernel[grid]`, outside of rehearsals."""
    return partial(_begin, kernel, grid) if is_rehearsal() else kernel[grid]


def _begin(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    threads = _compilers.get()
    assert threads is not None
    threads.begun.add(kernel)
    begun = kernel.warmup(*arguments, grid=grid, **options)
    # From Triton 3.9 on there is no future once it was asked for its result.
    if isinstance(begun, triton.FutureKernel) and begun.future is not None and begun.future.done():
        begun.result(ignore_errors=True)  # the kernel knows it now, and is quick to say so when asked again


def compile_beside(kernel: Any, build: Callable[[], object]) -> None:
    """In a rehearsal: have a kernel built by a compiler other than Triton's, once. What it raises is dropped, so
    whoever needs the kernel must find out again."""
    threads = _compilers.get()
    assert threads is not None
    if kernel not in threads.begun:
        threads.begun.add(kernel)
        threads.submit(build)
