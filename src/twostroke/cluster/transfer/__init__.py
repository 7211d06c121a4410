"""Transports by name. A transport's module is imported only when it is asked about. A new one adds one line here and a
file with `TRANSPORT`, its class, and `missing`, which says why it cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from twostroke.cluster.transfer.interface import Place, Slots, TransferConfig, Transport
from twostroke.core.errors import BadRequestError

TRANSPORTS: dict[str, str] = {
    "nixl": "twostroke.cluster.transfer.nixl",
    "sockets": "twostroke.cluster.transfer.sockets",
}
"""Name to module, the fastest first: `auto` takes the first that can be used."""


def choose(name: str) -> tuple[str, str]:
    """The transport for `name`, which may be "auto", and why, in words. Raises BadRequestError."""
    if name != "auto" and name not in TRANSPORTS:
        raise BadRequestError(f"there is no transport {name!r}; the transports are: auto, {', '.join(TRANSPORTS)}")
    declined: list[str] = []
    for candidate in TRANSPORTS if name == "auto" else (name,):
        reason: str | None = import_module(TRANSPORTS[candidate]).missing()
        if reason is None:
            why = "as asked for" if name != "auto" else "the fastest that can be used here"
            return candidate, "; ".join([f"{candidate}, {why}", *declined])
        declined.append(f"not {candidate}: {reason}")
    raise BadRequestError(f"KV cannot go from engine to engine: {'; '.join(declined)}")


def open_transport(
    name: str,
    slots: Slots,
    places: Sequence[Place],
    key: bytes,
    *,
    engine_id: str,
    host: str = "127.0.0.1",
    port: int = 0,
    advertised_host: str | None = None,
) -> tuple[Transport, str]:
    """Open a transport by name or "auto"; with the choice in words. `places`: all that may ever be offered or
    filled. `key`: the fleet's. Raises BadRequestError for what cannot be."""
    chosen, why = choose(name)
    transport: Any = import_module(TRANSPORTS[chosen]).TRANSPORT
    opened: Transport = transport(TransferConfig(engine_id, key, host, port, advertised_host), slots, places)
    return opened, why
