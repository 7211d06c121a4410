"""Ctrl-C is held back in bookkeeping, arrives in waiting, and is never lost."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from twostroke.engine.interrupts import HeldInterrupts, uninterrupted


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # a signal is looked at between two instructions
        pass


def test_it_follows_the_block() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        press_ctrl_c()
        done = True
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_arrives_while_let_through_and_the_handler_comes_back() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), HeldInterrupts() as interrupts:
        interrupts.let_through()
        press_ctrl_c()
        reached.append("after")
    assert reached == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_was_held_arrives_with_letting_through() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), HeldInterrupts() as interrupts:
        press_ctrl_c()
        reached.append("held")
        interrupts.let_through()
        reached.append("after")
    assert reached == ["held"]


def test_it_is_held_again_and_delivered_once() -> None:
    seen = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with HeldInterrupts() as interrupts:
            interrupts.let_through()
            interrupts.hold()
            press_ctrl_c()
            press_ctrl_c()
            assert seen == []
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_an_ignored_signal_stays_ignored() -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            press_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_other_threads_need_nothing() -> None:
    handlers = []

    def work() -> None:
        with HeldInterrupts() as interrupts:
            interrupts.let_through()
            interrupts.hold()
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
