"""`/v1/embeddings`: vectors of texts or token ids, in OpenAI's shape; as numbers, or as base64 of 32-bit floats, which
is smaller and what its clients ask for."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.core.vectors import vector_of
from twostroke.server import vectors as v
from twostroke.server.bodies import CheckedRoute
from twostroke.server.errors import bad_request
from twostroke.server.openapi import ERRORS
from twostroke.server.phases import server_timing
from twostroke.server.replies import encode
from twostroke.server.sampling import check_vectors
from twostroke.server.schemas import EmbeddingBody
from twostroke.server.service import service_of

router = APIRouter(responses=ERRORS, route_class=CheckedRoute)


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingBody, request: Request) -> Response:
    service = service_of(request)
    service.check_model(body.model)
    facts = service.facts()
    own = check_vectors(facts)
    v.check_dimensions(own, body.dimensions)
    texts, given = _inputs(body)
    v.check_count(len(texts) + len(given), "input")
    if "" in texts:
        raise bad_request("input holds an empty text", "input")
    limit = v.limit_of(body.truncate_prompt_tokens, facts)
    if given and body.prompt_name is not None:
        raise bad_request("prompt_name goes with texts, not with token ids", "prompt_name")
    texts = v.prompted(own, texts, body.prompt_name)
    async with service.admission.place(request, len(texts) + len(given)) as place:
        ids = [tuple(one[:limit]) for one in given] or await v.text_ids(service, texts, limit, "input")
        call = v.open_call(place, service, request, body, ids, "input")
    found = await v.collect(call, len(ids))
    payload = await service.aside.run(lambda: encode(_reply(found, body, service.settings.model_name)))
    return Response(payload, headers={"Server-Timing": server_timing(found.timings[0])}, media_type="application/json")


def _inputs(body: EmbeddingBody) -> tuple[list[str], list[list[int]]]:
    """Texts, or token ids: one of the two is empty."""
    given = body.input
    if isinstance(given, str):
        return [given], []
    if given and isinstance(given[0], int):
        return [], [given]
    if given and isinstance(given[0], list):
        return [], given
    return cast("list[str]", given), []


def _reply(found: v.Vectors, body: EmbeddingBody, model: str) -> dict[str, Any]:
    data = []
    for index, raw in enumerate(found.raw):
        numbers = vector_of(raw, body.dimensions)
        written: object = numbers.tolist()
        if body.encoding_format == "base64":
            written = b64encode(raw if body.dimensions is None else numbers.tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": written})
    usage = {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}
