"""A link between two servers that a test holds up in the midst of a transfer: whatever is sent to it goes on to one
port, and of what comes back it lets so many bytes pass until it is let go."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from twostroke.cluster import tickets

SMALL_BYTES = 1 << 16
"""Of buffers on the way, so that little is on it when it is held up."""


class SlowLink:
    def __init__(self, port: int, num_bytes: int) -> None:
        """To this port of this machine; what comes back is held up before `num_bytes` of it have gone on."""
        self._there, self._left = port, num_bytes
        self.is_held, self._goes_on = threading.Event(), threading.Event()
        self._open = ExitStack()
        self._listening = self._open.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.socket()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
                for end in (near, far):
                    self._open.enter_context(end)
                far.connect(("127.0.0.1", self._there))
                threading.Thread(target=self._pass_on, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(far, near, True), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_back: bool) -> None:
        with suppress(OSError):
            while data := source.recv(SMALL_BYTES):
                if is_back:
                    self._left -= len(data)
                    if self._left <= 0:
                        self.is_held.set()
                        self._goes_on.wait()
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def let_go(self) -> None:
        self._goes_on.set()

    def close(self) -> None:
        self.let_go()
        self._open.close()


@contextmanager
def over_slow_link(
    key: bytes, params: dict[str, Any], token_ids: list[int], num_bytes: int
) -> Iterator[tuple[SlowLink, dict[str, Any]]]:
    """The link, and what a reader's answer would be if its KV were to be had there."""
    handoff = tickets.opened(key, params, token_ids, {"127.0.0.1"})
    contact = json.loads(handoff.peer)
    link = SlowLink(contact["port"], num_bytes)
    try:
        there = json.dumps({**contact, "port": link.port}, separators=(",", ":"))
        yield link, tickets.signed(key, replace(handoff, peer=there), token_ids)
    finally:
        link.close()
