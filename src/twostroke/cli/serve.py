"""`twostroke serve`: a model behind OpenAI's API, Anthropic's and Ollama's."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
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
    from twostroke.engine.fleet import FleetSettings
    from twostroke.server.messages import Ready

KEYS_VARIABLE = "TWOSTROKE_API_KEYS"
FLEET_KEY_VARIABLE = "TWOSTROKE_FLEET_KEY"
LEAST_KEY_CHARS = 16
SETTINGS = ServerSettings("MODEL")


Names = Annotated[
    list[str] | None,
    typer.Option(
        help="What requests call the model; default: MODEL as given. May be given several times: answers use "
        "the first, requests may use any, and a * in the others stands for any text ('claude-*')."
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        help=f"API keys, one a line, or a name and a key (the name is for the [keys] of --service-levels); or "
        f"{KEYS_VARIABLE}=key1,key2. Without any, none is asked."
    ),
]
FleetKeyFile = Annotated[
    Path | None,
    typer.Option(
        help=f"A file with the key that the servers of a fleet share, and sign with; or {FLEET_KEY_VARIABLE}.",
        rich_help_panel="Fleet",
    ),
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
    fleet_key_file: FleetKeyFile = None,
    otlp_endpoint: Collector = None,
    settings: ServerSettings = SETTINGS,
    config: EngineConfig = options.OWN,
) -> None:
    """Serve a model over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models;
    with Anthropic's, /v1/messages, and with Ollama's, /api/chat and its like, for coding agents and editors.

    Point any OpenAI client at http://127.0.0.1:8000/v1. Streams, logprobs, n, stop, seeds and penalties work as with
    OpenAI. Every answer also carries `timing`: how long it queued, read your prompt (prefill) and wrote (decode), each
    beside the least time that this machine could have taken. /metrics has the same for Prometheus. /health says whether
    the engine is alive.

    Answers can be made to follow a JSON schema (response_format) or to call your functions (tools, tool_choice). A
    stream can tell how far a long prompt is read. Bodies to try with the curl line that the server prints at its start:

    \b
    '{"messages": [{"role": "user", "content": "A cat, as JSON."}], "response_format": {"type": "json_object"}}'
    '{"messages": [...], "stream": true, "stream_options": {"include_progress": true}}'

    It listens on this machine only, unless --host says otherwise. Set API keys before you open it to others. Ctrl-C
    lets answers in flight finish, then stops. The engine has a process of its own, and is started again if it dies or
    hangs.
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
    keys = api_keys(api_key_file)
    fleet_key = read_fleet_key(fleet_key_file, settings.role)
    settings = replace(
        settings,
        model_name=name[0] if name else model,
        other_names=tuple(name[1:]) if name else (),
        api_keys=tuple(keys),
        key_names=tuple(keys.values()),
        traces_url=_traces_url(otlp_endpoint, console),
        fleet_key=fleet_key,
    )
    resolve(model, progress=console.print)  # a download's progress bar has the screen for itself
    if not settings.api_keys:
        _warn_of_no_keys(settings, console)
    run_server(
        EngineSettings(model, config, _fleet_settings(settings), settings.kv_events, settings.kv_events_topic),
        settings,
        lambda facts, address: _show(console, settings, facts, address),
    )


def read_fleet_key(path: Path | None, role: str | None) -> bytes:
    """From a file, or the environment; nothing where a server is of no fleet."""
    if role is None:
        return b""
    text = os.environ.get(FLEET_KEY_VARIABLE, "")
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequestError(f"cannot read the fleet's key in {path}: {error}") from None
    if len(text.strip()) < LEAST_KEY_CHARS:
        raise BadRequestError(
            f"--role {role} needs the fleet's key, {LEAST_KEY_CHARS} characters or more that all its servers share: "
            f"--fleet-key-file, or {FLEET_KEY_VARIABLE}; `openssl rand -hex 32` makes one"
        )
    return hashlib.sha256(text.strip().encode()).digest()


