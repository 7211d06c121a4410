"""The fair lock: one holder at a time, in the order of asking."""

from __future__ import annotations

import threading
import time

from twostroke.engine.turns import FairLock


def test_one_at_a_time_and_in_turn() -> None:
    lock = FairLock()
    order: list[int] = []
    inside = [0]

    def work(name: int) -> None:
        for _ in range(20):
            with lock:
                inside[0] += 1
                assert inside[0] == 1
                order.append(name)
                time.sleep(0.001)  # long enough that the others are in line again
                inside[0] -= 1

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(order) == 60
    middle = order[6:-6]
    runs = [index for index in range(len(middle) - 1) if middle[index] == middle[index + 1]]
    assert len(runs) <= 3, order  # a thread that is slow to come back may miss a turn, no more


def test_try_acquire_never_waits() -> None:
    lock = FairLock()
    assert lock.try_acquire()
    assert not lock.try_acquire()
    lock.release()
    with lock:
        assert not lock.try_acquire()
    assert lock.try_acquire()
