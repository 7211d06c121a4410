"""Where a request is let in or turned away: before anything is worked out for it, so that the limits hold for its
template, its tokens and its grammar too. A place is kept from then on, and handed to the engine with the request."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.requests import Request

from twostroke.core.sampling_params import SamplingParams
from twostroke.core.vectors import VECTOR_SAMPLING
from twostroke.server.calls import Call, ClientWatch, client_gone, too_late
from twostroke.server.client import EngineClient, EngineState
from twostroke.server.connections import CALLER_SCOPE
from twostroke.server.errors import CLIENT_GONE, REQUEST_ID_SCOPE, ApiError, engine_unavailable
from twostroke.server.handoffs import NO_HANDOFF, Handoffs, HandoffWish
from twostroke.server.inbox import Inbox
from twostroke.server.metrics import Metrics
from twostroke.server.quotas import MAX_TEXTS, Quotas, Work, work_of
from twostroke.server.settings import ServerSettings
from twostroke.server.tenants import Tenants

if TYPE_CHECKING:
    from twostroke.server.tracing import Tracing

KEY_SCOPE = "twostroke.key"
"""Where in a request's scope the number of its API key is."""
RECEIVED_SCOPE = "twostroke.received_s"
"""Where in a request's scope the time is at which it came in, on the engine's clock."""


MAX_QUEUED_TEXTS = 4 * MAX_TEXTS


class Admission:
    def __init__(
        self,
        settings: ServerSettings,
        client: EngineClient,
        metrics: Metrics,
        tracing: Tracing | None,
        handoffs: Handoffs,
    ) -> None:
        self._settings = settings
        self._client = client
        self._metrics = metrics
        self._tracing = tracing
        self._handoffs = handoffs
        self._tenants = Tenants(
            settings.api_keys, share_prefixes=settings.share_prefixes, secret=client.tenant_secret()
        )
        self._quotas = Quotas(settings, metrics)
        self._in_flight_by_key: Counter[int] = Counter()
        self._preparing_by_key: Counter[int] = Counter()
        self._inboxes_by_key: defaultdict[int, set[Inbox]] = defaultdict(set)
        self.num_preparing = 0
        """Prompts that were let in and are not yet the engine's."""
        self.draining = False

    @property
    def num_waiting(self) -> int:
        """The queue, as callers see it."""
        return self.num_preparing + self._client.num_waiting

    @property
    def max_queue(self) -> int:
        """Requests that may wait. Texts for vectors come in hundreds, and go by as many."""
        max_queue, facts = self._settings.limits.max_queue, self._client.facts
        return max_queue if facts is None or facts.vectors is None else max(max_queue, MAX_QUEUED_TEXTS)

    @asynccontextmanager
    async def place(self, request: Request, num_prompts: int = 1) -> AsyncIterator[Place]:
        """A request is made ready inside of it. It ends at the request's deadline, and when its client goes away."""
        key, limits = request.scope.get(KEY_SCOPE, -1), self._settings.limits
        # Before it may be turned away: a queue that is full as the engine is paused would stay so for everybody.
        self._client.asked(request.scope.get(REQUEST_ID_SCOPE, ""))
        self._admit(key, num_prompts)
        watch = ClientWatch(request.receive)
        place = Place(self, request, watch, key, _deadline_s(request, limits.request_timeout_s))
        self._in_flight_by_key[key] += 1
        self.num_preparing += num_prompts
        self._preparing_by_key[key] += num_prompts
        try:
            async with asyncio.timeout_at(place.deadline_s) as timer:
                watch.on_gone = lambda: None if timer.expired() else timer.reschedule(0.0)
                yield place
        except TimeoutError:
            if not timer.expired():
                raise
            if watch.is_gone:
                self._metrics.disconnects.inc()
                raise client_gone() from None
            raise too_late(limits.request_timeout_s) from None
        finally:
            self.num_preparing -= num_prompts  # the engine's client counts it by now, if it came so far
            self._preparing_by_key[key] -= num_prompts
            if not place.is_used:
                watch.close()
                self._in_flight_by_key[key] -= 1

    def open_call(
        self,
        place: Place,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        priority: int,
        cache_salt: str,
        service_level: str,
        wish: HandoffWish = NO_HANDOFF,
        second_texts: Sequence[int | None] | None = None,
    ) -> Call:
        request, key = place.request, place.key
        if place.watch.is_gone:
            self._metrics.disconnects.inc()
            raise client_gone()
        wish = self._handoffs.asked_by(
            wish, request.scope.get(CALLER_SCOPE, ""), request.scope.get(REQUEST_ID_SCOPE, "")
        )
        work = self._take_quota(key, prompts, sampling)
        try:
            inbox = self._client.submit(
                prompts,
                sampling,
                request.scope.get(REQUEST_ID_SCOPE, ""),
                second_texts or (),
                wants_vector=second_texts is not None,
                priority=priority,
                cache_salt=self._tenants.salt(key, cache_salt),
                tenant=self._tenants.name(key),
                service_level=service_level,
                **wish._asdict(),
            )
        except ApiError:
            self._quotas.give_back(key, work)
            raise
        self._handoffs.taken(wish)
        if self._tracing is not None:
            self._tracing.submitted(request.scope, inbox.unfinished, self._settings.model_name, sampling)

        def on_close(error: ApiError | None) -> None:
            self._in_flight_by_key[key] -= 1
            self._inboxes_by_key[key].discard(inbox)
            self._quotas.give_back(key, work)
            if error is not None:
                self._handoffs.failed(wish)
            if error is not None and error.status_code == CLIENT_GONE:
                self._metrics.disconnects.inc()
            if self._tracing is not None:
                self._tracing.closed(request.scope, error)

        place.is_used = True
        self._inboxes_by_key[key].add(inbox)
        return Call(inbox, place.watch, place.deadline_s, self._settings.limits, on_close)

    def _take_quota(self, key: int, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams) -> Work:
        if (facts := self._client.facts) is None:
            raise self._client.unavailable()
        work = work_of(prompts, sampling, facts)
        self._quotas.take(key, work, facts)
        return work

    def _admit(self, key: int, num_prompts: int) -> None:
        limits, waiting = self._settings.limits, self.num_waiting
        if self.draining:
            raise engine_unavailable("the server is stopping")
        if (facts := self._client.facts) is None or self._client.state is not EngineState.READY:
            raise self._client.unavailable()
        in_flight = self._in_flight_by_key[key]
        if key >= 0 and limits.max_per_key is not None and in_flight >= limits.max_per_key:
            self._metrics.rejected.labels("per_key").inc()
            message = f"this API key has {in_flight} requests in flight, and {limits.max_per_key} are allowed"
            wait_s = self._quotas.seconds_for(math.ceil(self._quotas.samples_of(key) / in_flight), facts)
            raise ApiError(429, message, code="concurrency_limit", headers={"Retry-After": str(wait_s)})
        max_queue = self.max_queue
        if waiting and waiting + num_prompts > max_queue and not self._has_share(key, num_prompts):
            self._metrics.rejected.labels("queue_full").inc()
            message = f"the queue is full: {waiting} requests wait, and {max_queue} may"
            wait_s = self._quotas.seconds_for(waiting + num_prompts - max_queue, facts)
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": str(wait_s)})

    def _has_share(self, key: int, num_prompts: int) -> bool:
        """Whether a full queue is full of others' requests: no key takes all of it."""
        if key < 0:
            return False
        waiting = Counter(self._preparing_by_key)
        for owner, inboxes in self._inboxes_by_key.items():
            waiting[owner] += sum(inbox.num_waiting for inbox in inboxes)
        waiting[key] += num_prompts
        return waiting[key] <= self.max_queue // sum(number > 0 for number in waiting.values())


