"""What a transport's threads have to tell, until the engine's thread asks. Beats of one lease are one note."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from twostroke.cluster.transfer.interface import Fetching, Note, NoteKind


class News:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._there = threading.Event()
        self._alive: dict[str, None] = {}
        self._notes: list[Note] = []

    def alive(self, lease_ids: Iterable[str]) -> None:
        with self._lock:
            self._alive.update(dict.fromkeys(lease_ids))
            self._there.set()

    def done(self, lease_ids: Iterable[str]) -> None:
        self._add([Note(NoteKind.DONE, lease_id) for lease_id in lease_ids])

    def settled(self, fetching: Fetching, error: str | None) -> None:
        """Unless it was before."""
        if fetching.settle(error):
            self._add([Note(NoteKind.SETTLED, fetching.lease_id, fetching)])

    def over(self, fetching: Fetching) -> None:
        fetching.end()
        self._add([Note(NoteKind.OVER, fetching.lease_id, fetching)])

    def _add(self, notes: list[Note]) -> None:
        with self._lock:
            self._notes += notes
            self._there.set()

    def poll(self) -> list[Note]:
        if not self._there.is_set():
            return []
        with self._lock:
            self._there.clear()
            notes = [Note(NoteKind.ALIVE, lease_id) for lease_id in self._alive] + self._notes
            self._alive, self._notes = {}, []
            return notes

    def wait(self, timeout_s: float) -> None:
        self._there.wait(timeout_s)
