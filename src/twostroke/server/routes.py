"""The small routes: what model there is, tokens, health, metrics, version."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from twostroke import __version__
from twostroke.server.bodies import CheckedRoute
from twostroke.server.chat import template_messages, template_options
from twostroke.server.conversation import chat_tokens
from twostroke.server.errors import bad_request
from twostroke.server.metrics import CONTENT_TYPE
from twostroke.server.openapi import ERRORS
from twostroke.server.schemas import ChatBody, DetokenizeBody, TokenizeBody
from twostroke.server.service import Service, service_of
from twostroke.server.tools import tool_request

router = APIRouter(responses=ERRORS, route_class=CheckedRoute)

_STARTED = int(time.time())
_ANTHROPIC_FIELDS = {"type": "model", "created_at": datetime.fromtimestamp(_STARTED, UTC).isoformat()}
"""Both APIs list models at the same path: clients of either find their fields."""


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _model(service: Service, name: str) -> dict[str, object]:
    facts = service.client.facts
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "twostroke",
        **_ANTHROPIC_FIELDS,
        "display_name": name,
        "max_model_len": None if facts is None else facts.max_context,
    }


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    service = service_of(request)
    models = [_model(service, name) for name in service.settings.listed_names]
    # Anthropic's clients read the last three.
    pages = {"has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}
    return _json({"object": "list", "data": models, **pages})


@router.get("/v1/models/{name:path}")
async def show_model(name: str, request: Request) -> Response:
    service = service_of(request)
    service.check_model(name)
    return _json(_model(service, name))


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    service = service_of(request)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    encoder, max_context = service.encoder(), service.facts().max_context
    tools = tool_request(_as_chat(body), service.tool_format, encoder.tokenizer)
    options = {"add_generation_prompt": body.add_generation_prompt} | template_options(body.chat_template_kwargs)
    messages = template_messages(body.messages or [], service.settings.limits)
    async with service.admission.place(request):  # it takes of the same threads as prompts that are to be answered
        if body.messages is not None:
            tokens = await chat_tokens(service, messages, tools, options)
        else:
            tokens = await encoder.text(body.prompt or "", add_special_tokens=body.add_special_tokens)
        texts = await encoder.token_texts(tokens) if body.return_token_strs else b"null"
        written = await encoder.as_json(tokens)
    reply = b'{"count":%d,"max_model_len":%d,"tokens":%b,"token_strs":%b}' % (len(tokens), max_context, written, texts)
    return Response(reply, media_type="application/json")


def _as_chat(body: TokenizeBody) -> ChatBody:
    """What of it chat would read, already checked."""
    fields = {name: getattr(body, name) for name in ("tools", "tool_choice", "parallel_tool_calls")}
    return ChatBody.model_construct(messages=body.messages or [], **fields)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    service = service_of(request)
    service.check_model(body.model)
    facts = service.facts()
    if (highest := max(body.tokens, default=0)) >= facts.vocab_size:
        raise bad_request(
            f"tokens holds the token id {highest}; this model's ids run from 0 to {facts.vocab_size - 1}", "tokens"
        )
    async with service.admission.place(request):
        text = await service.encoder().decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
    return _json({"prompt": text})


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine lives and takes requests; 503 says what it does instead."""
    service = service_of(request)
    state = service.client.health if service.prompts is not None else "starting"
    return JSONResponse({"status": "ok" if state == "ready" else state}, 200 if state == "ready" else 503)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while new requests are wanted: not when the server drains, nor when its queue is full."""
    service = service_of(request)
    state = service.client.health if service.prompts is not None else "starting"
    if service.admission.draining:
        state = "draining"
    elif service.admission.num_waiting >= service.admission.max_queue:
        state = "queue full"
    return JSONResponse({"status": state}, 200 if state == "ready" else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    service = service_of(request)
    service.metrics.engine_up = int(service.client.health == "ready")
    return Response(service.metrics.render(), media_type=CONTENT_TYPE)


@router.get("/version")
async def version() -> Response:
    return _json({"version": __version__})
