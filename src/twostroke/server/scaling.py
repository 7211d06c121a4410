"""`/autoscale`: how many replicas like this one the load asks for, by phase, why, and from which signals."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from twostroke.cluster.demand import HORIZON_S, Signals, Wish, wanted
from twostroke.server.openapi import ERRORS
from twostroke.server.service import service_of
from twostroke.server.signals import signals_of

router = APIRouter(responses=ERRORS)


class Advice(msgspec.Struct, frozen=True):
    model: str
    prefill: Wish
    decode: Wish
    both: Wish
    horizon_s: float
    signals: Signals
    """What it was made from."""


@router.get("/autoscale")
async def autoscale(request: Request, horizon_s: Annotated[float, Query(ge=0.0, le=86400.0)] = HORIZON_S) -> Response:
    """Wanted replicas of each phase at this moment; `horizon_s`: how far ahead KV is looked at."""
    service = service_of(request)
    metrics = service.metrics
    if metrics.engine is None:
        raise service.client.unavailable()
    signals = signals_of(metrics, metrics.engine)
    wishes = wanted(signals, horizon_s)
    advice = Advice(service.settings.model_name, wishes.prefill, wishes.decode, wishes.both, horizon_s, signals)
    return Response(msgspec.json.encode(advice), media_type="application/json")
