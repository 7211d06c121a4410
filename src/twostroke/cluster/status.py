"""Who is in a fleet and what each does: its router's list of workers, and what each worker says when it is asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from twostroke.cluster.role import Role
from twostroke.cluster.router_client import RouterClient, Worker
from twostroke.cluster.standing_in import stands_in

TIMEOUT_S = 5.0
MAX_BYTES = 32 * 2**20
AT_ONCE = 16

_open = build_opener(ProxyHandler({})).open


@dataclass(frozen=True, slots=True)
class Told:
    """What one worker answered."""

    worker: Worker
    content: dict[str, Any] | None
    """None: nothing that can be read."""
    trouble: str | None = None
    status: int | None = None
    """Of an answer that is an error."""


@dataclass(frozen=True, slots=True)
class Seen:
    worker: Worker
    load: dict[str, Any] | None
    """Of `/v1/loads`; None: not to be had."""
    role: str
    """As the worker says, else as the router does."""
    trouble: str | None = None


def workers_of(router_url: str, router_key: str | None) -> list[Worker]:
    """Those that read, then those that write: a router lists them in another order each time. Raises RouterError where
    the router does not answer."""
    found = [one for one in RouterClient(router_url, router_key).workers() if not stands_in(one)]
    return sorted(found, key=lambda worker: (worker.role is not Role.PREFILL, worker.url))


def ask_each(workers: Sequence[Worker], path: str, api_key: str | None) -> list[Told]:
    """In the order of `workers`. One that does not answer keeps nobody from being heard."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda worker: _ask(worker, path, api_key), workers))


def look(router_url: str, router_key: str | None, api_key: str | None) -> list[Seen]:
    """Raises RouterError where the router does not answer."""
    return list(map(_seen, ask_each(workers_of(router_url, router_key), "/v1/loads", api_key)))


def _seen(told: Told) -> Seen:
    worker = told.worker
    if told.content is None:
        return Seen(worker, None, worker.role.value, told.trouble)
    try:
        return Seen(worker, told.content["loads"][0], str(told.content.get("role", worker.role)))
    except (KeyError, IndexError, TypeError):
        return Seen(worker, None, worker.role.value, "does not answer")


def _ask(worker: Worker, path: str, api_key: str | None) -> Told:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with _open(Request(worker.url.rstrip("/") + path, headers=headers), timeout=TIMEOUT_S) as response:
            content = json.loads(response.read(MAX_BYTES))
    except HTTPError as error:
        return Told(worker, None, f"answers {error.code}", error.code)
    except (OSError, ValueError):
        return Told(worker, None, "does not answer")
    return Told(worker, content) if isinstance(content, dict) else Told(worker, None, "does not answer")
