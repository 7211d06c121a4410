"""One line at a time to standard error. A log that cannot be written (a full disk) never stops the server."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress


def log(line: str) -> None:
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log(record.getMessage())


def show_what_rooms_say() -> None:
    """What the rooms beneath have to say once (others take the cores, say), as lines of this log."""
    rooms = logging.getLogger("twostroke")
    if not any(isinstance(handler, _Lines) for handler in rooms.handlers):
        rooms.addHandler(_Lines())
        rooms.setLevel(logging.INFO)
        rooms.propagate = False
