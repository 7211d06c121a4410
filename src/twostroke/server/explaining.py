"""Each answer is explained as it ends. `/v1/twostroke/requests/{id}` has the explanation of a finished request,
`/v1/twostroke/top` where the engine stands and what became of the latest requests."""

from __future__ import annotations

import time
from itertools import islice

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.explain.explanation import Explanation
from twostroke.explain.timeline import Delivery
from twostroke.server.admission import KEY_SCOPE, RECEIVED_SCOPE
from twostroke.server.calls import Answers
from twostroke.server.errors import REQUEST_ID_SCOPE, ApiError
from twostroke.server.kept import ExplainedChoice, ExplainedRequest
from twostroke.server.messages import Stats
from twostroke.server.openapi import ERRORS
from twostroke.server.phases import Timing, explain
from twostroke.server.service import Service, service_of

router = APIRouter(responses=ERRORS)

SHOWN_REQUESTS = 20


class Snapshot(msgspec.Struct, frozen=True):
    """Where the engine stands, and the requests of the key that asks, the latest first."""

    model: str
    state: str
    backend: str | None
    max_running: int | None
    engine: Stats | None
    requests: list[ExplainedRequest]
    goodput: dict[str, float] = {}
    """By class: requests a second that kept their promise, over the last minute."""


@router.get("/v1/twostroke/requests/{request_id:path}")
async def explain_request(request_id: str, request: Request) -> Response:
    """Where a finished request's time went, and why, by the id of its answer or its x-request-id; `last` is the latest
    of this API key."""
    found = service_of(request).kept.find(request.scope.get(KEY_SCOPE, -1), request_id)
    if found is None:
        message = f"no finished request {request_id!r:.200} is remembered here: the latest few hundred of each key are"
        raise ApiError(404, message, code="request_not_found")
    return Response(msgspec.json.encode(found), media_type="application/json")


@router.get("/v1/twostroke/top")
async def top(request: Request) -> Response:
    service = service_of(request)
    facts = service.client.facts
    snapshot = Snapshot(
        model=service.settings.model_name,
        state=service.client.health,
        backend=None if facts is None else facts.backend,
        max_running=None if facts is None else facts.engine.max_running,
        engine=service.metrics.engine,
        requests=list(islice(service.kept.latest(request.scope.get(KEY_SCOPE, -1)), SHOWN_REQUESTS)),
        goodput=service.metrics.levels.recent.goodput(),
    )
    return Response(msgspec.json.encode(snapshot), media_type="application/json")


def follow(request: Request, answers: Answers, name: str) -> None:
    """Explain these answers as they end, and keep the explanations under their name once all have ended."""
    scope = request.scope
    answers.watch = Watch(
        service_of(request), name, scope.get(KEY_SCOPE, -1), scope.get(RECEIVED_SCOPE), scope.get(REQUEST_ID_SCOPE)
    )


class Watch:
    """Watches the answers of one call."""

    def __init__(
        self, service: Service, name: str, key: int, received_s: float | None, request_id: str | None = None
    ) -> None:
        self._service = service
        self._name = name
        self._key = key
        self._received_s = received_s
        self._request_id = request_id
        self._explanations: dict[int, Explanation] = {}

    def explanation(self, index: int) -> Explanation | None:
        return self._explanations.get(index)

    def ended(self, answers: Answers, index: int) -> None:
        facts, stats, delivery = self._service.facts(), self._service.metrics.engine, None
        if self._received_s is not None:
            delivery = Delivery(self._received_s, time.perf_counter())
        self._explanations[index] = explain(answers.choices[index].timing, facts, stats, delivery)
        if len(self._explanations) < len(answers.choices):
            return
        choices = [
            _choice(index, answers, answers.timing(index, facts), explanation)
            for index, explanation in sorted(self._explanations.items())
        ]
        model = self._service.settings.model_name
        request = ExplainedRequest(self._name, int(time.time()), model, choices, self._request_id)
        self._service.kept.keep(self._key, request)


def _choice(index: int, answers: Answers, timing: Timing, explanation: Explanation) -> ExplainedChoice:
    verdict = explanation.verdict
    return ExplainedChoice(
        index=index,
        finish_reason=answers.choices[index].finish_reason or "stop",
        timing=timing,
        slow_to=verdict.slow_to,
        start=None if verdict.start is None else verdict.start.sentence,
        stream=None if verdict.stream is None else verdict.stream.sentence,
        predicted_by="step_cost" if explanation.is_fitted else "floors",
        doubt=explanation.doubt,
        timeline=explanation.spans,
    )
