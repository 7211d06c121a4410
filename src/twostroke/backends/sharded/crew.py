"""The other ranks, as rank 0 has them: their processes and the lines to them. Starts them, ends them, and says in one
sentence what became of one that is gone."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from twostroke.backends.sharded import RANK_MODULE
from twostroke.backends.sharded.meeting import Meeting, shared_bytes
from twostroke.backends.sharded.rank_process import Exit
from twostroke.backends.sharded.setup import RankSetup
from twostroke.core.errors import BackendError

END_LIMIT_S = 5.0
LAST_WORDS_S = 2.0
"""That the process of a rank that is gone may take to end."""


class Crew:
    def __init__(
        self, setup: RankSetup, environments: Sequence[Mapping[str, str]] = (), module: str = RANK_MODULE
    ) -> None:
        """`setup`: rank 0's, without descriptors. Starts all other ranks; they load meanwhile (`await_ready`).
        `environments`: by rank, what its process is told beside this one's own. `module`: what it runs."""
        self._size, self._processes = len(setup.widths), list[subprocess.Popen[bytes]]()
        with contextlib.ExitStack() as ends, contextlib.ExitStack() as own_ends:
            by_rank: list[dict[int, int]] = [{} for _ in range(self._size)]
            for one, two in combinations(range(self._size), 2):
                pair = socket.socketpair()
                for rank, peer, end in ((one, two, pair[0]), (two, one, pair[1])):
                    (own_ends if rank == 0 else ends).callback(_close, descriptor := end.detach())
                    by_rank[rank][peer] = descriptor
            memory = None
            if setup.transport == "shared":
                memory = _memory(shared_bytes(setup.widths))
                ends.callback(_close, memory)
            elif setup.place is not None:
                memory = _memory(0)
                own_ends.callback(_close, memory)
            try:
                for rank in range(1, self._size):
                    told = replace(setup, rank=rank, ends=tuple(by_rank[rank].items()), memory=memory)
                    self._processes.append(_start(told, environments[rank] if environments else {}, module))
                self.setup = replace(setup, ends=tuple(by_rank[0].items()), memory=memory)
                self.meeting = self.setup.meeting()
            except OSError as error:
                _end(self._processes, 0.0)
                raise BackendError(f"{self._size} ranks could not be started: {error.strerror or error}") from None
            own_ends.pop_all()  # the meeting has them now
        self._store = memory if setup.place is not None else None
        self._finalizer = weakref.finalize(self, _dismiss, self.meeting, self._processes, self._store)

    def await_here(self) -> None:
        """Of ranks on cards: all are about to meet. Raises as `await_ready` does."""
        self._await("here")

    def await_ready(self) -> None:
        """Raises BackendError with what kept a rank from starting."""
        self._await("ready")

    def _await(self, word: str) -> None:
        for rank, process in enumerate(self._processes, start=1):
            words = _words(process)
            if not words.get(word):
                raise BackendError(f"{self._named(rank)} {_fate(process, words)} as it started")

    def why_lost(self, otherwise: str | None = None) -> str:
        """What became of the rank that is gone; a rank that ended because another did is no reason. `otherwise`: if
        none is."""
        until_s = time.monotonic() + LAST_WORDS_S
        consequences = (None, Exit.TOLD, Exit.PARENT_GONE, Exit.RANK_LOST)
        while True:
            for rank, process in enumerate(self._processes, start=1):
                if process.poll() not in consequences:
                    return f"{self._named(rank)} {_fate(process, _words(process))}"
                if _is_heard(process) and "failed" in (words := _words(process)):
                    return f"{self._named(rank)} {_fate(process, words)}"  # it takes a while to end
            if time.monotonic() > until_s:
                return otherwise or f"a rank of {self._size} is gone"
            time.sleep(0.01)

    def is_one_gone(self) -> bool:
        return any(process.poll() is not None for process in self._processes)

    def end(self, limit_s: float = END_LIMIT_S) -> None:
        """Returns when all have ended; those that have not by then are killed."""
        if self._finalizer.detach() is not None:
            self.meeting.close()
            _end(self._processes, limit_s)
            _close(self._store)

    def _named(self, rank: int) -> str:
        return f"rank {rank} of {self._size} (process {self._processes[rank - 1].pid})"


def _start(setup: RankSetup, told: Mapping[str, str], module: str) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != "TWOSTROKE_API_KEYS"}
    environment |= {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), **told}
    descriptors = [end for _, end in setup.ends] + ([] if setup.memory is None else [setup.memory])
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        pass_fds=descriptors,
        start_new_session=True,  # Ctrl-C is for this process, which ends that one
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # one that has ended already is found when it is waited for
        process.stdin.write(setup.to_json())
        process.stdin.flush()
    # Its standard input stays open: when this process ends, however it ends, so does the rank.
    return process


def _memory(num_bytes: int) -> int:
    """The descriptor of memory without a name: nothing is left behind, however its users end."""
    if hasattr(os, "memfd_create"):
        found = os.memfd_create("twostroke-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            found = os.dup(file.fileno())
    os.ftruncate(found, num_bytes)
    return found


def _words(process: subprocess.Popen[bytes]) -> dict[str, object]:
    """The next line that a rank says; nothing where it has ended without one."""
    assert process.stdout is not None
    line = process.stdout.readline() if not process.stdout.closed else b""
    return dict(json.loads(line)) if line.endswith(b"\n") else {}


def _is_heard(process: subprocess.Popen[bytes]) -> bool:
    """Whether a line can be read without waiting for it, or the end."""
    assert process.stdout is not None
    return not process.stdout.closed and bool(select.select([process.stdout], [], [], 0)[0])


def _fate(process: subprocess.Popen[bytes], words: dict[str, object]) -> str:
    """Of one that has ended, or is about to."""
    if (failed := words.get("failed")) is not None:
        return f"failed ({failed})"
    if (code := process.wait()) < 0:
        with contextlib.suppress(ValueError):
            return f"was killed ({signal.Signals(-code).name})"
    return f"ended with status {code}"


def _close(descriptor: int | None) -> None:
    with contextlib.suppress(OSError):
        if descriptor is not None:
            os.close(descriptor)


def _dismiss(meeting: Meeting, processes: Sequence[subprocess.Popen[bytes]], store: int | None) -> None:
    """Of a crew that nobody ended."""
    meeting.close()
    _end(processes, END_LIMIT_S)
    _close(store)


def _end(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    until_s = time.monotonic() + limit_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until_s - time.monotonic()))
        if process.poll() is None:
            process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait()
