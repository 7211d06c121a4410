"""The fair lock: one holder at a time, in the order of asking."""

from __future__ import annotations

import threading
import time

from twostroke.engine.turns import FairLock


def test_one_at_a_time_and_in_turn() -> None:
    lock = FairLock()
    order: list[int] = []
    inside, left = [0], [3]

    def work(name: int) -> None:
        for _ in range(20):
            with lock:
                inside[0] += 1
                assert inside[0] == 1
                order.append(name)
                while len(lock._waiting) < left[0] - 1:  # until the others are in line again
                    time.sleep(0.0001)
                inside[0] -= 1
                left[0] -= order.count(name) == 20

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(order) == 60
    assert order == order[:3] * 20 and set(order) == {0, 1, 2}


def test_try_acquire_never_waits() -> None:
    lock = FairLock()
    assert lock.try_acquire()
    assert not lock.try_acquire()
    lock.release()
    with lock:
        assert not lock.try_acquire()
    assert lock.try_acquire()
