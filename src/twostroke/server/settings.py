"""What whoever runs a server may choose, frozen, with the limits that each request is held to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from twostroke.core.errors import BadRequestError


@dataclass(frozen=True, slots=True)
class Limits:
    max_body_bytes: int = 8 * 2**20
    max_bodies_bytes: int = 512 * 2**20
    """Of all requests in flight together; what would be more is answered with 503."""
    body_timeout_s: float = 30.0
    """A request's body has to be there within this."""
    request_timeout_s: float = 600.0
    """From a request's arrival to the last byte of its answer."""
    reader_timeout_s: float = 30.0
    """A client that takes nothing of a stream for this long, while there is more than fits on the way, is cut off."""
    headers_timeout_s: float = 10.0
    """A request's headers have to be there within this, from its first byte or its connection's beginning."""
    max_connections: int = 900
    """One more is turned away with 503. A process may often open no more than 1024 files."""
    max_queue: int = 256
    """Requests that are made ready or wait for the engine; one more is answered with 429."""
    max_per_key: int | None = None
    """Requests that one API key may have in flight; None: no limit."""
    max_samples_in_flight: int | None = None
    max_tokens_in_flight: int | None = None
    max_samples_per_key: int | None = None
    max_tokens_per_key: int | None = None
    """None: as suits the engine, see `quotas.py`."""
    max_samples: int = 16
    """`n`, and `n` times the number of prompts is at most `max_prompts`."""
    max_prompts: int = 256
    max_output_tokens: int | None = None
    """What a request may ask for as max_tokens; None: as much as the context holds."""
    max_stop_strings: int = 16
    max_stop_chars: int = 1024
    max_logit_bias: int = 1024
    max_messages: int = 4096
    max_stored_responses: int = 1024
    """Of `/v1/responses`, of all keys together; 0: none is kept."""
    max_stored_bytes: int = 64 * 2**20


@dataclass(frozen=True, slots=True)
class ServerSettings:
    model_name: str
    """What requests call the model, and what answers say."""
    other_names: tuple[str, ...] = ()
    """Further names that requests may give the model; a `*` in one stands for any text."""
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    """Empty: no key is asked for."""
    share_prefixes: bool = False
    """Whether a key may find what another has cached, and so learn by the time it takes what that one has asked."""
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may be sent to, beside this machine's own; `*`: any. On a loopback address without keys they
    are checked even where none is given."""
    access_log: bool = False
    drain_s: float = 30.0
    """How long requests in flight may take to end once the server was told to stop; infinite: as long as they do."""
    engine_timeout_s: float = 30.0
    """An engine that gives no sign of life for this long, and longer than its steps explain, is started again."""
    limits: Limits = field(default_factory=Limits)
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    traces_url: str | None = None
    """Where OpenTelemetry traces are sent; None: there are none."""

    @property
    def listed_names(self) -> list[str]:
        return [self.model_name, *(name for name in self.other_names if "*" not in name)]

    def knows_model(self, name: str) -> bool:
        return name == self.model_name or any(fnmatchcase(name, _literal(other)) for other in self.other_names)

    def __post_init__(self) -> None:
        if not all((self.model_name, *self.other_names)):
            raise BadRequestError("a model's name must not be empty")
        if not 0 <= self.port <= 65535:
            raise BadRequestError(f"the port must be from 0 to 65535, not {self.port}")
        if any(not key.isascii() or not key.isprintable() or not key.strip() for key in self.api_keys):
            raise BadRequestError("an API key must be printable ASCII characters, and not empty")
        sizes: tuple[str, ...] = ("max_body_bytes", "max_bodies_bytes", "max_connections", "max_queue", "max_per_key")
        sizes += ("max_samples_in_flight", "max_tokens_in_flight", "max_samples_per_key", "max_tokens_per_key")
        for name in (*sizes, "max_samples", "max_prompts", "max_output_tokens"):
            value = getattr(self.limits, name)
            if value is not None and value < 1:
                raise BadRequestError(f"{name} must be at least 1, not {value}")
        if self.limits.max_stored_responses < 0:
            raise BadRequestError(f"max_stored_responses must be 0 or more, not {self.limits.max_stored_responses}")
        for name in ("request", "headers", "body", "reader"):
            timeout_s = getattr(self.limits, f"{name}_timeout_s")
            if not timeout_s > 0:
                raise BadRequestError(f"the {name} timeout must be above 0 s, not {timeout_s:g}")
        if not self.engine_timeout_s >= 1:
            raise BadRequestError(f"the engine timeout must be 1 s or more, not {self.engine_timeout_s:g}")
        if not self.drain_s >= 0:
            raise BadRequestError(f"the drain time must be 0 s or more, not {self.drain_s:g}")


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
