"""A second address of a server that writes, for a router whose pool of readers is empty: it is asked to read, and says
at once that nobody has. The router goes on to a server that writes, and that reads the prompt itself. Reads nothing."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from twostroke.cluster.role import STAND_IN
from twostroke.cluster.tickets import FIELD
from twostroke.server import loads, routes
from twostroke.server.errors import ApiError
from twostroke.server.service import service_of

router = APIRouter(prefix=STAND_IN, include_in_schema=False)
router.get("/health")(routes.health)
router.get("/v1/models")(routes.list_models)
router.get("/version")(routes.version)
router.get("/v1/loads")(loads.loads)


@router.post("/{path:path}")
async def unread(path: str, request: Request) -> Response:
    """Whatever the API: a router takes nothing of it but what goes on to the one that writes."""
    params = service_of(request).handoffs.stand_in()
    if params is None:
        raise ApiError(404, f"this server stands in for nobody: there is no /{path:.100} here", code="not_found")
    await request.body()
    return JSONResponse({"object": "stand_in", "choices": [], FIELD: params})
