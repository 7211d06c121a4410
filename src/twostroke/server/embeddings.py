"""`/v1/embeddings`: vectors of texts or token ids, in OpenAI's shape; as numbers, or as base64 of 32-bit floats, which
is smaller and what its clients ask for."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.core.vectors import normalised, vector_of
from twostroke.server import vectors as v
from twostroke.server.bodies import CheckedRoute
from twostroke.server.embedding_words import check_wishes, chosen_prompt, dimensions_of, writes_base64
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
    dimensions, param = dimensions_of(body)
    v.check_dimensions(own, dimensions, param)
    check_wishes(body)
    form = Form(dimensions, writes_base64(body), is_normalised=bool(body.normalized))
    prompt = chosen_prompt(own, body)
    texts, given = _inputs(body)
    v.check_count(len(texts) + len(given), "input")
    if "" in texts:
        raise bad_request("input holds an empty text", "input")
    limit = v.limit_of(body.truncate_prompt_tokens, facts)
    if given and prompt.is_written(own):
        raise bad_request(f"{prompt.param} goes with texts, not with token ids", prompt.param)
    texts = prompt.before(own, texts)
    async with service.admission.place(request, len(texts) + len(given)) as place:
        ids = [tuple(one[:limit]) for one in given] or await v.text_ids(service, texts, limit, "input")
        call = v.open_call(place, service, request, body, ids, "input")
    found = await v.collect(call, len(ids))
    payload = await service.aside.run(lambda: encode(_reply(found, form, service.settings.model_name)))
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


@dataclass(frozen=True, slots=True)
class Form:
    """In which a request wants its vectors."""

    dimensions: int | None
    in_base64: bool
    is_normalised: bool
    """Else as the model has them."""

    def written(self, raw: bytes) -> object:
        numbers = vector_of(raw, self.dimensions)
        if self.is_normalised:
            numbers = normalised(numbers)
        if not self.in_base64:
            return numbers.tolist()
        is_whole = self.dimensions is None and not self.is_normalised
        return b64encode(raw if is_whole else numbers.tobytes()).decode()


def _reply(found: v.Vectors, form: Form, model: str) -> dict[str, Any]:
    data = []
    for index, raw in enumerate(found.raw):
        written = form.written(raw)
        data.append({"object": "embedding", "index": index, "embedding": written})
    usage = {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}
