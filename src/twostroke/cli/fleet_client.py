"""An address may be a server's or the router's of a fleet. A router knows nothing of engines and of requests that have
ended, so its workers are asked, each for itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from twostroke.cache import cache_folder
from twostroke.cli import server_client
from twostroke.cluster.keys import read_secret, router_key
from twostroke.cluster.role import Role
from twostroke.cluster.router_client import ROUTER_KEY_VARIABLE, RouterError, Worker
from twostroke.cluster.status import Told, ask_each, workers_of
from twostroke.core.errors import BadRequestError

UNKNOWN_PATH = (404, 405)
NO_KEY = (401, 403)
NOT_REMEMBERED = "request_not_found"
"""A server's own word: no router says it."""


def ask(url: str, path: str, api_key: str | None) -> list[Told]:
    """What the server at `url` says, or what each worker of the router there does. Raises what a server alone would
    raise where it is no router."""
    base = server_client.base_of(url)
    try:
        content = server_client.get_json(base, path, api_key)
    except server_client.AnsweredError as error:
        if error.status not in UNKNOWN_PATH or error.code == NOT_REMEMBERED:
            raise
        workers = _workers_behind(base, error)
        return ask_each(workers, path, server_client.key_of(api_key))
    return [Told(Worker(base, None, Role.BOTH, None), content)]


def _workers_behind(base: str, refusal: server_client.AnsweredError) -> list[Worker]:
    """Raises `refusal` where no router is."""
    try:
        workers = workers_of(base, key_of_router(base))
    except RouterError as error:
        if error.status not in NO_KEY:
            raise refusal from None
        message = f"a router is at {base}, and it tells its workers to none without its key: set {ROUTER_KEY_VARIABLE}"
        raise BadRequestError(message) from None
    if not workers:
        raise BadRequestError(f"the router at {base} has no worker")
    return workers


def key_of_router(url: str) -> str | None:
    """Of the environment, else of the fleet that runs here behind that address; None: it needs none, or has one that is
    not known here."""
    given = os.environ.get(ROUTER_KEY_VARIABLE)
    if given is not None:
        return given
    for folder, state in running_fleets():
        if state["url"] == url.rstrip("/"):
            return router_key(read_secret(folder / "key"))
    return None


def fleets_folder() -> Path:
    return cache_folder() / "fleets"


def running_fleets() -> list[tuple[Path, dict[str, Any]]]:
    """On this machine, of this user; the latest first."""
    found = []
    for path in fleets_folder().glob("*/fleet.json"):
        try:
            state = json.loads(path.read_text())
            os.kill(int(state["pid"]), 0)
            found.append((path.stat().st_mtime, path.parent, state))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # one that was killed, or is just being written
    return [(folder, state) for _, folder, state in sorted(found, key=lambda one: one[0], reverse=True)]
