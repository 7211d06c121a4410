"""What the live page asks: `/watch` is the stream of steps, `/watch/control` holds an engine that nobody else uses and
lets it go step by step."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from twostroke.server.bodies import CheckedRoute
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.openapi import ERRORS
from twostroke.server.service import Service, service_of
from twostroke.server.viewer import ViewerStream

router = APIRouter(responses=ERRORS, route_class=CheckedRoute)

MAX_STEPS = 64


class ControlBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    viewer: Annotated[str, Field(max_length=64)]
    """As the stream's hello names it."""
    paused: Annotated[bool | None, Field(strict=True)] = None
    step: Annotated[int | None, Field(ge=1, le=MAX_STEPS, strict=True)] = None


def watched(request: Request) -> Service:
    """The service, where it has a page."""
    service = service_of(request)
    if service.settings.page_mode == "off":
        raise ApiError(404, "this server shows no page: it was started with --page off, or for others to reach")
    return service


@router.get("/watch", include_in_schema=False)  # a stream without an end: nothing that a description could try
async def watch(request: Request) -> Response:
    """Server-sent events: a hello, the latest minutes, then every step as it comes back, until the client goes away.
    Names, lengths and times; never a text."""
    service = watched(request)
    viewer = service.hub.join()
    return ViewerStream(viewer, lambda: service.hub.leave(viewer), service.settings.limits.reader_timeout_s)


@router.post("/watch/control")
async def control(body: ControlBody, request: Request) -> Response:
    """Pause the engine, let it take some steps, or let it go on. Only while nobody else's requests run."""
    service = watched(request)
    if service.settings.page_mode != "full":
        raise ApiError(403, "this page shows and does not act: the server was started with --page view")
    if (body.paused is None) == (body.step is None):
        raise bad_request("give either paused or step", "paused")
    holding = service.hub.holding
    if body.step is not None:
        holding.step(body.viewer, body.step)
    elif body.paused:
        holding.hold(body.viewer)
    else:
        holding.resume(body.viewer)
    return Response(msgspec.json.encode({"paused": holding.is_held}), media_type="application/json")
