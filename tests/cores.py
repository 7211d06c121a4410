"""How the processes of a test run share the machine: a worker and whatever it starts keep to the worker's part of the
cores, as if there were no others. Engines that take all cores they see would otherwise wait for one another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from twostroke.machine import available_threads

MAX_WORKERS = 4
"""Each holds torch, transformers and the real model: 3 GB at most."""

_ALL: set[int] | None = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None  # not on macOS


def num_workers() -> int:
    return min(available_threads(), MAX_WORKERS)


def keep_to_share(worker: int, num_workers: int) -> None:
    """Called before anything looks for cores, as BLAS does when it is imported."""
    if _ALL is not None:
        cores = sorted(_ALL)
        os.sched_setaffinity(0, cores[worker % len(cores) :: num_workers])


@contextmanager
def all_cores() -> Iterator[None]:
    """For threads that must run side by side: on one core a missing barrier would never show."""
    if _ALL is None:
        yield
        return
    share = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _ALL)
    try:
        yield
    finally:
        os.sched_setaffinity(0, share)
