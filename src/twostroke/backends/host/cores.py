"""A thread on some cores for a while."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Set


@contextlib.contextmanager
def on_cores(cores: Set[int] | None) -> Iterator[None]:
    """The calling thread on these, and threads that it starts meanwhile for good; afterwards where it was before. None:
    it is left where it is, as it is where the system does not let it move."""
    before: set[int] | None = None
    if cores is not None:
        with contextlib.suppress(OSError):
            before = os.sched_getaffinity(0)  # 0 is this thread alone
            os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        if before is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, before)
