"""Where and when a launched step runs: beside the caller, on a thread of its own, as soon as those before it are done;
or in turn, when its result is asked for. Knows nothing of what a step is made of but its size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from twostroke.core.interrupts import uninterrupted
from twostroke.core.step import Step, StepResult

Execute = Callable[[Step], StepResult]
CALLER_TOKENS = 64
"""A step of up to so many tokens runs on the caller's own thread, which no interrupt reaches meanwhile: it is short."""


class HostTicket:
    def __init__(self, future: Future[StepResult], bring: Callable[[Future[StepResult]], None] | None = None) -> None:
        self._future = future
        self._bring = bring

    @property
    def ready(self) -> bool:
        return self._future.done()

    def result(self) -> StepResult:
        if self._bring is not None and not self._future.done():
            self._bring(self._future)
        return self._future.result()


class Launcher(Protocol):
    def launch(self, step: Step) -> HostTicket:
        """Steps run in launch order."""

    def close(self) -> None:
        """Finish what was launched; nothing more may be."""


class BesideLauncher:
    """For a backend that leaves cores free: the caller goes on while the step runs."""

    def __init__(self, execute: Execute, name: str) -> None:
        self._execute = execute
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def launch(self, step: Step) -> HostTicket:
        return HostTicket(self._thread.submit(self._execute, step))

    def close(self) -> None:
        self._thread.shutdown(wait=True)


class InTurnLauncher:
    """For a backend whose threads take every core. There the caller could do nothing beside a step but hold it up: it
    would take a core from a thread that all others wait for, and learn of a token late, behind the next step."""

    def __init__(self, execute: Execute, name: str) -> None:
        self._execute = execute
        self._waiting: deque[tuple[Step, Future[StepResult]]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)  # started when first needed
        self._on_thread: Future[None] | None = None
        self._closed = False

    def launch(self, step: Step) -> HostTicket:
        if self._closed:
            raise RuntimeError("a step was launched after the backend was closed")
        future: Future[StepResult] = Future()
        self._waiting.append((step, future))
        return HostTicket(future, self._bring)

    def _bring(self, future: Future[StepResult]) -> None:
        """Run steps in their order up to this one. An interrupt loses nothing: the next call goes on from there."""
        while not future.done():
            if self._on_thread is not None:
                self._on_thread.result()  # waits; what a step raises is in the step's own future
                self._on_thread = None
            else:
                self._begin()

    def _begin(self) -> None:
        with uninterrupted():
            step, future = self._waiting.popleft()
            if step.num_tokens <= CALLER_TOKENS:
                self._settle(step, future)
            else:  # long: who waits for another thread can be interrupted
                self._on_thread = self._thread.submit(self._settle, step, future)

    def _settle(self, step: Step, future: Future[StepResult]) -> None:
        try:
            future.set_result(self._execute(step))
        except Exception as error:
            future.set_exception(error)

    def close(self) -> None:
        self._closed = True
        if self._waiting:
            self._bring(self._waiting[-1][1])
        self._thread.shutdown(wait=True)
