"""A terminal for tests: a program on a pseudo-terminal of a given size, and what its screen would show."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from types import TracebackType

LIMIT_S = 120.0
_CONTROL = re.compile(r"\x1b\[(\?)?(\d*)([A-Za-z])|([\r\n\b\x07])")


class Terminal:
    """A running program; what it writes is collected in `seen`."""

    def __init__(self, command: list[str], environment: dict[str, str], columns: int = 80) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        without = {name: value for name, value in environment.items() if name != "COLUMNS"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env={**without, "TERM": "xterm"}, start_new_session=True
        )
        os.close(slave)
        self.seen = b""
        self._looked = 0

    def wait_for(self, mark: bytes) -> None:
        """Until it is written, behind the mark that was waited for last."""
        deadline_s = time.monotonic() + LIMIT_S
        while (found := self.seen.find(mark, self._looked)) < 0:
            assert self._read(deadline_s), f"{mark!r} is not in {self.seen[self._looked :]!r}"
        self._looked = found + len(mark)

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def finish(self) -> int:
        """Read to the end; the program's exit code."""
        deadline_s = time.monotonic() + LIMIT_S
        while self._read(deadline_s):
            pass
        return self.process.wait(timeout=LIMIT_S)

    def _read(self, deadline_s: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            return False
        try:
            piece = os.read(self._master, 4096)
        except OSError:  # the program has closed its side
            return False
        self.seen += piece
        return bool(piece)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def shown(text: str) -> list[str]:
    """The lines that a wide terminal shows of a text: with the cursor moved and lines wiped as the text asks."""
    lines: list[list[str]] = [[]]
    column, at = 0, 0
    while at < len(text):
        control = _CONTROL.match(text, at)
        if control is None:
            lines[-1][column : column + 1] = [text[at]]
            column, at = column + 1, at + 1
            continue
        at = control.end()
        private, number, letter, plain = control.groups()
        if plain == "\n":
            lines.append([])
            column = 0
        elif plain == "\r":
            column = 0
        elif plain == "\b" or letter == "D":
            column = max(0, column - int(number or 1))
        elif letter == "K" and not private:
            del lines[-1][column:]
    return ["".join(line) for line in lines]