class Place:
    """The place of one request, among those of its key and in the queue."""

    def __init__(self, admission: Admission, request: Request, watch: ClientWatch, key: int, deadline_s: float) -> None:
        self._admission = admission
        self.request = request
        self.watch = watch
        self.key = key
        self.deadline_s = deadline_s
        """On the event loop's clock."""
        self.is_used = False

    def open_call(
        self,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        service_level: str,
        *,
        priority: int | None = None,
        cache_salt: str | None = None,
        wish: HandoffWish = NO_HANDOFF,
    ) -> Call:
        """The request, ready, to the engine. Whoever opens a call closes it, or hands it to an EventStream."""
        salt = cache_salt or ""
        return self._admission.open_call(self, prompts, sampling, priority or 0, salt, service_level, wish)

    def open_vectors(
        self,
        prompts: Sequence[tuple[int, ...]],
        second_texts: Sequence[int | None],
        service_level: str,
        *,
        priority: int | None = None,
    ) -> Call:
        """The same, for vectors of prompts. `second_texts`: where a second text begins in each; None: nowhere."""
        return self._admission.open_call(
            self, prompts, VECTOR_SAMPLING, priority or 0, "", service_level, second_texts=second_texts
        )


def _deadline_s(request: Request, timeout_s: float) -> float:
    now_s = time.perf_counter()
    received_s: float = request.scope.get(RECEIVED_SCOPE, now_s)
    return asyncio.get_running_loop().time() + timeout_s - (now_s - received_s)
