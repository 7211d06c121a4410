"""One client's connection, beneath any request: how many there may be, how long a client may take to say what it wants
or to take what it was told, and a way to write a stream's events without waiting. Uvicorn and h11 do the rest."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from twostroke.server.errors import ApiError
from twostroke.server.heads import headers_too_large
from twostroke.server.metrics import Metrics
from twostroke.server.settings import Limits
from twostroke.server.turns import Turnstile

SINK_SCOPE = "twostroke.sink"
"""Where in a request's scope its EventSink is, if its answer may be written to one."""
CALLER_SCOPE = "twostroke.caller"
"""Where in a request's scope the address is that its connection came from, whatever its headers say."""

MAX_UNSENT_BYTES = 128 * 1024
"""What the system may keep for a client that does not read, beside the 64 KiB kept here. Left to itself it would keep
megabytes, and that many tokens would be written for nobody."""

LOOPBACK = "127.0.0.1"
LINGER_S = 1.0
MAX_LINGERING = 32

PIECE_BYTES = 4096
"""Of what has to be parsed line by line, a head or a body in chunks, in one turn: some hundred lines at most."""

FIRST_LOOK_S = 0.02
LONGEST_LOOK_S = 1.0
"""How soon, and later how often, it is looked whether a client that says no more still listens."""


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
    turnstile = Turnstile()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.writable, self.lost = asyncio.Event(), asyncio.Event()
        self.writable.set()
        self._patience: asyncio.TimerHandle | None = None
        """Runs while a request is expected that has not come in full."""
        self._end: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._has_sink: object = None
        self._unread = b""
        """What has arrived and waits for its turn."""
        self._has_turn = False
        self._has_said_all = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (lowat := getattr(socket, "TCP_NOTSENT_LOWAT", None)) is not None:
            with suppress(OSError, AttributeError):
                transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, lowat, MAX_UNSENT_BYTES)
        if len(self.connections) > self.limits.max_connections:
            self._is_refused = True
            self.turnstile.enter(self._turn_away)
        else:
            self._expect()

    def _turn_away(self) -> None:
        if self.metrics is not None:
            self.metrics.rejected.labels("connections").inc()
        number = self.limits.max_connections
        self._refuse(503, f"{number} connections are open, and no more are allowed", "connections_full")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._relax()
        self._unread = b""
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
        if self._is_refused:
            return
        is_waiting = bool(self._unread)
        self._unread += data
        if not is_waiting:
            self.turnstile.enter(self._take_turn)
        if self._unread and not self.transport.is_closing():
            self.transport.pause_reading()

    def _take_turn(self) -> None:
        """What a request is made of is parsed piece by piece, so that no client keeps the loop for long; a body whose
        length was told is passed on as it is."""
        if self._is_refused or self.lost.is_set():
            return
        told = self.conn.their_state is h11.SEND_BODY and not self._is_chunked
        size = len(self._unread) if told else PIECE_BYTES
        piece, self._unread = self._unread[:size], self._unread[size:]
        self._unset_keepalive_if_required()
        self.conn.receive_data(piece)
        self._go_on()
        if self._unread:
            self.turnstile.enter(self._take_turn)
        elif not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _go_on(self) -> None:
        if self._is_refused or self.lost.is_set():
            return
        self._has_turn = True
        try:
            self.handle_events()
        finally:
            self._has_turn = False

    @property
    def _is_chunked(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self.headers or ())

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client may say that it has said everything, and still wait for its answer; or it is gone: that looks the
        same, until something is sent to it. So what takes longer to answer begins with a word that whoever listens
        passes over, and that is answered by a reset where nobody does. (To a client of HTTP/1.0 it would be the
        answer, so that one is taken to be gone.)"""
        if self._is_refused or self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            return False
        if self.scope["http_version"] != "1.1":
            return False
        if self._has_said_all:
            return True
        self._has_said_all, self.cycle.keep_alive = True, False
        self._look_after(FIRST_LOOK_S)
        return True

    def _look_after(self, seconds: float) -> None:
        def look() -> None:
            if self.transport.is_closing():
                return
            if seconds == FIRST_LOOK_S and not self.cycle.response_started:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.transport.abort()
            else:
                self._look_after(min(2 * seconds, LONGEST_LOOK_S))

        self.loop.call_later(seconds, look)

    def _unsupported_upgrade_warning(self) -> None:
        """A wish to speak something else is passed over, as HTTP has it, and is no news."""

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP. Uvicorn does not pass on why, but calls this where it has caught it."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE) or self._is_refused:
            self.transport.abort()  # it has its answer, or a part of it
            return
        error = sys.exc_info()[1]
        if getattr(error, "error_status_hint", 400) == 431:
            large = headers_too_large(self.conn._max_incomplete_event_size)
            self._refuse(431, large.message, "headers_too_large")
        else:
            self._refuse(400, f"this is not valid HTTP: {error}"[:200], "bad_http")

    def handle_events(self) -> None:
        if not self._has_turn:  # a request that was sent before the one before it was answered
            self.turnstile.enter(self._go_on)
            return
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
            self.scope[CALLER_SCOPE] = self._caller()  # type: ignore[literal-required]
            if self.scope["http_version"] == "1.1" and self.scope["method"] != "HEAD":
                self.scope[SINK_SCOPE] = EventSink(self)  # type: ignore[literal-required]

    def _caller(self) -> str:
        """A machine that calls its own address calls from the same: nobody else can."""
        if self.client is None:
            return ""
        return LOOPBACK if self.server is not None and self.client[0] == self.server[0] else self.client[0]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    def _abort_later(self) -> None:
        """Abort after a while: closing waits until the client has taken everything, which it may never do."""
        self._end_by(self.limits.reader_timeout_s)

    def _end_by(self, seconds: float) -> None:
        if not self.lost.is_set():
            self._end = self.loop.call_later(seconds, self.transport.abort)

    def _expect(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(self.limits.headers_timeout_s, self._wait_no_longer)

    def _relax(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _wait_no_longer(self) -> None:
        """Time is up for a request that has not come in full. Hundreds may have begun at the same moment."""
        expired = self._patience
        self.turnstile.enter(lambda: self._lose_patience(expired))

    def _lose_patience(self, expired: asyncio.TimerHandle | None) -> None:
        if self._patience is not expired or self.lost.is_set():
            return  # what was missed came while this waited for its turn
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
        self._is_refused, self._unread = True, b""
        self.transport.resume_reading()
        body = json.dumps(ApiError(status, message, code=code).body()).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        more = f"Content-Length: {len(body)}\r\n" + ("Retry-After: 1\r\n" if status == 503 else "")
        self.transport.write(f"{head}{more}Connection: close\r\n\r\n".encode() + body)
        if len(self.connections) > self.limits.max_connections + MAX_LINGERING:
            self.transport.close()
        else:
            self.transport.write_eof()
            self._end_by(LINGER_S)


def connection_class(limits: Limits, metrics: Metrics) -> type[Connection]:
    """Uvicorn makes its connections of a class."""
    return type("LimitedConnection", (Connection,), {"limits": limits, "metrics": metrics, "turnstile": Turnstile()})
