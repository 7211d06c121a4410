"""What a large body is made of, looked at before it is parsed. Parsing takes its time by values, not by bytes, and no
stream moves meanwhile, on whichever thread it is done (the parser keeps Python's lock): a long text costs little, a
million lists would cost a second."""

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
            check_body(await request.body())  # kept by the request: it is read once
            return await handle(request)

        return checked


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
