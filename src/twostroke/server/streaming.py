"""A call's answer, as a writer words it: whole, or its news as they come, until the last sample has ended. Errors after
a stream's first byte are part of the stream."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from twostroke.core.events import PrefillProgress, TokenEvent
from twostroke.server.aside import Aside
from twostroke.server.calls import Answers, Call
from twostroke.server.connections import SINK_SCOPE, EventSink
from twostroke.server.errors import CLIENT_GONE, ApiError
from twostroke.server.inbox import News
from twostroke.server.phases import server_timing
from twostroke.server.replies import encode, encode_in_parts

SLOW_READER_S = 5.0
"""Past its deadline, a client that does not read has this long to take what was written."""
DONE = b"data: [DONE]\n\n"
EVENTS = "text/event-stream; charset=utf-8"
JSON_LINES = "application/x-ndjson"


class EventWriter(Protocol):
    """Words events as bytes, ready to send; empty where there is nothing to say."""

    def begin(self) -> bytes: ...

    def progress(self, prompt_index: int, event: PrefillProgress) -> bytes: ...

    def output(self, prompt_index: int, event: TokenEvent) -> bytes: ...

    def end(self) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...


class AnswerWriter(EventWriter, Protocol):
    """Words whole answers too."""

    answers: Answers

    def whole(self) -> object: ...


def sse(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


def sse_error(error: ApiError) -> bytes:
    return sse(json.dumps(error.body()).encode())


async def respond(
    call: Call, writer: AnswerWriter, *, is_streamed: bool, media_type: str = EVENTS, aside: Aside | None = None
) -> Response:
    """`media_type` is a stream's; whole answers are JSON. `aside`: for an answer that takes long to word."""
    if is_streamed:
        return await _stream_answer(call, writer, media_type, aside)
    try:
        await writer.answers.collect(call)
    finally:
        call.close()
    headers = {"Server-Timing": server_timing(writer.answers.choices[0].timing)}
    payload = encode(writer.whole()) if aside is None else await aside.run(lambda: encode_in_parts(writer.whole()))
    return Response(payload, headers=headers, media_type="application/json")


async def _stream_answer(
    call: Call, writer: EventWriter, media_type: str = EVENTS, aside: Aside | None = None
) -> EventStream:
    """The response begins with the engine's first sign, so what it refuses is still a plain error."""
    try:
        news = await call.take()
    except BaseException:
        call.close()
        raise
    return EventStream(call, news, writer, media_type, aside)


class EventStream(Response):
    """A step of the engine has news for every stream that there is, so between its news and the socket lies as little
    as can be: they are worded and written where they are heard, all in one write. The task wakes at the end, and where
    the client does not keep up. Without a sink (a client of HTTP/1.0, another server) it wakes for every write."""

    def __init__(
        self, call: Call, news: list[News], writer: EventWriter, media_type: str = EVENTS, aside: Aside | None = None
    ) -> None:
        self.status_code = 200
        self.background = None
        self._call = call
        self._writer = writer
        self._sink: EventSink | None = None
        self._pieces = [piece for piece in (writer.begin(),) if piece]
        self._aside, self._unworded = aside, news
        self.init_headers({"Content-Type": media_type, "Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sink = scope.get(SINK_SCOPE)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with asyncio.timeout_at(self._call.deadline_s + SLOW_READER_S):
                try:
                    await self._send_news(send)
                    end = self._writer.end() if self._aside is None else await self._aside.run(self._writer.end)
                    last = self._taken() + end
                except ApiError as error:
                    last = b"" if error.status_code == CLIENT_GONE else self._taken() + self._writer.error(error)
                async with asyncio.timeout(self._call.reader_timeout_s):
                    await send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:  # it reads too slowly, or not at all
            if self._sink is not None:
                await self._sink.cut_off()
        except OSError:
            pass  # it is not there any more
        finally:
            self._call.close()

    async def _send_news(self, send: Send) -> None:
        """All that was said before the last sample ended; what comes with its end is left."""
        if self._aside is not None:
            await self._send_worded_aside(send, self._aside)
            return
        self._word(self._unworded)
        self._write()
        while not self._call.is_finished:
            if self._pieces:
                async with asyncio.timeout(self._call.reader_timeout_s):
                    await send({"type": "http.response.body", "body": self._taken(), "more_body": True})
            elif self._sink is not None and self._sink.is_full:
                async with asyncio.timeout(self._call.reader_timeout_s):
                    await self._sink.drain()
            await self._call.follow(self._deal)

    async def _send_worded_aside(self, send: Send, aside: Aside) -> None:
        while True:
            await aside.run(partial(self._word, self._unworded))
            if self._call.is_finished:
                return
            if self._pieces:
                async with asyncio.timeout(self._call.reader_timeout_s):
                    await send({"type": "http.response.body", "body": self._taken(), "more_body": True})
            self._unworded = await self._call.take()

    def _deal(self, news: list[News]) -> bool:
        self._word(news)
        return not self._call.is_finished and self._write()

    def _write(self) -> bool:
        """Whether the task is not needed for it."""
        if not self._pieces or self._call.is_finished:
            return True
        if self._sink is None:
            return False
        self._sink.write(self._taken())
        return not self._sink.is_full

    def _word(self, news: list[News]) -> None:
        writer, pieces = self._writer, self._pieces
        for prompt_index, event in news:
            if isinstance(event, TokenEvent):
                piece = writer.output(prompt_index, event)
            elif isinstance(event, PrefillProgress):
                piece = writer.progress(prompt_index, event)
            else:
                continue  # a vector, which nobody streams
            if piece:
                pieces.append(piece)

    def _taken(self) -> bytes:
        pieces = self._pieces
        taken = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return taken
