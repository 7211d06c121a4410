"""A file as read-only memory, and how its names are quoted in an error. Knows no format."""

from __future__ import annotations

import mmap
import os
import reprlib
import stat
from pathlib import Path

from twostroke.core.errors import ModelError

MAX_QUOTED_CHARACTERS = 80


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file; every way in which that fails is a ModelError that names the path."""
    try:
        # Non-blocking, so that a named pipe is found out by fstat instead of waited for.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise ModelError(f"cannot open {path}: {reason(error)}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path} is not a regular file")
        if status.st_size == 0:
            raise ModelError(f"{path} is empty: it holds 0 bytes")
        return mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot map {path}: {reason(error)}") from error
    finally:
        os.close(descriptor)


def reason(error: Exception) -> str:
    """What went wrong, without the path that OSError repeats."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def quoted(value: object) -> str:
    """A name or value from a file, made safe to print: escaped, and short whatever its length."""
    return _SHORTENED.repr(value[: 2 * MAX_QUOTED_CHARACTERS] if isinstance(value, bytes) else value)


_SHORTENED = reprlib.Repr()
_SHORTENED.maxstring = _SHORTENED.maxother = MAX_QUOTED_CHARACTERS
