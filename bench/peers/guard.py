"""Notices a busy machine: the processor time that others used while we measured, what the hypervisor took, and whether
a fixed piece of work has become slower. Linux; elsewhere only the fixed work is timed."""

from __future__ import annotations

import hashlib
import os
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

FOREIGN_LIMIT = 0.06
"""Of all cores' time: above this, a sample is noisy."""
SLOWDOWN_LIMIT = 1.25
"""Of the fixed work against its best in this run."""
SPIN_BYTES = 4 << 20
SPIN_ROUNDS = 5
QUIET_WINDOW_S = 0.4


@dataclass(frozen=True, slots=True)
class Disturbance:
    foreign_share: float
    """Of all cores' time, used by processes that are not ours."""
    stolen_share: float
    """Of all cores' time, taken by the hypervisor."""
    slowdown: float
    """The fixed work's time before or after, whichever was slower, over its best in this run."""

    @property
    def is_noisy(self) -> bool:
        return self.foreign_share + self.stolen_share > FOREIGN_LIMIT or self.slowdown > SLOWDOWN_LIMIT

    def __str__(self) -> str:
        return f"others {self.foreign_share + self.stolen_share:.0%}, slowdown {self.slowdown:.2f}"


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """Seconds since the machine started."""

    busy_s: float
    stolen_s: float
    own_s: float
    """Of this process and all its descendants that live."""


def processor_times(proc: Path = Path("/proc")) -> ProcessorTimes:
    try:
        fields = [int(word) for word in (proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return ProcessorTimes(0.0, 0.0, 0.0)
    ticks = os.sysconf("SC_CLK_TCK")
    user, nice, system, _idle, _iowait, _irq, _softirq, stolen = fields
    return ProcessorTimes((user + nice + system) / ticks, stolen / ticks, _own_ticks(proc) / ticks)


def _own_ticks(proc: Path) -> int:
    children: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text()
        except OSError:
            continue  # it has just ended
        fields = text[text.rindex(")") + 2 :].split()  # a program's name may hold spaces and brackets
        children.setdefault(int(fields[1]), []).append(int(entry.name))
        used[int(entry.name)] = sum(int(field) for field in fields[11:15])  # own and ended children's, user and system
    total, pending = 0, [os.getpid()]
    while pending:
        pid = pending.pop()
        total += used.get(pid, 0)
        pending.extend(children.get(pid, ()))
    return total


def shares(before: ProcessorTimes, after: ProcessorTimes, wall_s: float, cores: int) -> tuple[float, float]:
    """(others', the hypervisor's) share of all cores' time."""
    foreign_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    total_s = max(wall_s * cores, 1e-9)
    return max(foreign_s, 0.0) / total_s, max(after.stolen_s - before.stolen_s, 0.0) / total_s


def spin_s(threads: int) -> float:
    """Median time of a fixed piece of work on every thread at once (hashing, which runs without the interpreter)."""
    data = bytes(SPIN_BYTES)
    times_s = []
    for _ in range(SPIN_ROUNDS):
        workers = [threading.Thread(target=lambda: hashlib.sha256(data).digest()) for _ in range(threads)]
        started_s = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s)


class Guard:
    def __init__(self, threads: int, max_wait_s: float) -> None:
        self._threads = threads
        self._cores = os.cpu_count() or 1
        self._max_wait_s = max_wait_s
        self._best_spin_s = min(spin_s(threads) for _ in range(3))

    def wait_until_quiet(self) -> float:
        """Wait, up to the limit, for a moment in which others leave the cores alone; the seconds waited."""
        started_s = time.perf_counter()
        while self._max_wait_s > 0.0:
            before, window_s = processor_times(), time.perf_counter()
            time.sleep(QUIET_WINDOW_S)
            now_s = time.perf_counter()
            busy = sum(shares(before, processor_times(), now_s - window_s, self._cores)) > FOREIGN_LIMIT
            if not busy or now_s - started_s > self._max_wait_s:
                break
            time.sleep(1.0)
        return time.perf_counter() - started_s

    def watch(self) -> Watch:
        return Watch(self)

    def slowdown(self) -> float:
        taken_s = spin_s(self._threads)
        self._best_spin_s = min(self._best_spin_s, taken_s)
        return taken_s / self._best_spin_s

    @property
    def cores(self) -> int:
        return self._cores


class Watch:
    """`with guard.watch() as watch: ...`, then `watch.disturbance`."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.disturbance = Disturbance(0.0, 0.0, 1.0)

    def __enter__(self) -> Watch:
        self._slowdown = self._guard.slowdown()
        self._before = processor_times()
        self._started_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wall_s = time.perf_counter() - self._started_s
        foreign, stolen = shares(self._before, processor_times(), wall_s, self._guard.cores)
        slowdown = max(self._slowdown, self._guard.slowdown())
        self.disturbance = Disturbance(round(foreign, 4), round(stolen, 4), round(slowdown, 3))
