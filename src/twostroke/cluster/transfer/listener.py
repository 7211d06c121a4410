"""Takes calls of peers: one thread a connection, a bound on how many, and on how long a caller may take to prove that
it has the key. Whoever stops reading or writing holds its own connection, and no other."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from twostroke.cluster.transfer.channel import Channel, TransferError
from twostroke.cluster.transfer.greeting import welcome_caller
from twostroke.cluster.transfer.interface import TransferConfig
from twostroke.core.errors import BadRequestError

MOST_CALLERS = 128
MOST_STRANGERS = 32
"""Callers that have not proven themselves yet. One more, and the one that took longest is sent away: a member needs
milliseconds."""
GREETING_S = 5.0
AFTER_FAILURE_S = 0.05


class Listener:
    def __init__(self, config: TransferConfig, serve: Callable[[Channel], None]) -> None:
        """`serve` talks with one caller, on a thread of its own, until it raises TransferError."""
        self._config, self._serve = config, serve
        self._lock = threading.Lock()
        self._callers: dict[Channel, threading.Thread] = {}
        self._strangers: dict[Channel, None] = {}
        """In the order they came."""
        self._is_closed = False
        try:
            family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((config.host, config.port), family=family, backlog=MOST_CALLERS)
        except (OSError, UnicodeError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else problem
            raise BadRequestError(
                f"KV cannot be served at {config.host}:{config.port} ({reason or problem}): "
                "name another host or port for transfers"
            ) from problem
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="kv-calls", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed, or short of descriptors
                time.sleep(AFTER_FAILURE_S)
                continue
            with self._lock:
                if self._is_closed or len(self._callers) >= MOST_CALLERS + MOST_STRANGERS:
                    connection.close()
                    continue
                if len(self._strangers) >= MOST_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    oldest.cut()
                channel = Channel(connection)
                thread = threading.Thread(target=self._talk, args=(channel,), name="kv-call", daemon=True)
                self._callers[channel] = thread
                self._strangers[channel] = None
            thread.start()

    def _talk(self, channel: Channel) -> None:
        try:
            with contextlib.suppress(TransferError):
                try:
                    welcome_caller(channel, self._config.key, self._config.engine_id, time.monotonic() + GREETING_S)
                finally:
                    with self._lock:
                        self._strangers.pop(channel, None)
                self._serve(channel)
        finally:
            channel.close()
            with self._lock:
                self._callers.pop(channel, None)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            callers = dict(self._callers)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._thread.join()
        self._socket.close()
        for channel in callers:
            channel.cut()
        for thread in callers.values():
            thread.join()
