"""How many threads a step uses: all on quiet cores, the faster way on crowded ones, all again when they are free."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest

from twostroke.backends.cpu.thread_count import CLEAR_WINDOWS, KEPT_S, WINDOW_S, OthersOnCores, ThreadCount


@dataclass
class Cores:
    """A machine of two cores whose clocks are turned by hand."""

    now_s: float = 0.0
    busy_s: float = 0.0
    own_s: float = 0.0
    others: OthersOnCores = field(init=False)

    def __post_init__(self) -> None:
        self.others = OthersOnCores(lambda: self.busy_s, lambda: self.own_s, lambda: self.now_s)
        self.others.num_cores = 2

    def step(self, count: ThreadCount, step_s: dict[int, float], others: float, is_short: bool = True) -> int:
        """One step; beside it others take so many cores."""
        threads = count.for_step(is_short)
        seconds = step_s[threads]
        self.now_s += seconds
        self.own_s += seconds * threads
        self.busy_s += seconds * (threads + others)
        count.took(seconds, is_short)
        return threads


def used(cores: Cores, count: ThreadCount, step_s: dict[int, float], others: float, for_s: float) -> list[int]:
    until_s = cores.now_s + for_s
    found = []
    while cores.now_s < until_s:
        found.append(cores.step(count, step_s, others))
    return found


def test_quiet_cores_are_all_used() -> None:
    cores = Cores()
    count = ThreadCount(2, cores.others, lambda: cores.now_s)
    assert set(used(cores, count, {1: 0.004, 2: 0.005}, 0.2, 5.0)) == {2}
    assert count.others_share == pytest.approx(0.1)


@pytest.mark.parametrize(("step_s", "best"), [({1: 0.005, 2: 0.012}, 1), ({1: 0.009, 2: 0.006}, 2)])
def test_crowded_cores_are_used_the_faster_way(step_s: dict[int, float], best: int) -> None:
    cores = Cores()
    count = ThreadCount(2, cores.others, lambda: cores.now_s)
    used(cores, count, step_s, 0.7, 2 * WINDOW_S)
    found = used(cores, count, step_s, 0.7, 30.0)
    assert found.count(best) > 0.8 * len(found)  # and now and then both are tried again
    assert set(found) == {1, 2}
    # A long step has all threads: it deals its pieces to whoever is running, and gets more of the cores so.
    assert cores.step(count, step_s, 0.7, is_short=False) == 2


def test_free_cores_are_used_again() -> None:
    cores = Cores()
    count = ThreadCount(2, cores.others, lambda: cores.now_s)
    step_s = {1: 0.005, 2: 0.012}
    used(cores, count, step_s, 1.0, 3.0)
    used(cores, count, step_s, 0.0, (CLEAR_WINDOWS + 2) * WINDOW_S)
    assert set(used(cores, count, step_s, 0.0, 2 * KEPT_S)) == {2}


def test_a_system_that_does_not_tell_changes_nothing() -> None:
    cores = Cores()
    cores.others = OthersOnCores(lambda: None, lambda: cores.own_s, lambda: cores.now_s)
    count = ThreadCount(2, cores.others, lambda: cores.now_s)
    assert set(used(cores, count, {2: 0.005}, 2.0, 2.0)) == {2}


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    cores = Cores()
    count = ThreadCount(2, cores.others, lambda: cores.now_s)
    step_s = {1: 0.005, 2: 0.012}
    with caplog.at_level(logging.INFO, "twostroke.cpu"):
        for others in (1.0, 0.0, 1.0):
            used(cores, count, step_s, others, 4.0)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("other programs take ") and "of 2 cores" in said
