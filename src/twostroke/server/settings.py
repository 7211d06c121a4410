"""What whoever runs a server may choose, frozen, with the limits that each request is held to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import inf
from typing import Literal, cast
from urllib.parse import urlsplit

from twostroke.cluster.endpoints import check_url, read_endpoint
from twostroke.core.errors import BadRequestError
from twostroke.core.setting import check_settings, choice, integer, number, several, switch, text
from twostroke.server.loopback import is_loopback

LISTENING, LIMITS, KEYS, TIMES, ANSWERS = "Listening", "Limits", "Limits of a key", "Time limits", "Answers"
PAGE, FLEET = "The live page", "Fleet"
"""The panels of `serve`'s help."""

PageMode = Literal["off", "view", "full"]


@dataclass(frozen=True, slots=True)
class Limits:
    max_body_bytes: int = integer(
        8 * 2**20, 1, None, LIMITS, "The largest request, like 8MiB.", kind="size", flag="--max-body", metavar="SIZE"
    )
    max_bodies_bytes: int = integer(512 * 2**20, 1)
    """Of all requests in flight together; what would be more is answered with 503."""
    body_timeout_s: float = number(30.0, 0.0, inf, is_above_low=True)
    """A request's body has to be there within this."""
    request_timeout_s: float = number(
        600.0,
        0.0,
        inf,
        TIMES,
        "Seconds from a request to the end of its answer.",
        flag="--request-timeout",
        is_above_low=True,
    )
    headers_timeout_s: float = number(
        10.0,
        0.0,
        inf,
        TIMES,
        "Seconds that a request's headers may take to arrive.",
        flag="--header-timeout",
        is_above_low=True,
    )
    reader_timeout_s: float = number(
        30.0,
        0.0,
        inf,
        TIMES,
        "Seconds that a stream may wait for its client to read.",
        flag="--reader-timeout",
        is_above_low=True,
    )
    max_connections: int = integer(900, 1, None, LIMITS, "Connections that may be open; one more gets 503.")
    max_queue: int = integer(256, 1, None, LIMITS, "Requests that may wait; one more gets 429 and Retry-After.")
    max_per_key: int | None = integer(None, 1, None, KEYS, "Requests one API key may have in flight.")
    max_samples_per_key: int | None = integer(
        None,
        1,
        None,
        KEYS,
        "Answers (prompts times n) one API key may have in flight; default: half of what is allowed in all, if there "
        "are several keys.",
    )
    max_tokens_per_key: int | None = integer(
        None,
        1,
        None,
        KEYS,
        "Tokens that one key's answers may come to, prompts and max_tokens; default: half of what is allowed in all, "
        "if there are several keys.",
    )
    max_samples_in_flight: int | None = integer(
        None, 1, None, LIMITS, "Answers in flight, of all keys; default: twice as many as may run and wait."
    )
    max_tokens_in_flight: int | None = integer(
        None,
        1,
        None,
        LIMITS,
        "Tokens that all answers in flight may come to; default: the longest context times the number that may run "
        "and wait.",
    )
    max_samples: int = integer(16, 1, None, LIMITS, "The largest n of a request.")
    max_prompts: int = integer(256, 1)
    """Of a request, and of them times `n`."""
    max_output_tokens: int | None = integer(None, 1, None, LIMITS, "The largest max_tokens that a request may ask for.")
    max_stop_strings: int = 16
    max_stop_chars: int = 1024
    max_logit_bias: int = 1024
    max_messages: int = 4096
    max_stored_responses: int = integer(
        1024, 0, None, LIMITS, "Responses kept in memory for previous_response_id; 0 keeps none."
    )
    max_stored_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    model_name: str
    """What requests call the model, and what answers say."""
    other_names: tuple[str, ...] = ()
    """That requests may call it, too; a `*` in one stands for any text."""
    host: str = text("127.0.0.1", LISTENING, "Where to listen. 0.0.0.0 lets the whole network in: give keys then.")
    port: int = integer(8000, 0, 65535, LISTENING, "The port; 0 takes a free one.")
    api_keys: tuple[str, ...] = ()
    """Empty: no key is asked for."""
    key_names: tuple[str, ...] = ()
    """What keys are called where classes are given to them: one a key, empty where it has none."""
    share_prefixes: bool = switch(
        False,
        KEYS,
        "Let API keys share cached prefixes: a key can then tell by response times what another key has asked.",
    )
    cors_origins: tuple[str, ...] = several(
        "texts", LISTENING, "An origin whose pages may call this server; may be given several times.", flag="--cors"
    )
    allowed_hosts: tuple[str, ...] = several(
        "texts",
        LISTENING,
        "A host name that requests may use, beside this machine's own: a proxy in front may pass its name on. May be "
        "given several times; '*': any. Names are checked if this is given, or if the server asks for no key and "
        "listens to this machine only.",
        flag="--allowed-host",
        metavar="NAME",
    )
    access_log: bool = switch(False, LISTENING, "Write one line for each request on standard error.")
    vllm_metrics: bool = switch(
        True, LISTENING, "Also give metrics under vLLM's names in /metrics, which gateways and autoscalers scrape."
    )
    drain_s: float = number(
        30.0,
        0.0,
        inf,
        TIMES,
        "Seconds that answers may take to end after Ctrl-C or SIGTERM; inf: no limit.",
        flag="--drain",
    )
    engine_timeout_s: float = number(
        30.0,
        1.0,
        inf,
        TIMES,
        "After this many seconds without a sign of life, beyond what its steps should take, the engine is stopped "
        "and started again; inf: never.",
        flag="--engine-timeout",
    )
    limits: Limits = field(default_factory=Limits)
    tool_parser: str = text(
        "auto",
        ANSWERS,
        "How the model writes tool calls: deepseek-v3, deepseek-v31, function-gemma, gemma4, glm45, glm47, granite, "
        "harmony, hermes, hunyuan, hunyuan-list, hunyuan3, kimi-k2, lfm2, llama3, llama4, minimax, mistral, "
        "mistral-args, nemotron, olmo3, phi4, pythonic, qwen3-coder, seed-oss; auto: read it from the model's "
        "template.",
        other_flag="--tool-call-parser",
    )
    reasoning_parser: str = text(
        "auto",
        ANSWERS,
        "think: split <think>...</think> from answers; think-answer, think-response: the same, and remove <answer> "
        "or <response> around what follows; mistral: [THINK]; seed: <seed:think>; granite: Granite 3.2's sentences; "
        "channel: Gemma 4's thoughts; harmony: gpt-oss's channels; none; auto: as the model's template or vocabulary "
        "says.",
    )
    page: str | None = choice(
        None,
        ("off", "view", "full"),
        PAGE,
        "The page at /, which shows every step as it happens. view: it only shows; full: it can also chat, and pause "
        "an engine that nobody else uses. Default: full if the server listens to this machine only, else off.",
    )
    record: str | None = text(
        None,
        PAGE,
        "Record what the page shows (names, lengths and times, no text) in this file, for `twostroke replay`.",
        metavar="FILE",
    )
    role: str | None = choice(
        None,
        ("prefill", "decode", "both"),
        FLEET,
        "What this server does in a fleet: prefill reads prompts for others, decode writes answers to them, both "
        "does either. Default: it belongs to no fleet.",
    )
    transfer: str = choice(
        "auto",
        ("auto", "nixl", "sockets"),
        FLEET,
        "How KV goes from server to server: nixl, sockets (plain TCP), or auto: nixl where it is installed.",
    )
    transfer_host: str = text(
        "127.0.0.1",
        FLEET,
        "The address of this machine at which other servers fetch this server's KV.",
        metavar="HOST",
    )
    hand_over: str = choice(
        "worth",
        ("worth", "all"),
        FLEET,
        "Which prompts are read for other servers: worth: those for which it is faster; all. The server that writes "
        "the answer reads the others: short prompts, and prompts that it reads sooner itself.",
    )
    peers: tuple[str, ...] = several(
        "texts",
        FLEET,
        "Another machine that KV may be fetched from, by the address or name in its --transfer-host; or a network of "
        "such machines (10.0.0.0/24). May be given several times. What any other machine has read is read here again.",
        flag="--peer",
        metavar="HOST",
    )
    router_hosts: tuple[str, ...] = several(
        "texts",
        FLEET,
        "The address (10.0.0.1) or network (10.0.0.0/24) of routers that may ask this server to read a prompt for "
        "another one. This machine always may. May be given several times. Default: the router of --register.",
        flag="--router-host",
        metavar="HOST",
    )
    fleet_key: bytes = field(default=b"", repr=False)
    """What the servers of a fleet sign with."""
    register: str | None = text(
        None,
        FLEET,
        "The address of a router (smg). This server adds itself there once it is ready, and again after the router "
        "was restarted, and removes itself before it stops. If the router asks for a key: TWOSTROKE_ROUTER_KEY.",
        metavar="URL",
    )
    advertise: str | None = text(
        None,
        FLEET,
        "The address by which the router reaches this server; default: where it listens, which then must not be a "
        "wildcard.",
        metavar="URL",
    )
    kv_events: str | None = text(
        None,
        FLEET,
        "Publish which prefixes are cached, as vLLM does over ZeroMQ: on a port of this machine (5557), HOST:PORT, "
        "or tcp://*:5557 for all of its addresses. Missed messages can be asked for at the next port. The messages "
        "hold prompts as token ids: use private networks only.",
        metavar="ENDPOINT",
    )
    kv_events_topic: str = text(
        "", FLEET, "The topic of those messages, like kv@HOST@MODEL for llm-d.", metavar="TOPIC"
    )
    look_key: str | None = None
    """What a router looks at this server with, where keys are asked for."""
    traces_url: str | None = None
    """Where OpenTelemetry traces are sent; None: there are none."""

    @property
    def page_mode(self) -> PageMode:
        """As chosen, or as it suits where the server listens."""
        if self.page is None:
            return "full" if is_loopback(self.host) else "off"
        return cast("PageMode", self.page)

    @property
    def listed_names(self) -> list[str]:
        return [self.model_name, *(name for name in self.other_names if "*" not in name)]

    def knows_model(self, name: str) -> bool:
        return name == self.model_name or any(fnmatchcase(name, _literal(other)) for other in self.other_names)

    def __post_init__(self) -> None:
        check_settings(self)
        if not all((self.model_name, *self.other_names)):
            raise BadRequestError("a model's name must not be empty")
        for name in ("register", "advertise"):
            if (url := getattr(self, name)) is not None:
                check_url(name, url)
        if self.kv_events is not None:
            read_endpoint(self.kv_events)
        if any(not key.isascii() or not key.isprintable() or not key.strip() for key in self.api_keys):
            raise BadRequestError("an API key must be printable ASCII characters, and not empty")


def _literal(pattern: str) -> str:
    """Of what means something in file names, only the `*` does here."""
    return pattern.replace("[", "[[]").replace("?", "[?]")


def traces_url(collector: str | None, environment: Mapping[str, str]) -> str | None:
    """Where traces are asked to be sent: to the collector that is given, else as OpenTelemetry's variables say."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if collector is None and environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    url = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") if collector is None else None
    base = collector or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not url and base:
        url = base.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
    if not url:
        return None
    try:
        parts = urlsplit(url)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        is_sound = False
    if not is_sound:
        raise BadRequestError(f"an OTLP endpoint looks like http://localhost:4318, not {collector or url!r}")
    return url
