"""Who else was at the machine while something was measured: the share of its cores that other processes took. Reads
what Linux says of all processes together; elsewhere nothing is known."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

WAITING = (3, 4)
"""Of the first numbers of a processor's line: the seconds in which it was idle, or waited for a disk."""
COUNTED = 8
"""User, nice, system, idle, disk, two kinds of interrupts, stolen. Guests' time, which follows, is in the first two."""


@dataclass(frozen=True, slots=True)
class Company:
    """Taken before; `others_share` is asked after."""

    busy_s: float | None
    own_s: float
    started_s: float

    @classmethod
    def now(cls) -> Company:
        return cls(_busy_s(), _own_s(), time.perf_counter())

    def others_share(self) -> float | None:
        """Of all cores' time since then, what went to others; None where the system does not say."""
        busy_s, cores = _busy_s(), os.cpu_count()
        elapsed_s = time.perf_counter() - self.started_s
        if busy_s is None or self.busy_s is None or not cores or elapsed_s <= 0.0:
            return None
        others_s = (busy_s - self.busy_s) - (_own_s() - self.own_s)
        return min(1.0, max(0.0, others_s / (elapsed_s * cores)))


def _own_s() -> float:
    return sum(os.times()[:4])


def _busy_s(stat: Path = Path("/proc/stat")) -> float | None:
    """Of all cores together, since the system started."""
    try:
        name, *numbers = stat.read_text(encoding="ascii").splitlines()[0].split()
        ticks = [int(number) for number in numbers[:COUNTED]]
        if name != "cpu" or len(ticks) <= max(WAITING):
            return None
        return sum(value for index, value in enumerate(ticks) if index not in WAITING) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
