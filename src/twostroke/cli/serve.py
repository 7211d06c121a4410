"""`twostroke serve`: a model behind OpenAI's API, Anthropic's and Ollama's."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from twostroke.cli import options, units
from twostroke.core.errors import BackendError, BadRequestError, install_hint

if TYPE_CHECKING:
    from twostroke.server.messages import Ready

KEYS_VARIABLE = "TWOSTROKE_API_KEYS"


def serve(
    model: options.Model,
    host: Annotated[str, typer.Option(help="Where to listen. 0.0.0.0 lets the whole network in: give keys then.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8000,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="What requests call the model; default: MODEL as given. May be given several times: answers say the "
            "first, the others are taken too, and a * in them stands for any text ('claude-*')."
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help=f"API keys, one a line; or {KEYS_VARIABLE}=key1,key2. Without any, none is asked."),
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; one more gets 429 and Retry-After.")] = 256,
    max_per_key: Annotated[int | None, typer.Option(help="Requests one API key may have in flight.")] = None,
    max_samples_per_key: Annotated[
        int | None,
        typer.Option(
            help="Answers (prompts times n) one API key may have in flight; default: half of all, of several keys."
        ),
    ] = None,
    max_tokens_per_key: Annotated[
        int | None,
        typer.Option(
            help="Tokens that those may come to, prompts and max_tokens; default: half of all, of several keys."
        ),
    ] = None,
    max_samples_in_flight: Annotated[
        int | None, typer.Option(help="Answers in flight in all; default: twice as many as may run and wait.")
    ] = None,
    max_tokens_in_flight: Annotated[
        int | None,
        typer.Option(help="Tokens that those may come to; default: the longest context for all that may run and wait."),
    ] = None,
    share_prefixes: Annotated[
        bool,
        typer.Option(
            help="Let API keys share cached prefixes: a key can then tell by its times what another has asked."
        ),
    ] = False,
    max_output_tokens: Annotated[int | None, typer.Option(help="The most that a request may ask for.")] = None,
    max_samples: Annotated[int, typer.Option(help="The largest n of a request.")] = 16,
    max_stored_responses: Annotated[
        int, typer.Option(help="Responses kept in memory for previous_response_id; 0 keeps none.")
    ] = 1024,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="The largest request, like 8MiB.")] = "8MiB",
    request_timeout: Annotated[float, typer.Option(help="Seconds from a request to the end of its answer.")] = 600.0,
    max_connections: Annotated[int, typer.Option(help="Connections that may be open; one more gets 503.")] = 900,
    header_timeout: Annotated[float, typer.Option(help="Seconds that a request's headers may take to arrive.")] = 10.0,
    reader_timeout: Annotated[
        float, typer.Option(help="Seconds that a stream may wait for its client to read.")
    ] = 30.0,
    drain: Annotated[float, typer.Option(help="Seconds that answers may take to end after Ctrl-C or SIGTERM.")] = 30.0,
    engine_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds without a sign of life, beyond what its steps should take, after which the engine is ended "
            "and started again; inf: never."
        ),
    ] = 30.0,
    cors: Annotated[
        list[str] | None, typer.Option(help="An origin whose pages may call this server; may be given several times.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A name that requests may be sent to, beside this machine's own, as a proxy in front may pass it on; "
            "may be given several times; '*': any. Names are checked where this is given, and where no key is asked "
            "for and only this machine is let in.",
        ),
    ] = None,
    tool_parser: Annotated[
        str,
        typer.Option(
            help="How the model writes tool calls: hermes, llama3, mistral, mistral-args; auto: as its template does."
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(help="think: split <think>...</think> from answers; none; auto: if the model knows it.")
    ] = "auto",
    access_log: Annotated[bool, typer.Option(help="A line a request on standard error.")] = False,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A collector for OpenTelemetry traces over HTTP, like http://localhost:4318 (extra [otel]); default: "
            "OTEL_EXPORTER_OTLP_ENDPOINT.",
        ),
    ] = None,
    backend: options.Backend = "auto",
    threads: options.Threads = None,
    max_context: options.MaxContext = None,
    max_running: Annotated[int | None, typer.Option(help="Streams that run at a time; default: as suits.")] = None,
    kv_memory: options.KVMemory = None,
    kv_type: options.KVType = "auto",
    max_tokens_per_step: options.MaxTokensPerStep = None,
    prefix_caching: options.PrefixCaching = True,
    quantise: options.Quantise = None,
    dtype: options.Dtype = "auto",
    decode_weights: options.DecodeWeights = "auto",
    itl_target_ms: options.ItlTarget = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models;
    with Anthropic's, /v1/messages, and with Ollama's, /api/chat and its like.
    Anthropic's /v1/messages and Ollama's /api/chat are there too, for coding agents and editors.

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
        from twostroke.server.settings import Limits, ServerSettings
    except ImportError as error:
        message = f"the server needs the extra [server], and {error.name} is missing; {install_hint('server')}"
        raise BackendError(message) from None
    from dataclasses import replace

    from twostroke.models.resolve import resolve

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    config = options.engine_config(
        backend,
        threads,
        max_context,
        kv_memory,
        max_tokens_per_step,
        prefix_caching,
        kv_type,
        quantise,
        dtype=dtype,
        itl_target_ms=itl_target_ms,
        decode_weights=decode_weights,
    )
    if max_running is not None:
        config = replace(config, max_running=max_running)
    limits = Limits(
        max_body_bytes=options.parse_size(max_body),
        request_timeout_s=request_timeout,
        headers_timeout_s=header_timeout,
        reader_timeout_s=reader_timeout,
        max_connections=max_connections,
        max_queue=max_queue,
        max_per_key=max_per_key,
        max_samples_in_flight=max_samples_in_flight,
        max_tokens_in_flight=max_tokens_in_flight,
        max_samples_per_key=max_samples_per_key,
        max_tokens_per_key=max_tokens_per_key,
        max_samples=max_samples,
        max_stored_responses=max_stored_responses,
        max_output_tokens=max_output_tokens,
    )
    settings = ServerSettings(
        model_name=name[0] if name else model,
        other_names=tuple(name[1:]) if name else (),
        host=host,
        port=port,
        api_keys=_api_keys(api_key_file),
        share_prefixes=share_prefixes,
        cors_origins=tuple(cors or ()),
        allowed_hosts=tuple(allowed_host or ()),
        access_log=access_log,
        drain_s=drain,
        engine_timeout_s=engine_timeout,
        limits=limits,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        traces_url=_traces_url(otlp_endpoint, console),
    )
    resolve(model, progress=console.print)  # a download's progress bar has the screen for itself
    if settings.host not in ("127.0.0.1", "localhost", "::1") and not settings.api_keys:
        console.print(f"warning: {settings.host} may be reached by others, and no API key is asked for")
    per_key = {"": max_per_key, "samples-": max_samples_per_key, "tokens-": max_tokens_per_key}
    for what, limit in per_key.items():
        if limit is not None and not settings.api_keys:
            console.print(f"warning: --max-{what}per-key limits nobody, as there are no API keys")
    run_server(
        EngineSettings(model, config),
        settings,
        lambda facts, address: _show(console, settings.model_name, facts, address, bool(settings.api_keys)),
    )


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
    fits = min(number * facts.block_size for number in facts.num_blocks) / facts.max_context
    console.print(
        f"  concurrency: up to {facts.max_running} requests at a time; KV holds {fits:,.1f} of the longest, "
        f"{facts.max_context} tokens"
    )
    console.print(f"ready at {address}/v1\nTry:")
    key = ' -H "Authorization: Bearer $API_KEY"' if asks_for_key else ""
    question = {"role": "user", "content": "Explain in two sentences why the sky is blue."}
    body = shlex.quote(json.dumps({"model": name, "messages": [question], "temperature": 0, "max_tokens": 128}))
    console.print(f"  curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {body}")
