"""What Ollama's clients ask about the models that there are: here it is one, and it is loaded."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.server.bodies import CheckedRoute
from twostroke.server.messages import Ready
from twostroke.server.ollama_input import LATEST, checked_model
from twostroke.server.ollama_schemas import ModelBody
from twostroke.server.openapi import OLLAMA_ERRORS
from twostroke.server.replies import encode
from twostroke.server.service import Service, service_of

router = APIRouter(responses=OLLAMA_ERRORS, route_class=CheckedRoute)

API_VERSION = "0.12.11"
"""The release of Ollama whose API this is: editors ask, and turn older ones away. `/version` has this server's own."""
_STARTED = datetime.now(UTC)
_FOREVER = timedelta(days=36500)


def _json(value: object) -> Response:
    return Response(encode(value), media_type="application/json")


@router.get("/api/version")
async def version() -> Response:
    return _json({"version": API_VERSION})


@router.get("/api/tags")
async def list_models(request: Request) -> Response:
    service = service_of(request)
    return _json({"models": [_entry(name, service.facts()) for name in service.settings.listed_names]})


@router.get("/api/ps")
async def list_loaded(request: Request) -> Response:
    service = service_of(request)
    facts = service.facts()
    held_bytes = facts.weight_bytes + facts.engine.kv_bytes
    entry = {
        **_entry(service.settings.model_name, facts),
        "size": held_bytes,
        "size_vram": held_bytes if facts.backend == "cuda" else 0,
        "expires_at": (datetime.now(UTC) + _FOREVER).isoformat(),
        "context_length": facts.max_context,
    }
    return _json({"models": [entry]})


@router.post("/api/show")
async def show(body: ModelBody, request: Request) -> Response:
    service = service_of(request)
    checked_model(body, service)
    facts = service.facts()
    template = service.encoder().tokenizer.chat_template
    return _json(
        {
            "modelfile": "",
            "parameters": "",
            "template": template or "{{ .Prompt }}",
            "details": _details(facts),
            "model_info": _model_info(facts),
            "capabilities": _capabilities(service),
            "modified_at": _STARTED.isoformat(),
        }
    )


def _entry(name: str, facts: Ready) -> dict[str, Any]:
    tagged = name if ":" in name.rpartition("/")[2] else name + LATEST
    told = f"{name} {facts.family} {facts.num_parameters} {facts.weight_bytes} {facts.weight_kind}"
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _STARTED.isoformat(),
        "size": facts.weight_bytes,
        "digest": sha256(told.encode("utf-8", "replace")).hexdigest(),  # of what is told of it, not of its file
        "details": _details(facts),
    }


def _details(facts: Ready) -> dict[str, Any]:
    millions = facts.num_parameters / 1e6
    return {
        "parent_model": "",
        "format": facts.file_format,
        "family": facts.family,
        "families": [facts.family],
        "parameter_size": f"{millions / 1e3:.1f}B" if millions >= 1e3 else f"{millions:.2f}M",
        "quantization_level": facts.weight_kind,
    }


def _model_info(facts: Ready) -> dict[str, Any]:
    family, shape = facts.family, facts.engine.shape
    return {
        "general.architecture": family,
        "general.parameter_count": facts.num_parameters,
        f"{family}.context_length": facts.max_context,
        f"{family}.embedding_length": facts.hidden_size,
        f"{family}.block_count": sum(group.num_layers for group in shape.kv_groups),
        f"{family}.attention.head_count": shape.num_heads,
        f"{family}.attention.key_length": shape.head_dim,
        f"{family}.vocab_size": facts.vocab_size,
    }


def _capabilities(service: Service) -> list[str]:
    if service.facts().vectors is not None:
        return ["embedding"]
    can_chat = service.encoder().tokenizer.chat_template is not None
    thinks = service.reasoning_parser != "none"
    return ["completion", *(["tools"] if can_chat else []), *(["thinking"] if thinks else [])]
