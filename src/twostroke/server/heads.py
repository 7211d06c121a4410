"""What the head of a request says, before any of it is believed: where it is meant for, whose page sent it, how its
body ends, and the id that it is known by. Knows no routes and no bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import Scope

from twostroke.server.errors import ApiError, bad_request
from twostroke.server.loopback import is_loopback, is_loopback_address
from twostroke.server.settings import ServerSettings

REQUEST_ID_HEADER = b"x-request-id"
_SOUND_ID = re.compile(rb"[!-~]{1,128}")
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_ABSOLUTE = re.compile(rb"https?://", re.IGNORECASE)
MAX_HEADER_BYTES = 32 * 1024


class HeadCheck:
    def __init__(self, settings: ServerSettings) -> None:
        self._origins = frozenset(settings.cors_origins)
        self._has_keys = bool(settings.api_keys)
        self._hosts = frozenset(host_name(host) for host in (settings.host, *settings.allowed_hosts))
        # Where no key is asked for, a page of the web could have its own name resolve to this machine, and its browser
        # would let it read every answer.
        self._checks_hosts = "*" not in settings.allowed_hosts and (
            bool(settings.allowed_hosts) or (not self._has_keys and is_loopback(settings.host))
        )

    def check(self, scope: Scope) -> None:
        _check_size(scope)
        headers = Headers(scope=scope)
        _check_framing(scope, headers)
        given = headers.getlist(REQUEST_ID_HEADER.decode())
        if len(given) > 1 or (given and not _SOUND_ID.fullmatch(given[0].encode("latin-1"))):
            raise bad_request("the header x-request-id must be one id of 1 to 128 visible ASCII characters")
        if self._checks_hosts:
            self._check_host(headers)
        if not self._has_keys and scope["method"] not in _SAFE_METHODS:
            self._check_origin(headers)

    def _check_host(self, headers: Headers) -> None:
        given = headers.get("host")
        if given is not None and not self._is_ours(host_name(given)):  # only old programs send none, no browser
            message = f"this server does not answer for the host {given!r:.200}; --allowed-host lets it"
            raise ApiError(421, message, code="host_not_allowed")

    def _check_origin(self, headers: Headers) -> None:
        """Browsers say which page sends. One of another site is told no, whatever kind of body it found a way to send;
        programs that are no web pages (an editor, an extension) have other schemes."""
        origin = headers.get("origin")
        if origin is None or origin in self._origins or "*" in self._origins:
            return
        scheme, _, authority = origin.partition("://")
        if origin != "null" and scheme.lower() not in ("http", "https"):
            return
        name = host_name(authority)
        if not name or (name != host_name(headers.get("host", "")) and not self._is_ours(name)):
            message = f"this server takes nothing from pages of {origin!r:.200}; --cors lets them"
            raise ApiError(403, message, code="origin_not_allowed")

    def _is_ours(self, name: str) -> bool:
        return name in self._hosts or name == "localhost" or name.endswith(".localhost") or is_loopback_address(name)


def as_routed(scope: Scope) -> Scope:
    """As the routes see it: a target that names its host too is the path alone, and HEAD is GET whose body is left out
    (by the HTTP server, which keeps the scope as it was)."""
    raw_path: bytes = scope.get("raw_path") or b""
    if match := _ABSOLUTE.match(raw_path):
        authority, slash, path = raw_path[match.end() :].partition(b"/")
        rest = slash + path or b"/"
        headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
        scope = {**scope, "raw_path": rest, "path": unquote(rest.decode("ascii"))}
        scope["headers"] = [(b"host", authority), *headers]  # what the target says holds
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's, where it is sound; what is not is refused by `HeadCheck`, under an id of our own."""
    for name, value in headers:
        if name == REQUEST_ID_HEADER and _SOUND_ID.fullmatch(value):
            return value.decode()
    return f"req_{uuid4().hex}"


def host_name(authority: str) -> str:
    """The host's name without its port, in the form that names are compared in."""
    with suppress(ValueError):  # a bracket that is never closed
        if name := urlsplit(f"//{authority}").hostname:
            return name.rstrip(".")
    return authority.lower()


def _check_size(scope: Scope) -> None:
    """The parser's own limit is on headers that have not ended; these have."""
    num_bytes = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope.get("query_string", b""))
    if num_bytes > MAX_HEADER_BYTES:
        raise headers_too_large(num_bytes)


def headers_too_large(num_bytes: int) -> ApiError:
    message = f"the headers have {num_bytes} bytes or more, and this server takes {MAX_HEADER_BYTES}"
    return ApiError(431, message, code="headers_too_large", headers={"Connection": "close"})


def _check_framing(scope: Scope, headers: Headers) -> None:
    """Who says two things about a body's length may have told a proxy one and this server the other (RFC 9112, 6.1)."""
    if "transfer-encoding" not in headers:
        return
    reason = None
    if "content-length" in headers:
        reason = "Content-Length and Transfer-Encoding cannot both say how long a body is"
    elif scope.get("http_version") == "1.0":
        reason = "HTTP/1.0 has no Transfer-Encoding"
    if reason is not None:
        raise ApiError(400, reason, code="bad_framing", headers={"Connection": "close"})
