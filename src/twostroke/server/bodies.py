"""What a body is said to be, and what a large one is made of, looked at before it is parsed. Parsing takes its time by
values, not by bytes, and no stream moves meanwhile, on whichever thread it is done (the parser keeps Python's lock): a
long text costs little, a million lists would cost a second."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from twostroke.server.errors import ApiError, bad_request

LARGE_BYTES = 64 * 1024
"""Whatever is in a smaller one is parsed in a few milliseconds."""
MAX_VALUES = 512 * 1024
"""Entries of lists and objects together: a token id takes some 0.1 us."""
MAX_STRINGS = 128 * 1024
MAX_CONTAINERS = 16 * 1024
"""Lists and objects: 1 to 4 us each."""


class CheckedRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            body = await request.body()  # kept by the request: it is read once
            if request.method == "POST":
                check_kind(request.headers.get("content-type"))
            check_body(body)
            return await handle(request)

        return checked


def check_kind(content_type: str | None) -> None:
    """JSON that is called JSON. (What a browser sends to another site unasked is never called so.)"""
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        said = f"not {kind!r:.60}" if kind else "and was not given"
        message = f"the header Content-Type must be application/json, {said}"
        raise ApiError(415, message, code="unsupported_media_type")


def check_body(body: bytes) -> None:
    if len(body) <= LARGE_BYTES:
        return
    if b"\0" in body:  # in UTF-16 every character has one, and in UTF-8 no JSON
        raise bad_request("the body is not valid JSON: it must be UTF-8, and holds a zero byte")
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    _at_most("strings", unescaped.count(b'"') // 2, MAX_STRINGS)
    outside = b"".join(unescaped.split(b'"')[::2])
    _at_most("values", outside.count(b","), MAX_VALUES)
    _at_most("lists and objects", outside.count(b"[") + outside.count(b"{"), MAX_CONTAINERS)


def _at_most(what: str, number: int, limit: int) -> None:
    if number > limit:
        message = f"the body holds {number} {what} or more, and this server takes {limit}"
        raise ApiError(413, message, code="body_too_large")
