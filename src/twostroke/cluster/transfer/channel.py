"""One connection between two engines: messages (four bytes of length, then JSON), and blocks as raw bytes straight from
and into slots. Every call has a deadline. Any thread may cut a channel, which ends the call that another is in.

Calls block in the kernel, without the interpreter's lock: many blocks are moved by one call, and an engine that
computes beside it is not asked for the lock once a packet."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("!I")
_TIME = struct.Struct("@ll")
MOST_MESSAGE_BYTES = 4 << 20
VIEWS_AT_ONCE = 64
"""Blocks of one call to the system, which takes 1,024."""

Message = dict[str, Any]


class TransferError(Exception):
    """What ended a transfer, as a sentence."""


class DeadlineError(TransferError):
    """It took too long."""


class PeerGoneError(TransferError):
    """The peer's process or its transport is no more: nothing of it can come."""


class RefusedError(TransferError):
    """What was asked for is refused with this sentence. The connection is good for the next ask."""


class Channel:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.is_cut = False
        self._ending = threading.Lock()

    # Messages

    def send(self, message: Message, deadline_s: float) -> None:
        text = json.dumps(message, separators=(",", ":")).encode()
        self.send_views([memoryview(_LENGTH.pack(len(text)) + text)], deadline_s)

    def receive(self, deadline_s: float) -> Message:
        """Raises TransferError where it is no message, or longer than one may be."""
        (length,) = _LENGTH.unpack(self.receive_bytes(_LENGTH.size, deadline_s))
        if length > MOST_MESSAGE_BYTES:
            raise TransferError("the peer's message is longer than any of ours")
        try:
            message = json.loads(self.receive_bytes(length, deadline_s))
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise TransferError("the peer sent what is no message")
        return message

    # Bytes

    def receive_bytes(self, count: int, deadline_s: float) -> bytes:
        data = bytearray(count)
        self.receive_into([memoryview(data)], deadline_s)
        return bytes(data)

    def receive_into(self, views: Sequence[memoryview], deadline_s: float) -> None:
        """Fill all of them, in order."""
        left = [view for view in reversed(views) if view.nbytes]
        while left:
            batch = left[: -VIEWS_AT_ONCE - 1 : -1]
            self._limit(socket.SO_RCVTIMEO, deadline_s)
            try:
                count = self._socket.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
            except OSError as problem:
                raise self._error(problem) from problem
            if not count:
                raise TransferError("the peer ended the connection")
            _advance(left, count)

    def send_views(self, views: Sequence[memoryview], deadline_s: float) -> None:
        left = [view for view in reversed(views) if view.nbytes]
        while left:
            batch = left[: -VIEWS_AT_ONCE - 1 : -1]
            self._limit(socket.SO_SNDTIMEO, deadline_s)
            try:
                count = self._socket.sendmsg(batch, (), socket.MSG_NOSIGNAL)
            except OSError as problem:
                raise self._error(problem) from problem
            _advance(left, count)

    def _limit(self, option: int, deadline_s: float) -> None:
        """The system keeps it, for all that one call waits."""
        left_us = int((deadline_s - time.monotonic()) * 1e6)
        if left_us <= 0:
            raise DeadlineError("it was not there by its deadline")
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(*divmod(left_us, 1_000_000)))
        except OSError as problem:
            raise self._error(problem) from problem

    def _error(self, problem: OSError) -> TransferError:
        if self.is_cut:
            return TransferError("the connection was cut")
        if isinstance(problem, BlockingIOError):
            return DeadlineError("it was not there by its deadline")
        return TransferError(f"the connection broke ({problem.strerror or problem})")

    # Its end

    @property
    def is_quiet(self) -> bool:
        """Open, and nothing has come that nobody asked for."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return not self.is_cut
        except OSError:
            return False
        return False

    def cut(self) -> None:
        """From any thread."""
        self.is_cut = True
        with self._ending, contextlib.suppress(OSError):  # else the descriptor may be another's by now
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """By the thread that uses it."""
        self.cut()
        with self._ending, contextlib.suppress(OSError):
            self._socket.close()


def _advance(left: list[memoryview], count: int) -> None:
    """Take what was moved off the end of a list in reverse order."""
    while count:
        view = left.pop()
        if count < view.nbytes:
            left.append(view[count:])
            return
        count -= view.nbytes
