"""Who is in a fleet and what each one does: its router's list of workers, and what each worker says of its load."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from twostroke.cluster.router_client import RouterClient, Worker
from twostroke.cluster.standing_in import stands_in

TIMEOUT_S = 5.0
MAX_BYTES = 2**20
AT_ONCE = 16

_open = build_opener(ProxyHandler({})).open


@dataclass(frozen=True, slots=True)
class Seen:
    worker: Worker
    load: dict[str, Any] | None
    """Of `/v1/loads`; None: not to be had."""
    role: str
    """As the worker says, else as the router does."""
    trouble: str | None = None


def look(router_url: str, router_key: str | None, api_key: str | None) -> list[Seen]:
    """Raises RouterError where the router does not answer."""
    workers = [one for one in RouterClient(router_url, router_key).workers() if not stands_in(one)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda worker: _look_at(worker, api_key), workers))


def _look_at(worker: Worker, api_key: str | None) -> Seen:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with _open(Request(worker.url.rstrip("/") + "/v1/loads", headers=headers), timeout=TIMEOUT_S) as response:
            answer = json.loads(response.read(MAX_BYTES))
        return Seen(worker, answer["loads"][0], str(answer.get("role", worker.role)))
    except HTTPError as error:
        return Seen(worker, None, worker.role.value, f"answers {error.code}")
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return Seen(worker, None, worker.role.value, "does not answer")
