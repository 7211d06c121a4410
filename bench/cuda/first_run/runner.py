"""Runs sections of commands one after another, each command in a process group of its own that is killed at its limit,
and the whole within some minutes. Knows neither a card nor what the commands do."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["passed", "failed", "crashed", "timed out", "not begun", "not timed", "not checked"]
WRONG: tuple[State, ...] = ("failed", "crashed", "timed out", "not begun")
LAST_WORDS_S = 5.0
"""A process that hangs is told to abort first: Python then says in which line it was."""
ENDING_LIMIT_S = 20.0
TAIL_LINES = 40


@dataclass(frozen=True, slots=True)
class Command:
    what: str
    words: tuple[str, ...]
    limit_s: float
    is_needed: bool = False
    """Where it does not pass, nothing behind it is begun."""


@dataclass(frozen=True, slots=True)
class NotDone:
    """A line of the table that has no command."""

    what: str
    state: State
    why: str


Section = Sequence[Command | NotDone]


@dataclass(frozen=True, slots=True)
class Result:
    section: str
    what: str
    state: State
    seconds: float = 0.0
    detail: str = ""
    words: tuple[str, ...] = ()
    log: str | None = None
    tail: tuple[str, ...] = ()


def run(
    sections: Mapping[str, Section], logs: Path, *, minutes: float, environment: Mapping[str, str], folder: Path
) -> Iterator[Result]:
    """A result as soon as there is one. `folder` is where commands run, `logs` where each leaves what it printed."""
    logs.mkdir(parents=True, exist_ok=True)
    ends_s, stopped = time.monotonic() + 60 * minutes, ""
    entries = [(section, entry) for section, entries in sections.items() for entry in entries]
    for number, (section, entry) in enumerate(entries):
        if isinstance(entry, NotDone):
            yield Result(section, entry.what, entry.state, detail=entry.why)
            continue
        left_s = ends_s - time.monotonic()
        if not stopped and left_s <= 0:
            stopped = f"the {minutes:g} minutes are over"
        if stopped:
            yield Result(section, entry.what, "not begun", detail=stopped, words=entry.words)
            continue
        log = logs / f"{number:02d}-{re.sub('[^a-z0-9]+', '-', f'{section} {entry.what}'.lower())}.log"
        result = _play(section, entry, log, min(left_s, entry.limit_s), environment, folder)
        if entry.is_needed and result.state != "passed":
            stopped = f"{section} did not pass"
        yield result


def _play(
    section: str, command: Command, log: Path, limit_s: float, environment: Mapping[str, str], folder: Path
) -> Result:
    began_s = time.monotonic()
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                command.words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=dict(environment),
                start_new_session=True,  # a group of its own, and Ctrl-C is for this process, which ends that group
            )
        except OSError as error:
            return Result(section, command.what, "failed", detail=f"cannot be started: {error}", words=command.words)
    try:
        state, detail = _await(process, limit_s)
    finally:
        ended = _end(process)
    seconds = time.monotonic() - began_s
    lines = [line.rstrip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if state == "passed":
        detail = lines[-1] if lines else "it printed nothing"
    if not ended:
        detail += f"; process {process.pid} does not end and may hold the card"
    tail = tuple(lines[-TAIL_LINES:])
    return Result(section, command.what, state, seconds, detail, command.words, str(log), tail)


def _await(process: subprocess.Popen[bytes], limit_s: float) -> tuple[State, str]:
    try:
        status = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=LAST_WORDS_S)
        return "timed out", f"after {limit_s:.0f} s"
    if status < 0:
        return "crashed", f"by {signal.Signals(-status).name}"
    return ("failed", f"exit status {status}") if status else ("passed", "")


def _end(process: subprocess.Popen[bytes]) -> bool:
    """With all that it started and left behind: that would hold the card's memory beside the next command."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(timeout=ENDING_LIMIT_S)
    except subprocess.TimeoutExpired:  # a driver holds it, and signals wait
        return False
    return True
