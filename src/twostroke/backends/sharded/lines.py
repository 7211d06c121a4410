"""A stream between two ranks: a pair of sockets. It says when the other end is gone, however it went; and who waits at
it sleeps, so that ranks that outnumber the cores take none from each other."""

from __future__ import annotations

import socket
import struct
import time

_LENGTH = struct.Struct("<Q")
_SIGNAL = b"\x01"
SPIN_S = 50e-6
"""How long a rank with cores of its own looks again and again before it sleeps: waking takes about as long."""


class RankLostError(Exception):
    """Another rank is gone."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is gone")
        self.rank = rank


class Line:
    def __init__(self, peer: int, end: socket.socket, spin_s: float = 0.0) -> None:
        self.peer, self._end, self._spin_s = peer, end, spin_s

    def send(self, data: bytes | memoryview) -> None:
        try:
            self._end.sendall(data)
        except OSError:
            raise RankLostError(self.peer) from None

    def receive_into(self, memory: memoryview) -> None:
        """Fill it."""
        try:
            while memory.nbytes:
                count = self._end.recv_into(memory)
                if not count:
                    raise RankLostError(self.peer)
                memory = memory[count:]
        except OSError:
            raise RankLostError(self.peer) from None

    def send_message(self, data: bytes) -> None:
        self.send(_LENGTH.pack(len(data)))
        if data:
            self.send(data)

    def receive_message(self) -> bytearray:
        head = bytearray(_LENGTH.size)
        self.receive_into(memoryview(head))
        found = bytearray(_LENGTH.unpack(head)[0])
        self.receive_into(memoryview(found))
        return found

    def signal(self) -> None:
        """Say that this rank has come this far: what it wrote to shared memory before, the other will see."""
        self.send(_SIGNAL)

    def await_signal(self) -> None:
        try:
            if self._spin_s and self._is_there_soon():
                return
            if not self._end.recv(1):
                raise RankLostError(self.peer)
        except OSError:
            raise RankLostError(self.peer) from None

    def _is_there_soon(self) -> bool:
        until_s = time.perf_counter() + self._spin_s
        while time.perf_counter() < until_s:
            try:
                found = self._end.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            if not found:
                raise RankLostError(self.peer)
            return True
        return False

    def close(self) -> None:
        self._end.close()
