"""`twostroke serve`: a model behind OpenAI's API, Anthropic's and Ollama's."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from twostroke.cli import options, session, units
from twostroke.config import EngineConfig
from twostroke.core.errors import BackendError, BadRequestError, install_hint
from twostroke.server.settings import ServerSettings

if TYPE_CHECKING:
    from twostroke.server.messages import Ready

KEYS_VARIABLE = "TWOSTROKE_API_KEYS"
SETTINGS = ServerSettings("MODEL")


Names = Annotated[
    list[str] | None,
    typer.Option(
        help="What requests call the model; default: MODEL as given. May be given several times: answers say the "
        "first, the others are taken too, and a * in them stands for any text ('claude-*')."
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(help=f"API keys, one a line; or {KEYS_VARIABLE}=key1,key2. Without any, none is asked."),
]
Collector = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="A collector for OpenTelemetry traces over HTTP, like http://localhost:4318 (extra [otel]); default: "
        "OTEL_EXPORTER_OTLP_ENDPOINT.",
    ),
]


def serve(
    model: options.Model,
    name: Names = None,
    api_key_file: KeyFile = None,
    otlp_endpoint: Collector = None,
    settings: ServerSettings = SETTINGS,
    config: EngineConfig = options.OWN,
) -> None:
    """Serve a model over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models;
    with Anthropic's, /v1/messages, and with Ollama's, /api/chat and its like, for coding agents and editors.

    Point any OpenAI client at http://127.0.0.1:8000/v1. Streams, logprobs, n, stop, seeds and penalties work as there;
    every answer also carries `timing`: how long it queued, read your prompt (prefill) and wrote (decode), each beside
    the least that this machine could have taken. /metrics has the same for Prometheus, /health says if it lives.

    Answers can be held to a JSON schema (response_format) or to calls of your functions (tools, tool_choice), and a
    stream can tell how far a long prompt is read. Bodies to try with the curl line that a start prints:

    \b
    '{"messages": [{"role": "user", "content": "A cat, as JSON."}], "response_format": {"type": "json_object"}}'
    '{"messages": [...], "stream": true, "stream_options": {"include_progress": true}}'

    It listens on this machine only, unless --host says otherwise; give API keys before you open it to others.
    Ctrl-C lets answers in flight finish, then stops. The engine has a process of its own, and is started again
    should it die or hang.
    """
    try:
        from twostroke.server.messages import EngineSettings
        from twostroke.server.run import serve as run_server
    except ImportError as error:
        message = f"the server needs the extra [server], and {error.name} is missing; {install_hint('server')}"
        raise BackendError(message) from None
    from twostroke.models.resolve import resolve

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    session.check_has_text(config)
    settings = replace(
        settings,
        model_name=name[0] if name else model,
        other_names=tuple(name[1:]) if name else (),
        api_keys=_api_keys(api_key_file),
        traces_url=_traces_url(otlp_endpoint, console),
    )
    resolve(model, progress=console.print)  # a download's progress bar has the screen for itself
    if not settings.api_keys:
        _warn_of_no_keys(settings, console)
    run_server(
        EngineSettings(model, config),
        settings,
        lambda facts, address: _show(console, settings.model_name, facts, address, bool(settings.api_keys)),
    )


def _warn_of_no_keys(settings: ServerSettings, console: Console) -> None:
    if settings.host not in ("127.0.0.1", "localhost", "::1"):
        console.print(f"warning: {settings.host} may be reached by others, and no API key is asked for")
    for what in ("", "samples_", "tokens_"):
        if getattr(settings.limits, f"max_{what}per_key") is not None:
            console.print(f"warning: --max-{what.replace('_', '-')}per-key limits nobody, as there are no API keys")


def _api_keys(path: Path | None) -> tuple[str, ...]:
    """From a file, a key a line, and from the environment, between commas."""
    keys = [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",")]
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequestError(f"cannot read the API keys in {path}: {error}") from None
        from_file = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not from_file:
            raise BadRequestError(f"{path} holds no API key")
        keys += from_file
    return tuple(dict.fromkeys(key for key in keys if key))


def _traces_url(collector: str | None, console: Console) -> str | None:
    from twostroke.server.settings import traces_url

    url = traces_url(collector, os.environ)
    if url is None:
        return None
    try:
        import twostroke.server.tracing  # noqa: F401
    except ImportError as error:
        message = f"traces need the extra [otel], and {error.name} is missing; {install_hint('otel')}"
        if collector is not None:
            raise BackendError(message) from None
        # The variables may be the whole machine's: they are no reason not to serve.
        console.print(f"warning: OpenTelemetry's variables ask for traces, but {message}")
        return None
    return url


def _show(console: Console, name: str, facts: Ready, address: str, asks_for_key: bool) -> None:
    """What was resolved, why, and the line to try."""
    weights = f"{facts.num_parameters / 1e6:,.0f}M parameters, {units.size(facts.weight_bytes)} of weights"
    console.print(f"{name}: {facts.family}, {weights}")
    for note in facts.notes:
        console.print(f"  {note}")
    fits = min(number * facts.engine.block_size for number in facts.engine.num_blocks) / facts.max_context
    console.print(
        f"  concurrency: up to {facts.engine.max_running} requests at a time; KV holds {fits:,.1f} of the longest, "
        f"{facts.max_context} tokens"
    )
    console.print(f"ready at {address}/v1\nTry:")
    key = ' -H "Authorization: Bearer $API_KEY"' if asks_for_key else ""
    question = {"role": "user", "content": "Explain in two sentences why the sky is blue."}
    body = shlex.quote(json.dumps({"model": name, "messages": [question], "temperature": 0, "max_tokens": 128}))
    console.print(f"  curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {body}")
