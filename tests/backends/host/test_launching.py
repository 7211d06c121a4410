"""Steps run in turn: when asked for, in order, wherever they run; interrupts and failures stay where they belong."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from twostroke.backends.host.launching import CALLER_TOKENS, InTurnLauncher
from twostroke.core.step import PrefillChunk, Step, StepResult

SHORT, LONG = 1, CALLER_TOKENS + 1


def step(number: int, num_tokens: int) -> Step:
    return Step(number, prefills=(PrefillChunk(0, 0, (1,) * num_tokens, samples=False),))


class Recorder:
    """Executes steps: notes which, and on which thread."""

    def __init__(self) -> None:
        self.ran: list[tuple[int, bool]] = []  # the step's number, and whether the caller's thread ran it
        self.may_run = threading.Event()
        self.may_run.set()
        self._caller = threading.get_ident()

    def __call__(self, step: Step) -> StepResult:
        assert self.may_run.wait(timeout=20)
        if step.step_id < 0:
            raise ZeroDivisionError
        self.ran.append((step.step_id, threading.get_ident() == self._caller))
        return StepResult(step.step_id, {})


def test_nothing_runs_before_it_is_asked_for_and_then_all_before_it_run_first() -> None:
    execute = Recorder()
    launcher = InTurnLauncher(execute, "in-turn")
    tickets = [launcher.launch(step(number, size)) for number, size in enumerate((SHORT, LONG, SHORT, SHORT))]
    assert not any(ticket.ready for ticket in tickets)
    assert tickets[2].result().step_id == 2
    assert execute.ran == [(0, True), (1, False), (2, True)], "short steps run on the caller's thread"
    assert [ticket.ready for ticket in tickets] == [True, True, True, False]
    assert [ticket.result().step_id for ticket in tickets] == [0, 1, 2, 3]
    launcher.close()


@pytest.mark.parametrize("size", [SHORT, LONG])
def test_a_failing_step_raises_at_its_own_ticket(size: int) -> None:
    launcher = InTurnLauncher(Recorder(), "in-turn")
    broken, sound = launcher.launch(step(-1, size)), launcher.launch(step(1, size))
    assert sound.result().step_id == 1
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            broken.result()
    launcher.close()


def test_close_finishes_what_was_launched_and_takes_no_more() -> None:
    execute = Recorder()
    launcher = InTurnLauncher(execute, "in-turn")
    tickets = [launcher.launch(step(number, size)) for number, size in enumerate((LONG, SHORT))]
    launcher.close()
    assert [ticket.ready for ticket in tickets] == [True, True]
    with pytest.raises(RuntimeError):
        launcher.launch(step(2, SHORT))
    assert not any(thread.name.startswith("in-turn") for thread in threading.enumerate())


def test_an_interrupt_in_a_short_step_comes_after_it() -> None:
    done: list[int] = []

    def execute(step: Step) -> StepResult:
        os.kill(os.getpid(), signal.SIGINT)
        done.append(step.step_id)
        return StepResult(step.step_id, {})

    launcher = InTurnLauncher(execute, "in-turn")
    ticket = launcher.launch(step(0, SHORT))
    with pytest.raises(KeyboardInterrupt):
        ticket.result()
    assert ticket.result().step_id == 0
    assert done == [0], "it was not run again"
    launcher.close()


def test_a_long_step_can_be_interrupted_while_it_runs_and_the_next_one_still_waits_for_it() -> None:
    execute = Recorder()
    execute.may_run.clear()
    launcher = InTurnLauncher(execute, "in-turn")
    long, short = launcher.launch(step(0, LONG)), launcher.launch(step(1, SHORT))
    clock = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    clock.start()
    with pytest.raises(KeyboardInterrupt):
        long.result()
    clock.join()
    assert not long.ready
    threading.Timer(0.1, execute.may_run.set).start()
    assert short.result().step_id == 1
    assert [number for number, _ in execute.ran] == [0, 1]
    launcher.close()
