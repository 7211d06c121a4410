"""What is remembered of finished requests, for whoever asks for one by its id. Bounded, in memory alone; each API key
sees its own. Knows neither HTTP nor how an explanation is made."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from threading import Lock

import msgspec

from twostroke.explain.timeline import Span
from twostroke.server.phases import Timing

KEPT_REQUESTS = 512
LEAST_PREFIX = 12
"""Characters of an id that may stand for it, if no other of the same key begins so."""
LAST = "last"
"""Stands for the id of whatever request of a key ended last."""


class ExplainedChoice(msgspec.Struct, frozen=True):
    index: int
    finish_reason: str
    timing: Timing
    slow_to: str | None
    """`start`, `stream`, or nothing."""
    start: str | None
    """What is to be said of the time before its first token."""
    stream: str | None
    """What is to be said of the time after its first token."""
    predicted_by: str
    """`step_cost`: costs fitted to the engine's own steps; `floors`: their ratios."""
    doubt: str | None
    """Why not by `step_cost`, where that is known."""
    timeline: tuple[Span, ...]


class ExplainedRequest(msgspec.Struct, frozen=True):
    id: str
    ended: int
    """Seconds of the epoch."""
    model: str
    choices: list[ExplainedChoice]
    request_id: str | None = None
    """As the answer's header x-request-id has it: the client's own, where it gave one."""


class KeptRequests:
    """By key and id. What is too much is forgotten by whichever key has most, its oldest first: no key makes the
    server forget another's."""

    def __init__(self, limit: int = KEPT_REQUESTS) -> None:
        self._limit = limit
        self._lock = Lock()
        """An answer may end on a thread aside."""
        self._by_key: dict[int, OrderedDict[str, ExplainedRequest]] = {}
        """In the order in which keys were last heard of: of two that have as much, the quieter forgets."""
        self._number = 0

    def keep(self, key: int, request: ExplainedRequest) -> None:
        with self._lock:
            own = self._by_key.pop(key, None) or OrderedDict[str, ExplainedRequest]()
            self._by_key[key] = own
            self._number += request.id not in own
            own[request.id] = request
            if self._number > self._limit:
                max(self._by_key.values(), key=len).popitem(last=False)
                self._number -= 1

    def find(self, key: int, request_id: str) -> ExplainedRequest | None:
        if request_id == LAST:
            return next(self.latest(key), None)
        own = list(self.latest(key))
        named = [request for request in own if request_id in (request.id, request.request_id)]
        if not named and len(request_id) >= LEAST_PREFIX:
            alike = [request for request in own if request.id.startswith(request_id)]
            named = alike if len(alike) == 1 else []
        return named[0] if named else None

    def latest(self, key: int) -> Iterator[ExplainedRequest]:
        with self._lock:
            return iter(list(reversed(self._by_key.get(key, OrderedDict()).values())))
