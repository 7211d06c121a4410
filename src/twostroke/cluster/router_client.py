"""What is asked of a router over HTTP: who its workers are, that one more is taken in, that one is let go. smg's API;
vllm-router's is read only. The standard library alone; every call blocks, within a limit."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from twostroke.cluster.role import KV_CONNECTOR, Role
from twostroke.core.errors import BackendError

TIMEOUT_S = 5.0
MAX_BYTES = 16 * 2**20
CONFLICT = 409
"""The router is at it: it was asked before."""
ROUTER_KEY_VARIABLE = "TWOSTROKE_ROUTER_KEY"
"""What a router's worker API asks for, if it does: never an argument, which every user of a machine can read."""

_open = build_opener(ProxyHandler({})).open  # a fleet's own addresses are reached directly, whatever proxy is set


class RouterError(BackendError):
    """A router that does not answer, or answers with an error."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """None: it did not answer."""


@dataclass(frozen=True, slots=True)
class Worker:
    """As its router knows it."""

    url: str
    worker_id: str | None
    """None: the router has none."""
    role: Role
    is_healthy: bool | None
    """None: not said."""
    is_leaving: bool = False
    """It is sent nothing more, and will be gone from the list soon."""
    model: str | None = None
    load: int | None = None
    """Requests that the router has sent it, and that are not answered."""


class RouterClient:
    def __init__(self, url: str, key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._timeout_s = timeout_s

    def workers(self) -> list[Worker]:
        try:
            answer = self._call("GET", "/workers")
        except RouterError as error:
            if error.status != 404:
                raise
            answer = self._call("GET", "/list_workers")  # vllm-router
        try:
            if "workers" in answer:
                return [_worker(entry) for entry in answer["workers"]]
            return [Worker(url, None, Role.BOTH, None) for url in answer["urls"]]
        except (KeyError, TypeError, ValueError) as error:
            raise RouterError(f"what answers at {self.url} is no router: {error!r:.200}") from None

    def add(self, url: str, role: Role, api_key: str | None = None) -> str | None:
        """Returns the worker's id. The router looks at the worker before it sends it anything."""
        spec: dict[str, Any] = {"url": url, "worker_type": role.worker_type}
        if role is not Role.BOTH:
            spec["kv_connector"] = KV_CONNECTOR
        if api_key is not None:
            spec["api_key"] = api_key
        found = self._call("POST", "/workers", spec).get("worker_id")
        return found if isinstance(found, str) else None

    def remove(self, worker_id: str) -> None:
        """One that is not there is no error."""
        try:
            self._call("DELETE", f"/workers/{quote(worker_id, safe='')}")
        except RouterError as error:
            if error.status != 404:
                raise

    def addresses(self) -> frozenset[str]:
        """Of the router's machine, as its name has them now; none, where nobody knows the name."""
        try:
            found = socket.getaddrinfo(urlsplit(self.url).hostname, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return frozenset()
        return frozenset(str(entry[4][0]).partition("%")[0] for entry in found)

    def is_up(self) -> bool:
        try:
            self._call("GET", "/health")
        except RouterError as error:
            return error.status is not None
        return True

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Accept": "application/json"} | ({} if body is None else {"Content-Type": "application/json"})
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, headers, method=method)
        try:
            with _open(request, timeout=self._timeout_s) as response:
                text = response.read(MAX_BYTES)
        except HTTPError as error:
            said = error.read(300).decode(errors="replace").strip()
            message = f"the router at {self.url} answers {method} {path} with {error.code}: {said}"
            raise RouterError(message, error.code) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise RouterError(f"no router answers at {self.url}: {reason}") from None
        try:
            answer = json.loads(text)
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}


def _worker(entry: dict[str, Any]) -> Worker:
    kind = entry.get("worker_type", "regular")
    return Worker(
        url=str(entry["url"]),
        worker_id=entry.get("id"),
        role=Role(kind) if kind in (Role.PREFILL, Role.DECODE) else Role.BOTH,
        is_healthy=entry.get("is_healthy"),
        is_leaving=entry.get("status") == "draining",
        model=entry.get("model_id"),
        load=entry.get("load"),
    )
