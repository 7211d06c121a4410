"""`/v1/rerank`, as Jina, Cohere, vLLM and SGLang speak it: documents by how well they answer a query. A reranker scores
each beside the query; with an embedding model the score is the cosine of their vectors."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.core.errors import BadRequestError
from twostroke.core.vectors import VectorFacts, cosine, score_of, vector_of
from twostroke.server import vectors as v
from twostroke.server.bodies import CheckedRoute
from twostroke.server.errors import bad_request
from twostroke.server.openapi import ERRORS
from twostroke.server.phases import server_timing
from twostroke.server.replies import encode
from twostroke.server.sampling import check_vectors
from twostroke.server.schemas import RerankBody
from twostroke.server.service import Service, service_of
from twostroke.text.framing import framed_pair, framed_texts

router = APIRouter(responses=ERRORS, route_class=CheckedRoute)

Prepared = tuple[list[tuple[int, ...]], list[int | None]]
"""Prompts, and where a second text begins in each."""


@router.post("/v1/rerank")
async def rerank(body: RerankBody, request: Request) -> Response:
    service = service_of(request)
    service.check_model(body.model)
    facts = service.facts()
    own = check_vectors(facts)
    try:
        own.check_instruction(body.instruction)
    except BadRequestError as error:
        raise bad_request(str(error), "instruction") from None
    if None not in (body.top_n, body.top_k) and body.top_n != body.top_k:
        raise bad_request(f"top_k is {body.top_k}, and top_n is {body.top_n}", "top_k")
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    v.check_count(len(documents), "documents")
    limit = v.limit_of(body.truncate_prompt_tokens, facts)
    async with service.admission.place(request, len(documents)) as place:
        prepare = _texts if not own.scores else _pairs if own.frame is None else _questions
        ids, seconds = await prepare(service, own, body, documents, limit)
        call = v.open_call(place, service, request, body, ids, "documents", seconds)
    found = await v.collect(call, len(ids))
    reply = await service.aside.run(lambda: encode(_reply(found, own, body, documents, service.settings.model_name)))
    return Response(reply, headers={"Server-Timing": server_timing(found.timings[0])}, media_type="application/json")


@router.post("/v2/rerank")
async def rerank_as_cohere(body: RerankBody, request: Request) -> Response:
    """Cohere's path of it: its second version gives no documents back."""
    body.return_documents = bool(body.return_documents)
    return await rerank(body, request)


@router.post("/rerank")
async def rerank_as_others(body: RerankBody, request: Request) -> Response:
    """vLLM's and SGLang's path of it."""
    return await rerank(body, request)


async def _pairs(
    service: Service, own: VectorFacts, body: RerankBody, documents: list[str], limit: int | None
) -> Prepared:
    encoder, most = service.encoder(), body.max_tokens_per_doc or None
    texts = v.prompted(own, [body.query, *documents], None)
    first, *others = await encoder.texts(texts, add_special_tokens=False)

    def join() -> Prepared:
        pairs = [framed_pair(encoder.tokenizer, first, other[:most], limit) for other in others]
        return [ids for ids, _ in pairs], [second for _, second in pairs]

    ids, seconds = await encoder.beside(join)
    v.check_pairs(ids, service.facts(), "documents")
    return ids, seconds


async def _questions(
    service: Service, own: VectorFacts, body: RerankBody, documents: list[str], limit: int | None
) -> Prepared:
    """Of a language model that says how well they fit."""
    assert own.frame is not None
    encoder, most, frame = service.encoder(), body.max_tokens_per_doc or None, own.frame
    head, tail = await encoder.texts([frame.head, frame.tail], add_special_tokens=False)
    opening = frame.opening(body.query, body.instruction)
    texts = [opening, *(opening + document for document in documents)]
    first, *others = await encoder.texts(texts, add_special_tokens=False, parse_special=False)
    ids = await encoder.beside(lambda: [framed_texts(head, len(first), one, tail, limit, most) for one in others])
    v.check_pairs(ids, service.facts(), "documents")
    return ids, [None] * len(ids)


async def _texts(
    service: Service, own: VectorFacts, body: RerankBody, documents: list[str], limit: int | None
) -> Prepared:
    """The query first."""
    first = v.prompted(own, [body.query], own.query_prompt)
    others = v.prompted(own, documents, own.document_prompt)
    shorter = min((size for size in (limit, body.max_tokens_per_doc or None) if size is not None), default=None)
    ids = await v.text_ids(service, first, limit, "query")
    ids += await v.text_ids(service, others, shorter, "documents")
    return ids, [None] * len(ids)


def _reply(found: v.Vectors, own: VectorFacts, body: RerankBody, documents: list[str], model: str) -> dict[str, Any]:
    if own.scores:
        scores = [score_of(own, raw) for raw in found.raw]
    else:
        query, *others = (vector_of(raw) for raw in found.raw)
        scores = [cosine(query, other) for other in others]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or body.top_k or None]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    usage = {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens}
    return {"id": f"rerank-{uuid4().hex}", "model": model, "usage": usage, "results": results}
