"""`/api/embed` and its older name, `/api/embeddings`: Ollama's shapes of the same vectors. A text that is too long is
cut, unless the request says otherwise."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.core.vectors import vector_of
from twostroke.server import vectors as v
from twostroke.server.admission import RECEIVED_SCOPE
from twostroke.server.bodies import CheckedRoute
from twostroke.server.errors import bad_request
from twostroke.server.ollama_input import checked_model
from twostroke.server.ollama_schemas import EmbedBody, OlderEmbedBody, Options
from twostroke.server.openapi import OLLAMA_ERRORS
from twostroke.server.replies import encode
from twostroke.server.sampling import check_vectors
from twostroke.server.schemas import VectorBody
from twostroke.server.service import Service, service_of

router = APIRouter(responses=OLLAMA_ERRORS, route_class=CheckedRoute)


@router.post("/api/embed")
async def embed(body: EmbedBody, request: Request) -> Response:
    service = service_of(request)
    model = checked_model(body, service)
    _check(service)
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    if not texts:  # as with a prompt that is left out: the model is loaded, which it always is
        return _json({"model": model, "embeddings": []})
    found = await _vectors(
        service, request, texts, body.options, "input", body.dimensions, cuts=body.truncate is not False
    )
    numbers = await service.aside.run(lambda: [vector_of(raw, body.dimensions).tolist() for raw in found.raw])
    total_s = time.perf_counter() - request.scope[RECEIVED_SCOPE]
    return _json(
        {
            "model": model,
            "embeddings": numbers,
            "total_duration": int(total_s * 1e9),
            "load_duration": 0,
            "prompt_eval_count": found.prompt_tokens,
        }
    )


@router.post("/api/embeddings")
async def older_embed(body: OlderEmbedBody, request: Request) -> Response:
    service = service_of(request)
    checked_model(body, service)
    _check(service)
    if not body.prompt:
        return _json({"embedding": []})
    found = await _vectors(service, request, [body.prompt], body.options, "prompt", None, cuts=True)
    return _json({"embedding": vector_of(found.raw[0]).tolist()})


def _check(service: Service) -> None:
    """In the words that Ollama's clients look for."""
    if service.facts().vectors is None:
        raise bad_request("this model does not support embeddings: it writes text, and gives no vectors", "model")


async def _vectors(
    service: Service,
    request: Request,
    texts: list[str],
    options: Options | None,
    param: str,
    dimensions: int | None,
    *,
    cuts: bool,
) -> v.Vectors:
    facts = service.facts()
    own = check_vectors(facts)
    v.check_dimensions(own, dimensions)
    v.check_count(len(texts), param)
    if any(not text for text in texts):
        raise bad_request(f"{param} holds an empty text", param)
    level = None if options is None else options.service_level
    fields = VectorBody.model_validate({"service_level": level})
    limit = facts.max_context if cuts else None
    async with service.admission.place(request, len(texts)) as place:
        ids = await v.text_ids(service, v.prompted(own, texts, None), limit, param)
        call = v.open_call(place, service, request, fields, ids, param)
    return await v.collect(call, len(ids))


def _json(value: object) -> Response:
    return Response(encode(value), media_type="application/json")
