"""Responses that another server of the fleet keeps. A response's id says who wrote it, so nothing is remembered here:
that server is asked, with the key that its client sent, if the router knows it still. Keeps nothing."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener
from uuid import uuid4

import msgspec

from twostroke.cluster.router_client import RouterClient, RouterError
from twostroke.cluster.standing_in import stands_in
from twostroke.server.errors import ApiError
from twostroke.server.response_store import StoredItem, StoredResponse, Turn

TIMEOUT_S = 5.0
LISTED_S = 3.0
"""That a router's list of workers is good for: whoever invents ids asks it no more often."""
AT_ONCE = 16
"""Of other servers, at most; further ones wait."""
_TAGGED = re.compile(r"resp_([0-9a-f]{12})_[0-9a-f]{32}")
_PASSED_ON = ("authorization", "x-api-key")

_open = build_opener(ProxyHandler({})).open  # a fleet's own addresses are reached directly, whatever proxy is set


class SentTurns(msgspec.Struct, frozen=True):
    """A kept response on its way to another server."""

    reply: msgspec.Raw
    turns: list[tuple[list[msgspec.Raw], list[msgspec.Raw]]]
    """Of each turn what was asked and what was answered."""

    @staticmethod
    def of(response: StoredResponse) -> SentTurns:
        turns = [
            ([msgspec.Raw(item.text) for item in turn.asked], [msgspec.Raw(item.text) for item in turn.answered])
            for turn in response.turns
        ]
        return SentTurns(msgspec.Raw(response.reply), turns)

    def stored(self, response_id: str) -> StoredResponse:
        turns = (Turn(tuple(map(_item, asked)), tuple(map(_item, answered))) for asked, answered in self.turns)
        return StoredResponse(response_id, bytes(self.reply), tuple(turns))


def _item(text: msgspec.Raw) -> StoredItem:
    return StoredItem(msgspec.json.decode(text, type=dict[str, Any])["id"], bytes(text))


def tag_of(url: str) -> str:
    """Of a server, by where its router reaches it."""
    return blake2b(url.rstrip("/").encode(), digest_size=6).hexdigest()


class Elsewhere:
    def __init__(self, router: RouterClient, url: str, max_bytes: int) -> None:
        """`url`: where the router reaches this server; `max_bytes`: of a response with its conversation, at most."""
        self._router, self._own_tag, self._max_bytes = router, tag_of(url), max_bytes
        self._urls: dict[str, str] = {}
        self._listed_until_s = 0.0
        self._turn = asyncio.Semaphore(AT_ONCE)

    def new_id(self) -> str:
        return f"resp_{self._own_tag}_{uuid4().hex}"

    async def find(self, response_id: str, headers: Mapping[str, str]) -> StoredResponse | None:
        """None: nobody has it. Raises ApiError where somebody should, and cannot be asked."""
        text = await self._ask("GET", response_id, "/turns", headers)
        if text is None:
            return None
        try:
            return msgspec.json.decode(text, type=SentTurns).stored(response_id)
        except (msgspec.MsgspecError, KeyError, ValueError):
            raise _gone(response_id, "what the server that wrote it says of it cannot be read") from None

    async def delete(self, response_id: str, headers: Mapping[str, str]) -> bool:
        """Whether there was one."""
        return await self._ask("DELETE", response_id, "", headers) is not None

    async def _ask(self, method: str, response_id: str, path: str, headers: Mapping[str, str]) -> bytes | None:
        found = _TAGGED.fullmatch(response_id)
        if found is None or found[1] == self._own_tag:
            return None
        passed_on = {name: headers[name] for name in _PASSED_ON if name in headers}
        async with self._turn:
            return await asyncio.to_thread(self._call, method, response_id, found[1], path, passed_on)

    def _call(self, method: str, response_id: str, tag: str, path: str, headers: dict[str, str]) -> bytes | None:
        url = self._url(response_id, tag)
        request = Request(f"{url}/v1/responses/{quote(response_id)}{path}", headers=headers, method=method)
        try:
            with _open(request, timeout=TIMEOUT_S) as response:
                text: bytes = response.read(self._max_bytes + 1)
        except HTTPError as error:
            if error.code == 404:
                return None
            raise _gone(response_id, f"the server that wrote it answers {error.code}") from None
        except (OSError, ValueError):
            raise _gone(response_id, "the server that wrote it does not answer") from None
        if len(text) > self._max_bytes:
            raise ApiError(413, f"response {response_id:.80} has too much before it", code="body_too_large")
        return text

    def _url(self, response_id: str, tag: str) -> str:
        if time.monotonic() >= self._listed_until_s:
            self._look(response_id)
        if tag not in self._urls:
            raise _gone(response_id, "the server that wrote it is not of this fleet any more")
        return self._urls[tag]

    def _look(self, response_id: str) -> None:
        try:
            workers = self._router.workers()
        except RouterError:
            raise _gone(response_id, "the router does not say where the server is that wrote it") from None
        self._urls = {tag_of(one.url): one.url.rstrip("/") for one in workers if not stands_in(one)}
        self._listed_until_s = time.monotonic() + LISTED_S


def _gone(response_id: str, why: str) -> ApiError:
    message = f"there is no response {response_id!r:.200} here: {why}"
    return ApiError(404, message, code="response_not_found")
