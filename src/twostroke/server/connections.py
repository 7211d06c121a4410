"""One client's connection, beneath any request: how many there may be, how long a client may take to say what it wants
or to take what it was told, and a way to write a stream's events without waiting. Uvicorn and h11 do the rest."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from twostroke.server.errors import ApiError
from twostroke.server.metrics import Metrics
from twostroke.server.settings import Limits

SINK_SCOPE = "twostroke.sink"
"""Where in a request's scope its EventSink is, if its answer may be written to one."""

MAX_UNSENT_BYTES = 128 * 1024
"""What the system may keep for a client that does not read, beside the 64 KiB kept here. Left to itself it would keep
megabytes, and that many tokens would be written for nobody."""

LINGER_S = 1.0
MAX_LINGERING = 32


class EventSink:
    """The body of an answer that has begun, in chunks as HTTP/1.1 has them. Its end is not written here: the HTTP
    server has to know of that."""

    __slots__ = ("_connection", "_transport")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._transport = connection.transport

    def write(self, events: bytes) -> None:
        """At least one byte: a chunk of none would be the end. Never waits; what does not fit on the way is kept."""
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(events), events))

    @property
    def is_full(self) -> bool:
        """Whether more is kept than should be: whoever writes waits for `drain` first."""
        return not self._connection.writable.is_set()

    async def drain(self) -> None:
        """Until most of it is on the way, or the client is gone."""
        await self._connection.writable.wait()

    async def cut_off(self) -> None:
        """What is kept is dropped, and the connection with it."""
        self._transport.abort()
        await self._connection.lost.wait()


class Connection(H11Protocol):
    limits = Limits()
    metrics: Metrics | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.writable, self.lost = asyncio.Event(), asyncio.Event()
        self.writable.set()
        self._patience: asyncio.TimerHandle | None = None
        """Runs while a request is expected that has not come in full."""
        self._end: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._has_sink: object = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (lowat := getattr(socket, "TCP_NOTSENT_LOWAT", None)) is not None:
            with suppress(OSError, AttributeError):
                transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, lowat, MAX_UNSENT_BYTES)
        if len(self.connections) > self.limits.max_connections:
            number = self.limits.max_connections
            if self.metrics is not None:
                self.metrics.rejected.labels("connections").inc()
            self._refuse(503, f"{number} connections are open, and no more are allowed", "connections_full")
        else:
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._relax()
        if self._end is not None:
            self._end.cancel()
        self.writable.set()
        self.lost.set()

    def pause_writing(self) -> None:
        self.writable.clear()
        super().pause_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        # The beginning of a request, or the rest of one that was answered before it was there: either may be drawn out
        # for ever. (The body of one that is being answered has its own time, in the guard; between two requests
        # Uvicorn's keep-alive holds.)
        theirs, ours = self.conn.their_state, self.conn.our_state
        if (theirs is h11.IDLE and self.conn.trailing_data[0]) or (theirs is h11.SEND_BODY and ours is h11.DONE):
            self._expect()
        else:
            self._relax()
        if self.cycle is not None and self.cycle is not self._has_sink:
            self._has_sink = self.cycle  # its task has not run yet
            if self.scope["http_version"] == "1.1" and self.scope["method"] != "HEAD":
                self.scope[SINK_SCOPE] = EventSink(self)  # type: ignore[literal-required]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    def _abort_later(self) -> None:
        """Closing waits until the client has taken everything, which it may never do."""
        self._end_by(self.limits.reader_timeout_s)

    def _end_by(self, seconds: float) -> None:
        if not self.lost.is_set():
            self._end = self.loop.call_later(seconds, self.transport.abort)

    def _expect(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(self.limits.headers_timeout_s, self._lose_patience)

    def _relax(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self) -> None:
        limit_s = self.limits.headers_timeout_s
        if self.conn.their_state is h11.IDLE:
            self._refuse(408, f"the request's headers did not arrive within {limit_s:g} s", "timeout")
        else:
            self.transport.abort()  # it has its answer already

    def _refuse(self, status: int, message: str, code: str) -> None:
        """In words, and without a parser. A client that is still talking would not hear them if the connection was
        closed on it, so it may talk to nobody for a moment, unless there are many of them."""
        if self.transport.is_closing():
            return
        self._is_refused = True
        body = json.dumps(ApiError(status, message, code=code).body()).encode()
        reason = "Request Timeout" if status == 408 else "Service Unavailable"
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        more = "" if status == 408 else "Retry-After: 1\r\n"
        self.transport.write(f"{head}{more}Connection: close\r\n\r\n".encode() + body)
        if len(self.connections) > self.limits.max_connections + MAX_LINGERING:
            self.transport.close()
        else:
            self.transport.write_eof()
            self._end_by(LINGER_S)


def connection_class(limits: Limits, metrics: Metrics) -> type[Connection]:
    """Uvicorn makes its connections of a class."""
    return type("LimitedConnection", (Connection,), {"limits": limits, "metrics": metrics})
