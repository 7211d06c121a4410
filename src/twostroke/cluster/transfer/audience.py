"""Peers that listen to this engine, and what each is still to be told. They called, and have proven that they have the
key, so nobody is called who did not ask for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from twostroke.cluster.transfer.channel import Channel, Message, RefusedError, TransferError
from twostroke.cluster.transfer.interface import MOST_ID_CHARACTERS

SIGN_S = 2.0
"""A peer that listens is told at least nothing, this often."""
SILENT_S = 10.0
"""Without a sign for this long, whoever is listened to is taken for gone."""
STALL_S = 20.0
MOST_SEATS = 64
"""Each is a connection, of those that a listener takes (listener.py): most are for whoever reads."""
MOST_NAMES = 8
MOST_WAITING = 1024
"""Words for one peer. One that takes them more slowly loses some, and takes the rest of those prompts later."""


class _Seat:
    """One peer that listens."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.words: deque[str] = deque(maxlen=MOST_WAITING)


class Audience:
    def __init__(self) -> None:
        self._seats: list[_Seat] = []
        self._is_closed = False
        self._changed = threading.Condition()

    def find(self, name: str) -> str | None:
        """Who listens under this name, by its first one; of no name, whoever is the only one."""
        with self._changed:
            seats = [seat for seat in self._seats if not name or name in seat.names]
            firsts = {seat.names[0] for seat in seats}
        return firsts.pop() if len(firsts) == 1 else None

    def tell(self, name: str, word: str) -> None:
        """Whoever listens under this name, unless nobody does any more."""
        with self._changed:
            for seat in self._seats:
                if name in seat.names:
                    seat.words.append(word)
            self._changed.notify_all()

    def serve(self, channel: Channel, message: Message) -> None:
        """On the caller's thread: until it leaves, or this engine ends; raises TransferError then."""
        names = message.get("names")
        if not isinstance(names, list) or not 0 < len(names) <= MOST_NAMES or not all(map(_is_name, names)):
            raise RefusedError(f"whoever listens has 1 to {MOST_NAMES} names")
        seat = _Seat(names)
        with self._changed:
            if len(self._seats) >= MOST_SEATS:
                raise RefusedError(f"{MOST_SEATS} listen, and no more may")
            self._seats.append(seat)
        try:
            while True:
                channel.send({"words": self._wait(seat)}, time.monotonic() + STALL_S)
                if not channel.is_quiet:
                    raise TransferError("it does not listen any more")
        finally:
            with self._changed:
                self._seats.remove(seat)

    def _wait(self, seat: _Seat) -> list[str]:
        """The next words, or none after a while."""
        with self._changed:
            self._changed.wait_for(lambda: seat.words or self._is_closed, SIGN_S)
            if self._is_closed:
                raise TransferError("this engine's transfers were closed")
            words = list(seat.words)
            seat.words.clear()
            return words

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def _is_name(given: object) -> bool:
    return isinstance(given, str) and 0 < len(given) <= MOST_ID_CHARACTERS
