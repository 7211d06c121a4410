"""Server-sent events: a call's news, as a writer words them, until the last sample has ended. Errors after the first
byte are events too."""

from __future__ import annotations

import asyncio
import json
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from twostroke.server.calls import Call
from twostroke.server.errors import CLIENT_GONE, ApiError
from twostroke.server.inbox import News
from twostroke.server.messages import Output, Progress

SOCKET_SCOPE = "twostroke.send"
"""Where in a request's scope the outermost `send` is, the HTTP server's own."""
SLOW_READER_S = 5.0
"""Past its deadline, a client that does not read has this long to take what was written."""
DONE = b"data: [DONE]\n\n"


class EventWriter(Protocol):
    """Words events as bytes, ready to send; empty where there is nothing to say."""

    def begin(self) -> bytes: ...

    def progress(self, prompt_index: int, event: Progress) -> bytes: ...

    def output(self, prompt_index: int, event: Output) -> bytes: ...

    def end(self) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...


def sse(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


def sse_error(error: ApiError) -> bytes:
    return sse(json.dumps(error.body()).encode())


async def stream_answer(call: Call, writer: EventWriter) -> EventStream:
    """The response begins with the engine's first sign, so what it refuses is still a plain error."""
    try:
        news = await call.take()
    except BaseException:
        call.close()
        raise
    return EventStream(call, news, writer)


class EventStream(Response):
    """All that is there to be sent goes out in one write. A step of the engine wakes every stream that there is, so
    between its news and the socket lies as little as can be."""

    def __init__(self, call: Call, news: list[News], writer: EventWriter) -> None:
        self.status_code = 200
        self.background = None
        self._call = call
        self._news = news
        self._writer = writer
        self.init_headers({"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # What lies between (error handlers, counts) has seen the start, and minds nothing after it.
            send = scope.get(SOCKET_SCOPE, send)
            async with asyncio.timeout_at(self._call.deadline_s + SLOW_READER_S):
                try:
                    last = await self._send_news(send)
                except ApiError as error:
                    last = b"" if error.status_code == CLIENT_GONE else self._writer.error(error)
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except (TimeoutError, OSError):
            pass  # it reads too slowly, or not at all any more
        finally:
            self._call.close()

    async def _send_news(self, send: Send) -> bytes:
        """All but the last bytes, which it returns."""
        call, writer, news = self._call, self._writer, self._news
        pieces = [writer.begin()]
        while True:
            for prompt_index, event in news:
                if isinstance(event, Output):
                    pieces.append(writer.output(prompt_index, event))
                else:
                    pieces.append(writer.progress(prompt_index, event))
            if call.is_finished:
                return b"".join(pieces) + writer.end()
            if joined := b"".join(pieces):
                await send({"type": "http.response.body", "body": joined, "more_body": True})
            pieces = []
            news = await call.take()
