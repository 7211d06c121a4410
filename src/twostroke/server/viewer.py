"""One page that watches: its names, its place in the history, and its stream. What it is sent goes straight to the
connection while it keeps up. When it does not, it reads from the history at its own speed, and what the history drops
meanwhile is lost to it: nothing is kept for one viewer alone."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from twostroke.server import watch_events as w
from twostroke.server.connections import SINK_SCOPE, EventSink
from twostroke.server.watch_history import History

SIGN_OF_LIFE_S = 1.0
SIGN_OF_LIFE = b": nothing new\n\n"
"""A comment, as the format has them. Whether a client is still there shows when something is sent to it: one that had
paused the engine should not be waited for."""


class Hub(Protocol):
    """Whoever has the events."""

    history: History

    def flush(self) -> None:
        """What waits to be sent goes to those who keep up."""

    def last_words(self) -> bytes:
        """For whoever has read the history: how things stand that it does not keep."""


class Viewer:
    def __init__(self, hub: Hub) -> None:
        self.token = secrets.token_urlsafe(16)
        self.prefix = f"page-{secrets.token_hex(4)}-"
        """What the ids of its own requests begin with. Others see it; the token they do not."""
        self._hub = hub
        self._sink: EventSink | None = None
        self._greeting = b""
        self._place = 0
        """The number of the next event that it has not been sent."""
        self._keeps_up = False
        self._is_closed = False
        self._news = asyncio.Event()

    def greet(self, greeting: bytes, place: int) -> None:
        """It begins, perhaps anew, with this, and with the history from there on."""
        self._greeting, self._place, self._keeps_up = greeting, place, False
        self._news.set()

    def offer(self, events: bytes, end: int) -> None:
        """Never waits. `end`: the number that follows them."""
        if not self._keeps_up or self._sink is None:
            return
        self._sink.write(events)
        self._place = end
        if self._sink.is_full:
            self._keeps_up = False
            self._news.set()

    def close(self) -> None:
        self._is_closed = True
        self._news.set()

    @property
    def greeting(self) -> bytes:
        return self._greeting

    async def feed(self, sink: EventSink, reader_timeout_s: float) -> None:
        """Until it is closed; raises TimeoutError for a client that does not read."""
        self._sink = sink
        while not self._is_closed:
            if sink.is_full:
                async with asyncio.timeout(reader_timeout_s):
                    await sink.drain()
            self._news.clear()
            if next_piece := self._next_piece():
                sink.write(next_piece)
                continue
            if not self._keeps_up and (last_words := self._hub.last_words()):
                sink.write(last_words)
            self._keeps_up = True  # and is offered everything from here on
            try:
                async with asyncio.timeout(SIGN_OF_LIFE_S):
                    await self._news.wait()
            except TimeoutError:
                sink.write(SIGN_OF_LIFE)

    def _next_piece(self) -> bytes:
        self._hub.flush()  # else what waits there would be sent once from the history, and once more with the rest
        greeting, self._greeting = self._greeting, b""
        history, notice = self._hub.history, b""
        if self._place < history.first:
            notice = b"data: " + w.encode_json(w.Skipped(history.first - self._place)) + b"\n\n"
            self._place = history.first
        piece, self._place = history.piece(self._place)
        return greeting + notice + piece


class ViewerStream(Response):
    def __init__(self, viewer: Viewer, on_end: Callable[[], None], reader_timeout_s: float) -> None:
        """`on_end` is called once it is over, however it ends."""
        self.status_code = 200
        self.background = None
        self._viewer = viewer
        self._on_end = on_end
        self._reader_timeout_s = reader_timeout_s
        self.init_headers(
            {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sink: EventSink | None = scope.get(SINK_SCOPE)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            last = b""
            if sink is None:
                last = self._viewer.greeting  # a client that cannot be sent more when there is more
            else:
                await self._feed(sink, receive)
            async with asyncio.timeout(self._reader_timeout_s):
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:
            if sink is not None:
                await sink.cut_off()
        except OSError:
            pass  # it is not there any more
        finally:
            self._on_end()

    async def _feed(self, sink: EventSink, receive: Receive) -> None:
        feeding = asyncio.create_task(self._viewer.feed(sink, self._reader_timeout_s))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({feeding, gone}, return_when=asyncio.FIRST_COMPLETED)
            if feeding.done():
                feeding.result()
        finally:
            feeding.cancel()
            gone.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
