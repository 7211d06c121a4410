"""The FastAPI application: routes, error handlers, and the guard around them."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from twostroke import __version__
from twostroke.server import (
    anthropic_messages,
    chat,
    completions,
    embeddings,
    errors,
    explaining,
    loads,
    ollama_answers,
    ollama_embeddings,
    ollama_models,
    page,
    planning,
    rerank,
    responses,
    routes,
    scaling,
    stand_in,
    tokenizer_info,
    watching,
)
from twostroke.server.access_log import AccessLog
from twostroke.server.guard import Guard
from twostroke.server.service import Service


def create_app(service: Service) -> ASGIApp:
    """The service is started and closed by whoever made it."""
    app = FastAPI(
        title="Twostroke",
        version=__version__,
        description="OpenAI's, Anthropic's and Ollama's APIs on an engine that says where each answer's time went.",
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        # FastAPI's own spans would know no phases, and its logs quote what was sent.
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
    )
    app.state.service = service
    app.add_exception_handler(HTTPException, errors.on_http_error)
    app.add_exception_handler(RequestValidationError, errors.on_invalid_body)
    app.add_exception_handler(Exception, errors.on_bug)
    apis = (chat, completions, responses, anthropic_messages, ollama_answers, ollama_models)
    vectors = (embeddings, rerank, ollama_embeddings)
    for module in (
        *apis,
        *vectors,
        routes,
        loads,
        scaling,
        explaining,
        tokenizer_info,
        page,
        watching,
        planning,
        stand_in,
    ):
        app.include_router(module.router)
    service.warm_up = app.openapi  # it keeps what it made
    # Behind the guard: who is not let in leaves no trace.
    served: ASGIApp = app if service.tracing is None else service.tracing.around(app)
    guarded: ASGIApp = Guard(served, service.settings, service.metrics)
    if origins := service.settings.cors_origins:
        # Outside the guard: a browser asks for permission before it sends a key.
        guarded = CORSMiddleware(
            guarded,
            allow_origins=list(origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "retry-after-ms"],
        )
    return AccessLog(guarded) if service.settings.access_log else guarded
