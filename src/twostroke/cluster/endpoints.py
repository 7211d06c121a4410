"""Addresses as users write them: of routers and servers, and where KV events are published. Opens none."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from twostroke.core.errors import BadRequestError

LOOPBACK = "127.0.0.1"
WILDCARDS = ("0.0.0.0", "::", "[::]", "*", "")
"""Hosts that stand for all of a machine's addresses: one can listen there, and reach nothing."""
HIGHEST_PORT = 65535


def check_url(name: str, url: str) -> None:
    """Raises BadRequestError unless this is `http(s)://HOST[:PORT]`."""
    try:
        parts = urlsplit(url)
        is_sound = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.hostname not in WILDCARDS
            and parts.port != 0
            and parts.username is None
            and parts.path in ("", "/")
            and not (parts.query or parts.fragment)
        )
    except ValueError:  # a port that is none
        is_sound = False
    if not is_sound:
        raise BadRequestError(f"{name} must be an address like http://10.0.0.7:8000, not {url!r:.200}")


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """Where KV events are published, and where those that were missed are asked for; as ZeroMQ names them."""

    events: str
    replay: str


def read_endpoint(text: str) -> EventEndpoints:
    """A port, HOST:PORT, tcp://HOST:PORT or ipc://PATH. A port alone is this machine's own; 0 takes free ports."""
    if text.startswith("ipc://") and len(text) > len("ipc://"):
        return EventEndpoints(text, f"{text}.replay")
    match = re.fullmatch(r"(?:tcp://)?(?:(\[[0-9A-Fa-f:]+\]|[\w.*-]+)?:)?(\d{1,5})", text)
    if match is None or not 0 <= int(match[2]) < HIGHEST_PORT:  # one further is needed, too
        raise BadRequestError(
            f"kv_events must be a port, HOST:PORT, tcp://HOST:PORT or ipc://PATH, with a port below {HIGHEST_PORT}, "
            f"not {text!r:.200}"
        )
    host, port = match[1] or LOOPBACK, int(match[2])
    return EventEndpoints(f"tcp://{host}:{port}", f"tcp://{host}:{port + 1 if port else 0}")
