"""Connections to peers, by contact: opened when one is needed, kept for a while, never used by two threads at once."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from twostroke.cluster.transfer.channel import Channel, DeadlineError, TransferError
from twostroke.cluster.transfer.greeting import greet_listener
from twostroke.cluster.transfer.interface import Contact

KEPT_A_PEER = 4
KEPT_S = 30.0
"""Less than a listener waits for the next message (listener.py)."""
DIAL_S = 5.0
"""The most that a connection and its greeting may take."""


class Lines:
    def __init__(self, key: bytes) -> None:
        self._key = key
        self._kept: dict[Contact, list[tuple[float, Channel]]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def take(self, peer: Contact, deadline_s: float, hold: Callable[[Channel], None] | None = None) -> Channel:
        """One that is kept and still open, or a new one. Raises TransferError. `hold` gets it as soon as it is there,
        so that it can be cut while a peer does not answer the greeting."""
        while True:
            with self._lock:
                kept = self._kept.get(peer)
                if not kept:
                    break
                since_s, channel = kept.pop()
            if channel.is_quiet and time.monotonic() - since_s < KEPT_S:
                if hold is not None:
                    hold(channel)
                return channel
            channel.close()
        return self._dial(peer, deadline_s, hold)

    def _dial(self, peer: Contact, deadline_s: float, hold: Callable[[Channel], None] | None) -> Channel:
        now_s = time.monotonic()
        limit_s = min(deadline_s, now_s + DIAL_S)
        if limit_s <= now_s:
            raise DeadlineError("it was not there by its deadline")
        try:
            channel = Channel(socket.create_connection((peer.host, peer.port), limit_s - now_s))
        except TimeoutError as problem:
            raise DeadlineError("no connection was made in time") from problem
        except (OSError, UnicodeError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else problem
            raise TransferError(f"no connection was made ({reason or problem})") from problem
        if hold is not None:
            hold(channel)
        try:
            greet_listener(channel, self._key, peer.engine_id, limit_s)
        except TransferError:
            channel.close()
            raise
        return channel

    def give_back(self, peer: Contact, channel: Channel) -> None:
        """For the next one; only after a conversation that came to its end."""
        now_s = time.monotonic()
        with self._lock:
            stale = self._without_stale(now_s)
            kept = self._kept.setdefault(peer, [])
            if self._is_closed or len(kept) >= KEPT_A_PEER or channel.is_cut:
                stale.append(channel)
            else:
                kept.append((now_s, channel))
        for channel in stale:
            channel.close()

    def _without_stale(self, now_s: float) -> list[Channel]:
        stale = []
        for peer, kept in list(self._kept.items()):
            stale += [channel for since_s, channel in kept if now_s - since_s >= KEPT_S]
            kept[:] = [entry for entry in kept if now_s - entry[0] < KEPT_S]
            if not kept:
                del self._kept[peer]
        return stale

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            channels = [channel for kept in self._kept.values() for _, channel in kept]
            self._kept.clear()
        for channel in channels:
            channel.close()
