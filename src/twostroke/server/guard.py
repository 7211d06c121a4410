"""What every request passes before any route sees it: its head, its API key, the size of its body, the time it takes to
arrive. Plain ASGI, so that routes still notice when a client goes away."""

from __future__ import annotations

import asyncio
import hmac
import time
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.cluster.role import STAND_IN
from twostroke.server.admission import KEY_SCOPE, RECEIVED_SCOPE
from twostroke.server.errors import REQUEST_ID_SCOPE, ApiError, error_response
from twostroke.server.heads import REQUEST_ID_HEADER, HeadCheck, as_routed, request_id
from twostroke.server.metrics import Metrics
from twostroke.server.pulse import Pulse
from twostroke.server.settings import ServerSettings

OPEN_PATHS = frozenset({"/health", "/ready", f"{STAND_IN}/health"})
"""Everything else asks for a key where there are keys: a route that is forgotten is closed, not open."""
_LOOKED_AT = ("/v1/models", "/v1/loads", "/version", "/metrics")
LOOK_PATHS = frozenset({*_LOOKED_AT, *(f"{STAND_IN}{path}" for path in _LOOKED_AT)})
"""What a router may look at with the key that it was given."""
PAGE_PATHS = "/page/"
DISCARD_BYTES = 256 * 2**20
DISCARD_S = 10.0
"""Most clients read an answer only once their body is sent. Where the connection stays open, it is read and thrown away
after the answer (`connections.py`); where the answer ends it, before, up to here."""
KNOWN_ROUTES = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize"),
        *("/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/api/tags", "/api/show"),
        *("/api/ps", "/api/version", "/api/embed", "/api/embeddings"),
        *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank"),
        *("/health", "/ready", "/metrics", "/autoscale", "/version", "/v1/twostroke/top", "/tokenizer_info"),
        *("/v1/loads",),
        *("/", "/watch", "/watch/control", "/watch/plan", "/watch/plan/options"),
    }
)


class _Held:
    """What one request's body takes."""

    num_bytes = 0


class Guard:
    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics) -> None:
        self._app = app
        self._limits = settings.limits
        self._metrics = metrics
        self._held_bytes = 0
        """Of the bodies of all requests in flight."""
        self._pulse = Pulse(metrics, lambda: metrics.http_in_flight > metrics.viewers)
        self._head = HeadCheck(settings)
        self._has_page = settings.page_mode != "off"
        # Digests have one length, so that comparing them tells nothing of a key's.
        self._key_digests = [sha256(key.encode()).digest() for key in settings.api_keys]
        self._look_digest = None if settings.look_key is None else sha256(settings.look_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a web socket: nothing here speaks it, and an unanswered handshake is refused
        as_sent, scope = scope, as_routed(scope)
        scope[RECEIVED_SCOPE] = time.perf_counter()  # one clock for all processes of a machine
        scope[REQUEST_ID_SCOPE] = request_id(scope["headers"])
        self._metrics.http_in_flight += 1
        self._pulse.start()
        held = _Held()
        try:
            await self._answer(scope, receive, self._noting(scope, send), held)
        finally:
            if KEY_SCOPE in scope:  # for the log, which knows the request as it was sent
                as_sent[KEY_SCOPE] = scope[KEY_SCOPE]
            self._held_bytes -= held.num_bytes
            self._metrics.http_in_flight -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send, held: _Held) -> None:
        try:
            self._head.check(scope)
            headers = Headers(scope=scope)
            if self._key_digests and not self._is_open(scope["path"]):
                scope[KEY_SCOPE] = self._key_number(headers, scope["path"])
            stays = _stays_open(scope, headers)
            await self._check_declared_length(headers, receive, stays)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, self._limited(receive, held, stays), send)

    def _is_open(self, path: str) -> bool:
        """The page's own files are everybody's: what it shows is fetched with a key."""
        return path in OPEN_PATHS or (self._has_page and (path == "/" or path.startswith(PAGE_PATHS)))

    def _key_number(self, headers: Headers, path: str) -> int:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        given = sha256(key.strip().encode()).digest()
        if self._look_digest is not None and path in LOOK_PATHS and hmac.compare_digest(self._look_digest, given):
            return -1
        found = -1
        for number, digest in enumerate(self._key_digests):  # all of them, whichever fits
            if hmac.compare_digest(digest, given):
                found = number
        if found < 0:
            self._metrics.rejected.labels("api_key").inc()
            message = "an API key is needed: send it as `Authorization: Bearer KEY`"
            if key:
                message = "this API key is not known here"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found

    async def _check_declared_length(self, headers: Headers, receive: Receive, stays_open: bool) -> None:
        """One that is known to be too large is not asked for: `receive` would tell a client that waits to go on."""
        declared = headers.get("content-length", "")
        if not declared.isdigit() or len(declared) >= 20 or int(declared) <= self._limits.max_body_bytes:
            return
        if headers.get("expect", "").lower() == "100-continue" or int(declared) > DISCARD_BYTES:
            raise self._too_large(int(declared), stays_open=False)
        if not stays_open:
            await _discard(receive)
        raise self._too_large(int(declared), stays_open)

    def _too_large(self, num_bytes: int, stays_open: bool) -> ApiError:
        self._metrics.rejected.labels("body_size").inc()
        limit = self._limits.max_body_bytes
        message = f"the body has {num_bytes} bytes or more, and this server takes {limit}"
        return ApiError(413, message, code="body_too_large", headers=None if stays_open else {"Connection": "close"})

    def _too_many(self) -> ApiError:
        self._metrics.rejected.labels("bodies_size").inc()
        message = f"requests of {self._limits.max_bodies_bytes} bytes are being answered, and no more are taken now"
        return ApiError(503, message, code="bodies_full", headers={"Connection": "close", "Retry-After": "1"})

    def _limited(self, receive: Receive, held: _Held, stays_open: bool) -> Receive:
        """Counts what really arrives: a length may be missing, or lie."""
        deadline_s = asyncio.get_running_loop().time() + self._limits.body_timeout_s
        is_whole = False

        async def limited() -> Message:
            nonlocal is_whole
            if is_whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline_s):
                    message = await receive()
            except TimeoutError:
                limit_s = self._limits.body_timeout_s
                message_text = f"the body did not arrive within {limit_s:g} s"
                raise ApiError(408, message_text, code="timeout", headers={"Connection": "close"}) from None
            if message["type"] == "http.request":
                length = len(message.get("body", b""))
                held.num_bytes += length
                self._held_bytes += length
                is_whole = not message.get("more_body", False)
                too_many = self._held_bytes > self._limits.max_bodies_bytes
                if too_many or held.num_bytes > self._limits.max_body_bytes:
                    if not is_whole and not (stays_open and not too_many):
                        await _discard(receive)
                    is_whole = True
                    raise self._too_many() if too_many else self._too_large(held.num_bytes, stays_open)
            return message

        return limited

    def _noting(self, scope: Scope, send: Send) -> Send:
        route = scope["path"] if scope["path"] in KNOWN_ROUTES else "other"
        named = (REQUEST_ID_HEADER, scope[REQUEST_ID_SCOPE].encode())

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.http_responses.labels(route, str(message["status"])).inc()
                message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)

        return noting


def _stays_open(scope: Scope, headers: Headers) -> bool:
    """Whether the connection is kept after the answer."""
    wishes = {wish.strip().lower() for wish in headers.get("connection", "").split(",")}
    return scope.get("http_version") == "1.1" and "close" not in wishes


async def _discard(receive: Receive) -> None:
    num_bytes = 0
    try:
        async with asyncio.timeout(DISCARD_S):
            while num_bytes < DISCARD_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
