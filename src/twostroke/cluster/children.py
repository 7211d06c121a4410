"""A process of a fleet that is kept alive: started, watched, started anew when it dies, and ended. Knows no router and
no model: a name, a command, an environment and a log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MOST_RESTARTS = 5
WITHIN_S = 120.0
"""One that dies more often than that, within this time, is given up."""
FIRST_BACK_OFF_S = 0.5
LONGEST_BACK_OFF_S = 10.0
LAST_WORDS_BYTES = 4096


@dataclass
class Child:
    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    """Beside this process's own."""
    log_path: Path
    process: subprocess.Popen[bytes] | None = None
    died_s: list[float] = field(default_factory=list)
    """When it died of late, by `time.monotonic`."""
    again_s: float | None = None
    """When it is to be started anew; None: it runs, or was ended."""

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """From the main thread: the child ends with the thread that started it."""
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path, **self.environment},
                start_new_session=True,  # Ctrl-C is for this process, which tells its children
            )
        self.again_s = None

    def has_died(self) -> int | None:
        """Its exit code, once; None: it runs, or its death was noted before. When to start it anew is set, later each
        time; one that died too often has no such time."""
        if self.process is None or self.again_s is not None or (code := self.process.poll()) is None:
            return None
        now_s = time.monotonic()
        self.died_s = [one for one in self.died_s if one > now_s - WITHIN_S] + [now_s]
        self.process = None
        if len(self.died_s) <= MOST_RESTARTS:
            self.again_s = now_s + min(FIRST_BACK_OFF_S * 2 ** (len(self.died_s) - 1), LONGEST_BACK_OFF_S)
        return code

    def start_if_due(self) -> bool:
        if self.again_s is None or time.monotonic() < self.again_s:
            return False
        self.start()
        return True

    def tell(self, number: signal.Signals) -> None:
        """SIGKILL is for its own children, too."""
        self.again_s = None
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    kill_with_its_own(self.process.pid)
                else:
                    self.process.send_signal(number)

    def wait(self, until_s: float) -> bool:
        """Whether it has ended by then."""
        if self.process is None:
            return True
        try:
            self.process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_words(self) -> str:
        """Its sentence for the user where it has one, else the last line of its log."""
        with suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - LAST_WORDS_BYTES))
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            own = [line.removeprefix("twostroke: ") for line in lines if line.startswith("twostroke: ")]
            if own or lines:
                return (own or lines)[-1]
        return "it said nothing"


def kill_with_its_own(pid: int) -> None:
    """A process, and on Linux all that it started, and what those did. They end by themselves when they are alone, but
    one that stands still does not notice."""
    found = _descendants(pid)
    os.kill(pid, signal.SIGKILL)
    for one in found:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, task.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def how_it_ended(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
