"""A file of events, a line each, for `twostroke replay`. A thread writes what has come together, so that a slow disk
holds nobody up; what it cannot take is left out, and counted. Only whole lines are handed to the system, and a reader
passes over a torn one, so the file is of use however the server ends."""

from __future__ import annotations

import asyncio
import os
import platform
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import msgspec
from msgspec.structs import replace

from twostroke.core.errors import BadRequestError
from twostroke.server import watch_events as w
from twostroke.server.log import log
from twostroke.server.messages import Ready

WRITE_EVERY_S = 0.25
BYTES_PER_S = 512 * 1024
"""On average; a burst may be as long as `MAX_WAITING_BYTES`."""
MAX_WAITING_BYTES = 4 * 2**20
MAX_FILE_BYTES = 512 * 2**20


class FileRecorder:
    def __init__(self, path: str) -> None:
        """Raises BadRequestError where the file is there already, or cannot be made."""
        self._path = Path(path)
        try:
            self._file: IO[bytes] | None = self._path.open("xb", buffering=0)
        except FileExistsError:
            raise BadRequestError(f"cannot record to {path}: the file is there already") from None
        except OSError as error:
            raise BadRequestError(f"cannot record to {path}: {error.strerror or error}") from None
        self._waiting: list[bytes] = []
        self._num_waiting = self._num_written = self._num_left_out = 0
        self._allowed_bytes, self._looked_s = float(MAX_WAITING_BYTES), time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._lock = threading.Lock()
        """One write at a time, in order."""

    def keep(self, event: bytes) -> None:
        """A JSON text without line breaks. Never waits."""
        if self._file is None:
            return
        now_s = time.monotonic()
        earned = (now_s - self._looked_s) * BYTES_PER_S
        self._allowed_bytes, self._looked_s = min(MAX_WAITING_BYTES, self._allowed_bytes + earned), now_s
        if len(event) > self._allowed_bytes or self._num_waiting + len(event) > MAX_WAITING_BYTES:
            self._num_left_out += 1
            return
        if self._num_left_out:
            self._add(w.encode_json(w.Skipped(self._num_left_out)))
            self._num_left_out = 0
        self._add(event)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(WRITE_EVERY_S, self._write_aside, loop)

    def _add(self, event: bytes) -> None:
        self._waiting.append(event + b"\n")
        self._num_waiting += len(event) + 1
        self._allowed_bytes -= len(event) + 1

    def _write_aside(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        lines, self._waiting, self._num_waiting = b"".join(self._waiting), [], 0
        loop.run_in_executor(None, self._write, lines)

    def _write(self, lines: bytes) -> None:
        with self._lock:
            if self._file is None:
                return
            if self._num_written + len(lines) > MAX_FILE_BYTES:
                self._stop(f"the record {self._path} has {MAX_FILE_BYTES // 2**20} MiB, and is ended here")
                return
            try:
                _write_all(self._file, lines)
            except OSError as error:
                self._stop(f"the record {self._path} cannot be written on: {error.strerror or error}")
            self._num_written += len(lines)

    def _stop(self, why: str) -> None:
        log(why)
        assert self._file is not None
        self._file.close()
        self._file = None

    def close(self) -> None:
        """What waits is written first."""
        if self._timer is not None:
            self._timer.cancel()
        self._write(b"".join(self._waiting))
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def _write_all(file: IO[bytes], lines: bytes) -> None:
    """A write of its own may take a part alone."""
    view = memoryview(lines)
    while view:
        view = view[os.write(file.fileno(), view) :]


def recorded_hello(hello: w.Hello, facts: Ready) -> bytes:
    """A greeting that says when and on what kind of machine; not on whose."""
    machine = f"{facts.backend}, threads: {facts.threads}, {platform.system()} {platform.machine()}"
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return msgspec.json.encode(replace(hello, recorded=w.Recorded(date, machine)))
