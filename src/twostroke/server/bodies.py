"""A body from its bytes to its values. What it is said to be, and what a large one is made of, is looked at before it
is parsed. Parsing takes its time by values, not by bytes, and no stream moves meanwhile, on whichever thread it is
done, as the parser keeps Python's lock. So there are limits on what a body may hold, and a large one is read in
turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pydantic_core
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from twostroke.server.calls import client_gone
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.service import Service, service_of

LARGE_BYTES = 64 * 1024
"""Whatever is in a smaller one is parsed in a few milliseconds."""
PIECE_BYTES = 2**20
"""Of a large one, looked at in one turn."""
MAX_VALUES = 256 * 1024
"""Entries of lists and objects together: a token id takes some 0.05 us to parse, and as long to check."""
MAX_STRINGS = 64 * 1024
MAX_CONTAINERS = 16 * 1024
"""Lists and objects: 1 to 4 us each."""
MAX_ESCAPES = 2 * 2**20
"""Characters behind a backslash: some 0.01 us each."""
MAX_DIGITS = 1024
"""Of one number: the time goes by their square."""

_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_TOO_LONG = b"0" * (MAX_DIGITS + 1)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"


class CheckedRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            if self.body_field is not None or request.method == "POST":
                check_encoding(request.headers.get("content-encoding"))
                check_kind(request.headers.get("content-type"))
                if body := await _whole(request):
                    request._json = await _read(body, service_of(request))  # where FastAPI looks for it
            return await handle(request)

        return checked


async def _whole(request: Request) -> bytes:
    try:
        return await request.body()  # kept by the request: it is read once
    except ClientDisconnect:
        service_of(request).metrics.disconnects.inc()
        raise client_gone() from None


async def _read(body: bytes, service: Service) -> Any:
    if len(body) <= LARGE_BYTES:
        return parse(body)
    turns, pieces = service.turns, _looked_at(body)
    is_left = True
    while is_left:
        async with turns:
            is_left = next(pieces, False)
    async with turns:
        value = parse_large(body)
    async with turns:
        return value  # whoever checks the fields does so now, in a turn of its own


def check_kind(content_type: str | None) -> None:
    """JSON that is called JSON. (What a browser sends to another site unasked is never called so.)"""
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        said = f"not {kind!r:.60}" if kind else "and was not given"
        message = f"the header Content-Type must be application/json, {said}"
        raise ApiError(415, message, code="unsupported_media_type")


def check_encoding(content_encoding: str | None) -> None:
    """A small body could unpack to any size, and no client packs its requests unasked."""
    if content_encoding is not None and content_encoding.strip().lower() not in ("", "identity"):
        raise _packed(f"as its Content-Encoding says: {content_encoding!r:.60}")


def _packed(how: str) -> ApiError:
    message = f"the body is compressed, {how}; this server takes plain JSON only"
    return ApiError(415, message, code="unsupported_encoding", headers={"Accept-Encoding": "identity"})


def parse(body: bytes) -> Any:
    """The values of a body. Each way of not being JSON is refused with a sentence of its own."""
    try:
        text = _plain(body).decode()
    except UnicodeDecodeError as error:
        where = f"the byte 0x{error.object[error.start]:02x} at position {error.start} cannot stand there"
        raise bad_request(f"the body is not valid UTF-8: {where}") from None
    try:
        return json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise bad_request(
            f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except ValueError:  # of the limit that Python has
        raise _too_many_digits() from None


def parse_large(body: bytes) -> Any:
    """By another parser, several times as fast; it does not read halves of surrogate pairs."""
    try:
        return pydantic_core.from_json(_plain(body), allow_inf_nan=False)
    except ValueError as error:
        reason = str(error)
        if reason.startswith("recursion limit"):
            raise _too_deep() from None
        if "unicode code point" in reason:
            parse(body)  # it knows where
        raise bad_request(f"the body is not valid JSON: {reason}") from None


def _plain(body: bytes) -> bytes:
    if body.startswith(_GZIP):
        raise _packed("as gzip by its first bytes")
    if b"\0" in body:  # in UTF-16 every character has one, and in UTF-8 no JSON
        raise bad_request("the body is not valid JSON: it must be UTF-8, and holds a zero byte")
    return body.removeprefix(_BYTE_ORDER_MARK)


def check_large(body: bytes) -> None:
    for _ in _looked_at(body):
        pass


def _looked_at(body: bytes) -> Iterator[bool]:
    """What is counted must be nothing that a text holds: quotes that are not escaped say where texts begin and end.
    After each piece, whether there is more."""
    strings = values = containers = escapes = 0
    is_in_text = False
    start = 0
    while start < len(body):
        end = start + PIECE_BYTES
        piece = body[start:end]
        start += len(piece)
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and start < len(body):
            piece += body[start : start + 1]  # the character that is escaped
            start += 1
        escapes += piece.count(b"\\")
        _at_most("escaped characters", escapes, MAX_ESCAPES)
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        strings += piece.count(b'"')
        _at_most("strings", strings // 2, MAX_STRINGS)
        parts = piece.split(b'"')
        outside = b"".join(parts[is_in_text::2])
        is_in_text ^= len(parts) % 2 == 0
        values += outside.count(b",")
        _at_most("values", values, MAX_VALUES)
        containers += outside.count(b"[") + outside.count(b"{")
        _at_most("lists and objects", containers, MAX_CONTAINERS)
        if _TOO_LONG in outside.translate(_DIGITS):
            raise _too_many_digits()
        yield start < len(body)


def _at_most(what: str, number: int, limit: int) -> None:
    if number > limit:
        message = f"the body holds {number} {what} or more, and this server takes {limit}"
        raise ApiError(413, message, code="body_too_large")


def _too_deep() -> ApiError:
    return bad_request("the body is nested too deeply: too many lists or objects lie in one another")


def _too_many_digits() -> ApiError:
    return bad_request(f"the body holds a number of more than {MAX_DIGITS} digits")
