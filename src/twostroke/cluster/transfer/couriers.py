"""Carries beats and releases to peers, a thread for each peer while there is something to carry: one that is stopped
or gone delays nobody else's. What cannot be told in two tries is dropped, since a lease ends by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.cluster.transfer.channel import Message, TransferError
from twostroke.cluster.transfer.interface import Contact
from twostroke.cluster.transfer.lines import Lines

MOST_PEERS = 256
MOST_WAITING = 4096
"""Leases that one peer is still to be told of."""
TRIES = 2
ANSWER_S = 5.0


@dataclass(slots=True)
class _Bag:
    """What one peer is to be told; each lease once."""

    alive: dict[str, None] = field(default_factory=dict)
    done: dict[str, None] = field(default_factory=dict)

    def add(self, alive: Sequence[str], done: Sequence[str]) -> None:
        room = MOST_WAITING - len(self.alive) - len(self.done)
        self.alive.update(dict.fromkeys(alive[: max(0, room)]))
        for lease_id in done:
            self.alive.pop(lease_id, None)
            if len(self.done) < MOST_WAITING:
                self.done[lease_id] = None

    def __bool__(self) -> bool:
        return bool(self.alive or self.done)


class Couriers:
    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._bags: dict[Contact, _Bag] = {}
        """Of the peers that a thread is on its way for."""
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def post(self, peer: Contact, *, alive: Sequence[str] = (), done: Sequence[str] = ()) -> None:
        with self._lock:
            bag = self._bags.get(peer)
            if bag is None:
                if self._is_closed or len(self._bags) >= MOST_PEERS:
                    return
                bag = self._bags[peer] = _Bag()
                thread = threading.Thread(target=self._carry, args=(peer,), name="kv-notes", daemon=True)
                self._threads.add(thread)
                thread.start()
            bag.add(alive, done)

    def _carry(self, peer: Contact) -> None:
        while True:
            with self._lock:
                bag = self._bags[peer]
                if not bag:
                    del self._bags[peer]
                    self._threads.discard(threading.current_thread())
                    return
                self._bags[peer] = _Bag()
            message: Message = {"ask": "note", "alive": list(bag.alive), "done": list(bag.done)}
            for _ in range(TRIES):
                if self._is_told(peer, message):
                    break

    def _is_told(self, peer: Contact, message: Message) -> bool:
        if self._is_closed:
            return True
        deadline_s = time.monotonic() + ANSWER_S
        try:
            channel = self._lines.take(peer, deadline_s)
        except TransferError:
            return False
        try:
            channel.send(message, deadline_s)
            channel.receive(deadline_s)
        except TransferError:
            channel.close()
            return False
        self._lines.give_back(peer, channel)
        return True

    def close(self, timeout_s: float) -> None:
        """Lets those end that are on their way."""
        with self._lock:
            threads = list(self._threads)
        until_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        self._is_closed = True
