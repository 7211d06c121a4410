"""A line on standard error for each request that was answered: who asked for what, how it ended, how long it took.
Of what was asked it holds the path alone: no query, no body, no key."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.server.admission import KEY_SCOPE
from twostroke.server.errors import CLIENT_GONE
from twostroke.server.heads import REQUEST_ID_HEADER
from twostroke.server.log import log

MAX_PATH_CHARS = 160


class AccessLog:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()
        status, request_id = CLIENT_GONE, ""

        async def noting(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                names = {name.lower(): value for name, value in message.get("headers", ())}
                request_id = names.get(REQUEST_ID_HEADER, b"").decode("latin-1")
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            log(_line(scope, status, time.perf_counter() - began_s, request_id))


def _line(scope: Scope, status: int, seconds: float, request_id: str) -> str:
    client = scope.get("client")
    # As it was sent, percent signs and all: what is decoded could hold line breaks, and write lines of its own.
    path = (scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0].decode("ascii", "backslashreplace")
    parts = [client[0] if client else "-", scope["method"], path[:MAX_PATH_CHARS], str(status), f"{seconds:.3f} s"]
    if KEY_SCOPE in scope:
        parts.append(f"key {scope[KEY_SCOPE] + 1}")
    if request_id:
        parts.append(request_id)
    return " ".join(part if part.isprintable() else ascii(part) for part in parts)
