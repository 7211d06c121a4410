"""Listens to peers, a thread for each: what they say is kept until the engine's thread takes it. Who cannot be heard is
not called again before somebody asks for it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence

from twostroke.cluster.transfer.audience import SILENT_S
from twostroke.cluster.transfer.channel import Channel, TransferError
from twostroke.cluster.transfer.interface import Contact
from twostroke.cluster.transfer.lines import DIAL_S, Lines

MOST_SPEAKERS = 64
MOST_WORDS = 10_000
"""That wait to be taken; what comes beyond is lost, and so is their haste."""


class Bell:
    """A file descriptor that can be read while there is something to take: for whoever waits for other things, too."""

    def __init__(self) -> None:
        self._inside, self._outside = socket.socketpair()
        self._inside.setblocking(False)
        self._outside.setblocking(False)

    def fileno(self) -> int:
        return self._inside.fileno()

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it rings already
            self._outside.send(b"\0")

    def still(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._inside.recv(4096):
                pass

    def close(self) -> None:
        self._inside.close()
        self._outside.close()


class Ears:
    def __init__(self, lines: Lines) -> None:
        self.bell = Bell()
        self._lines = lines
        self._lock = threading.Lock()
        self._threads: dict[Contact, threading.Thread] = {}
        self._channels: dict[Contact, Channel] = {}
        self._heard: list[tuple[Contact, str]] = []
        self._is_closed = False

    def listen(self, peer: Contact, names: Sequence[str]) -> None:
        """From now on, unless it is listened to already. `names`: what this engine is called there."""
        with self._lock:
            if self._is_closed or peer in self._threads or len(self._threads) >= MOST_SPEAKERS:
                return
            thread = threading.Thread(target=self._listen, args=(peer, tuple(names)), name="kv-ear", daemon=True)
            self._threads[peer] = thread
            thread.start()

    def _listen(self, peer: Contact, names: tuple[str, ...]) -> None:
        try:
            with contextlib.suppress(TransferError):
                self._hear(peer, names)
        finally:
            with self._lock:
                channel = self._channels.pop(peer, None)
                del self._threads[peer]
            if channel is not None:
                channel.close()

    def _hear(self, peer: Contact, names: tuple[str, ...]) -> None:
        """Raises TransferError when it is over."""
        channel = self._lines.take(peer, time.monotonic() + DIAL_S, lambda opened: self._hold(peer, opened))
        channel.send({"ask": "listen", "names": list(names)}, time.monotonic() + DIAL_S)
        while True:
            words = channel.receive(time.monotonic() + SILENT_S).get("words")
            if not isinstance(words, list):
                raise TransferError("it does not let anybody listen")
            with self._lock:
                room = MOST_WORDS - len(self._heard)
                self._heard += [(peer, word) for word in words[:room] if isinstance(word, str)]
                if self._heard and not self._is_closed:
                    self.bell.ring()

    def _hold(self, peer: Contact, channel: Channel) -> None:
        with self._lock:
            self._channels[peer] = channel
            if self._is_closed:
                channel.cut()

    def take(self) -> list[tuple[Contact, str]]:
        """What was heard since the last call."""
        if not self._heard:
            return []
        with self._lock:
            self.bell.still()
            heard, self._heard = self._heard, []
            return heard

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            threads = list(self._threads.values())
            for channel in self._channels.values():
                channel.cut()
        for thread in threads:
            thread.join()
        self.bell.close()
