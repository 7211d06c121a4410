"""One line at a time to standard error. A log that cannot be written (a full disk) never stops the server."""

from __future__ import annotations

import sys
from contextlib import suppress


def log(line: str) -> None:
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