def _fleet_settings(settings: ServerSettings) -> FleetSettings | None:
    from twostroke.engine.fleet import FleetSettings

    if settings.role is None:
        return None
    engine_id = f"{settings.transfer_host}-{os.getpid()}-{secrets.token_hex(4)}"
    leaves = settings.hand_over == "worth"
    return FleetSettings(settings.fleet_key.hex(), settings.transfer, settings.transfer_host, engine_id, leaves)


def _warn_of_no_keys(settings: ServerSettings, console: Console) -> None:
    if settings.host not in ("127.0.0.1", "localhost", "::1"):
        console.print(f"warning: {settings.host} may be reached by others, and no API key is asked for")
    for what in ("", "samples_", "tokens_"):
        if getattr(settings.limits, f"max_{what}per_key") is not None:
            console.print(f"warning: --max-{what.replace('_', '-')}per-key limits nobody, as there are no API keys")


def api_keys(path: Path | None) -> dict[str, str]:
    """From a file, a key a line, and from the environment, between commas: by key, its name, or nothing."""
    entries = [("the variable " + KEYS_VARIABLE, one) for one in os.environ.get(KEYS_VARIABLE, "").split(",")]
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequestError(f"cannot read the API keys in {path}: {error}") from None
        from_file = [
            (f"line {number} of {path}", line)
            for number, line in enumerate(lines, 1)
            if line.strip() and not line.lstrip().startswith("#")
        ]
        if not from_file:
            raise BadRequestError(f"{path} holds no API key")
        entries += from_file
    return _named_keys(entries)


def _named_keys(entries: list[tuple[str, str]]) -> dict[str, str]:
    """Where each is from, and what it says. No error repeats a key."""
    names: dict[str, str] = {}
    for where, entry in entries:
        words = entry.split()
        if len(words) > 2:
            raise BadRequestError(f"{where} has {len(words)} words: it may have a key, or a name and a key")
        if not words:
            continue
        name, key = ("", words[0]) if len(words) == 1 else (words[0], words[1])
        if name and name in (other for used, other in names.items() if used != key):
            raise BadRequestError(f"{where} gives the name {name!r} to a second API key")
        if name and names.get(key):
            raise BadRequestError(f"{where} gives a second name, {name!r}, to the API key {names[key]!r}")
        names[key] = name or names.get(key, "")
    return names


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


def _show(console: Console, settings: ServerSettings, facts: Ready, address: str) -> None:
    """What was resolved, why, and the line to try."""
    name = settings.model_name
    weights = f"{facts.num_parameters / 1e6:,.0f}M parameters, {units.size(facts.weight_bytes)} of weights"
    console.print(f"{name}: {facts.family}, {weights}")
    for note in facts.notes:
        console.print(f"  {note}")
    fits = min(number * facts.engine.block_size for number in facts.engine.num_blocks) / facts.max_context
    console.print(
        f"  concurrency: up to {facts.engine.max_running} requests at a time; KV holds {fits:,.1f} of the longest, "
        f"{facts.max_context} tokens"
    )
    if settings.page_mode != "off":
        console.print(f"  page: {address}/ shows every step as it happens")
    console.print(f"ready at {address}/v1\nTry:")
    key = ' -H "Authorization: Bearer $API_KEY"' if settings.api_keys else ""
    path, asked = _example(facts)
    body = shlex.quote(json.dumps({"model": name, **asked}))
    console.print(f"  curl {address}{path}{key} -H 'Content-Type: application/json' -d {body}")


def _example(facts: Ready) -> tuple[str, dict[str, object]]:
    """A request that this model can answer."""
    if facts.vectors is None:
        question = {"role": "user", "content": "Explain in two sentences why the sky is blue."}
        return "/v1/chat/completions", {"messages": [question], "temperature": 0, "max_tokens": 128}
    if facts.vectors.scores:
        return "/v1/rerank", {"query": "Why is the sky blue?", "documents": ["Air scatters light.", "Cats purr."]}
    return "/v1/embeddings", {"input": ["Why is the sky blue?", "Air scatters light."]}
