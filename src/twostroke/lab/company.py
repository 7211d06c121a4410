"""Who else was at the machine while something was measured: the share of its cores that other processes took. Reads
what Linux says of all processes together; elsewhere nothing is known."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from twostroke.machine import busy_s

BUSY = 0.05
"""Of the cores' time, taken by other processes: from here on a reader is warned."""


@dataclass(frozen=True, slots=True)
class Company:
    """Taken before; `others_share` is asked after."""

    busy_s: float | None
    own_s: float
    started_s: float

    @classmethod
    def now(cls) -> Company:
        return cls(busy_s(), _own_s(), time.perf_counter())

    def others_share(self) -> float | None:
        """Of all cores' time since then, what went to others; None where the system does not say."""
        now_busy_s, cores = busy_s(), os.cpu_count()
        elapsed_s = time.perf_counter() - self.started_s
        if now_busy_s is None or self.busy_s is None or not cores or elapsed_s <= 0.0:
            return None
        others_s = (now_busy_s - self.busy_s) - (_own_s() - self.own_s)
        return min(1.0, max(0.0, others_s / (elapsed_s * cores)))


def _own_s() -> float:
    return sum(os.times()[:4])
