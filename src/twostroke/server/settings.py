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
        "Answers (prompts times n) one API key may have in flight; default: half of all, of several keys.",
    )
    max_tokens_per_key: int | None = integer(
        None,
        1,
        None,
        KEYS,
        "Tokens that those may come to, prompts and max_tokens; default: half of all, of several keys.",
    )
    max_samples_in_flight: int | None = integer(
        None, 1, None, LIMITS, "Answers in flight in all; default: twice as many as may run and wait."
    )
    max_tokens_in_flight: int | None = integer(
        None,
        1,
        None,
        LIMITS,
        "Tokens that those may come to; default: the longest context for all that may run and wait.",
    )
    max_samples: int = integer(16, 1, None, LIMITS, "The largest n of a request.")
    max_prompts: int = integer(256, 1)
    """Of a request, and of them times `n`."""
    max_output_tokens: int | None = integer(None, 1, None, LIMITS, "The most that a request may ask for.")
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
        False, KEYS, "Let API keys share cached prefixes: a key can then tell by its times what another has asked."
    )
    cors_origins: tuple[str, ...] = several(
        "texts", LISTENING, "An origin whose pages may call this server; may be given several times.", flag="--cors"
    )
    allowed_hosts: tuple[str, ...] = several(
        "texts",
        LISTENING,
        "A name that requests may be sent to, beside this machine's own, as a proxy in front may pass it on; may be "
        "given several times; '*': any. Names are checked where this is given, and where no key is asked for and "
        "only this machine is let in.",
        flag="--allowed-host",
        metavar="NAME",
    )
    access_log: bool = switch(False, LISTENING, "A line a request on standard error.")
    vllm_metrics: bool = switch(
        True, LISTENING, "Have /metrics under vLLM's names too, which gateways and autoscalers scrape."
    )
    drain_s: float = number(
        30.0,
        0.0,
        inf,
        TIMES,
        "Seconds that answers may take to end after Ctrl-C or SIGTERM; inf: as long as they do.",
        flag="--drain",
    )
    engine_timeout_s: float = number(
        30.0,
        1.0,
        inf,
        TIMES,
        "Seconds without a sign of life, beyond what its steps should take, after which the engine is ended and "
        "started again; inf: never.",
        flag="--engine-timeout",
    )
    limits: Limits = field(default_factory=Limits)
    tool_parser: str = text(
        "auto",
        ANSWERS,
        "How the model writes tool calls: deepseek-v3, deepseek-v31, function-gemma, gemma4, glm45, glm47, granite, "
        "harmony, hermes, hunyuan, hunyuan-list, hunyuan3, kimi-k2, lfm2, llama3, llama4, minimax, mistral, "
        "mistral-args, nemotron, olmo3, phi4, pythonic, qwen3-coder, seed-oss; auto: as its template does.",
        other_flag="--tool-call-parser",
    )
    reasoning_parser: str = text(
        "auto",
        ANSWERS,
        "think: split <think>...</think> from answers; think-answer, think-response: so, and take <answer> or "
        "<response> off what follows; mistral: [THINK]; seed: <seed:think>; granite: Granite 3.2's sentences; channel: "
        "Gemma 4's thoughts; harmony: gpt-oss's channels; none; auto: as the model knows it.",
    )
    page: str | None = choice(
        None,
        ("off", "view", "full"),
        PAGE,
        "The page at /, which shows every step as it happens. view: it shows; full: it also chats, and pauses an "
        "engine that nobody else uses. Default: full where only this machine is let in, else off.",
    )
    record: str | None = text(
        None,
        PAGE,
        "Keep what the page is told (names, lengths and times, no text) in this file, for `twostroke replay`.",
        metavar="FILE",
    )
    role: str | None = choice(
        None,
        ("prefill", "decode", "both"),
        FLEET,
        "What this server does in a fleet: prefill reads prompts for others, decode writes answers to them, both does "
        "either. Default: it is of no fleet.",
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
        "Where others take this server's KV: an address of this machine that they reach.",
        metavar="HOST",
    )
    hand_over: str = choice(
        "worth",
        ("worth", "all"),
        FLEET,
        "Which prompts are read for other servers: those that are worth it, or all. The rest is left to whoever writes "
        "the answer: short prompts, and what is sooner read there.",
    )
    peers: tuple[str, ...] = several(
        "texts",
        FLEET,
        "A machine that KV may be taken from, beside this one, as its --transfer-host says; may be given several "
        "times.",
        flag="--peer",
        metavar="HOST",
    )
    router_hosts: tuple[str, ...] = several(
        "texts",
        FLEET,
        "An address (10.0.0.1) or a network (10.0.0.0/24) that routers ask from to have a prompt read for another "
        "server, beside this machine; may be given several times. Default: whoever reaches this server may ask.",
        flag="--router-host",
        metavar="HOST",
    )
    fleet_key: bytes = field(default=b"", repr=False)
    """What the servers of a fleet sign with."""
    register: str | None = text(
        None,
        FLEET,
        "The address of a router (smg) that this server adds itself to once it is ready, again whenever the router was "
        "started anew, and that it leaves before it stops. Its key, if it asks for one: TWOSTROKE_ROUTER_KEY.",
        metavar="URL",
    )
    advertise: str | None = text(
        None,
        FLEET,
        "The address that the router reaches this server by; default: where it listens, which has to be no wildcard.",
        metavar="URL",
    )
    kv_events: str | None = text(
        None,
        FLEET,
        "Tell which prefixes are cached, as vLLM does over ZeroMQ: a port of this machine (5557), HOST:PORT, or "
        "tcp://*:5557 for all of its addresses; what was missed is asked for one port further. Prompts are in there, "
        "as token ids: for private networks only.",
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
