"""What the live page's planner asks: the same plans as `twostroke plan --json` prints, and what may be asked."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.server.bodies import CheckedRoute
from twostroke.server.calls import ClientWatch
from twostroke.server.openapi import ERRORS
from twostroke.server.watching import watched

router = APIRouter(responses=ERRORS, route_class=CheckedRoute)


@router.post("/watch/plan")
async def plan(body: dict[str, Any], request: Request) -> Response:
    """Options of `twostroke plan` by name, with `_` for `-`, and `model`. Nothing is loaded, and no file opened."""
    plans, client = watched(request).plans, ClientWatch(request.receive)
    try:
        return Response(await plans.plan(body, lambda: client.is_gone), media_type="application/json")
    finally:
        client.close()


@router.get("/watch/plan/options")
async def options(request: Request) -> Response:
    """Models, devices and formats to choose from, and what each option is where it is not given."""
    return Response(await watched(request).plans.options(), media_type="application/json")
