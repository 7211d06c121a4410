"""A pool may be empty while there is nothing to do. A router without workers refuses requests, so somebody has to be at
the door: an address that stands in the router's list for each empty pool. It takes requests, asks for a replica, and
passes each on once there is one. What it holds is all that ever passes through it: when a worker is there, the router
asks that one itself."""

from __future__ import annotations

import json
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from twostroke.cluster.role import DOOR, Role
from twostroke.cluster.router_client import CONFLICT, RouterClient, RouterError, Worker
from twostroke.cluster.standing_in import stands_in

LOOK_S = 1.0
HOLD_S = 900.0
"""A request waits so long for a replica at most."""
MOST_HELD = 256
MAX_BODY_BYTES = 64 * 2**20
CHUNK_BYTES = 64 * 2**10
ANSWER_S = 5.0
GONE = (502, 503)
"""Of a worker that is just leaving, or not quite there: another is waited for."""
OWN_HEADERS = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host", "te", "upgrade"})
"""Of one connection: they are not passed on."""

_open = build_opener(ProxyHandler({})).open


class Door:
    def __init__(
        self,
        router: RouterClient,
        host: str,
        roles: Sequence[Role],
        wake: Callable[[Role], None],
        *,
        look_s: float = LOOK_S,
        hold_s: float = HOLD_S,
    ) -> None:
        """`roles`: of pools that may be empty; `wake`: asks for a replica of one, each time it is missed."""
        self._router, self._roles, self._wake = router, tuple(roles), wake
        self._look_s, self.hold_s = look_s, hold_s
        self._changed = threading.Condition()
        self._workers: dict[Role, list[Worker]] = {}
        self._held: Counter[Role] = Counter()
        self.models: dict[str, Any] | None = None
        """As a worker tells them; None: there was none yet."""
        self._server = _Server((host, 0), self)
        self.url = f"http://{host}:{self._server.server_address[1]}{DOOR}"
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"door-{name}", daemon=True)
            for name, target in (("serve", self._server.serve_forever), ("look", self._look_on))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Whoever waits is told that nobody comes."""
        self._is_over.set()
        with self._changed:
            self._changed.notify_all()
        self._server.shutdown()
        for thread in self._threads:
            thread.join()
        with suppress(RouterError):
            for worker in self._router.workers():
                if worker.url.startswith(self.url) and worker.worker_id is not None:
                    self._router.remove(worker.worker_id)
        self._server.server_close()

    @property
    def num_held(self) -> int:
        return sum(self._held.values())

    @contextmanager
    def holding(self, role: Role) -> Iterator[bool]:
        """Yields whether there is room for one more."""
        with self._changed:
            has_room = self.num_held < MOST_HELD
            self._held[role] += has_room
        try:
            yield has_room
        finally:
            with self._changed:
                self._held[role] -= has_room

    def wait_for(self, role: Role, seconds: float) -> Worker | None:
        """Whom to pass a request on to, the least busy; None: nobody was there within that time."""
        with self._changed:
            self._changed.wait_for(lambda: self._workers.get(role) or self._is_over.is_set(), seconds)
            found = self._workers.get(role, [])
        return None if self._is_over.is_set() else min(found, key=lambda worker: worker.load or 0, default=None)

    def is_over(self) -> bool:
        return self._is_over.is_set()

    def _look_on(self) -> None:
        while not self._is_over.wait(self._look_s):
            with suppress(RouterError):  # it is looked for again and again
                self._look()

    def _look(self) -> None:
        listed = [one for one in self._router.workers() if not one.is_leaving]
        others = [one for one in listed if one.is_healthy is not False and not one.url.startswith(self.url)]
        real = [one for one in others if not stands_in(one)]
        with self._changed:
            self._workers = {
                role: [one for one in real if one.role is role] or [one for one in others if one.role is role]
                for role in Role
            }
            self._changed.notify_all()
        if self.models is None and real:
            self.models = _models_of(real[0])
        has_work = self.num_held > 0 or any(one.load for one in real)
        for role in self._roles:
            self._stand(role, listed, is_wanted=not self._workers[role])
            if has_work and not any(one.role is role for one in real):
                self._wake(role)

    def _stand(self, role: Role, listed: Sequence[Worker], *, is_wanted: bool) -> None:
        """In the router's list, or not."""
        url = f"{self.url}/{role.value}"
        own = next((one for one in listed if one.url.rstrip("/") == url), None)
        if is_wanted and own is None and self.models is not None:
            try:
                self._router.add(url, role)
            except RouterError as error:
                if error.status != CONFLICT:
                    raise
        elif not is_wanted and own is not None and own.worker_id is not None:
            self._router.remove(own.worker_id)


def _models_of(worker: Worker) -> dict[str, Any] | None:
    try:
        with _open(f"{worker.url.rstrip('/')}/v1/models", timeout=ANSWER_S) as answer:
            found = json.loads(answer.read(MAX_BODY_BYTES))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MOST_HELD

    def __init__(self, address: tuple[str, int], door: Door) -> None:
        self.door = door
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: the router and the workers have logs."""

    def do_GET(self) -> None:
        role, path = self._asked()
        answers: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/v1/models": self.server.door.models,
            "/v1/loads": {"role": role, "dp_rank_count": 1, "loads": [{"dp_rank": 0, "num_running_reqs": 0}]},
        }
        found = answers.get(path.partition("?")[0])
        self._answer(404 if found is None else 200, found or _error("this is a door: there is nothing of the kind"))

    def do_POST(self) -> None:
        role, path = self._asked()
        length = self.headers.get("Content-Length", "")
        if role is None or not length.isdigit() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            self._answer(400, _error("a request has the length of its body, and the pool that it is for"))
            return
        body, door = self.rfile.read(int(length)), self.server.door
        with door.holding(role) as has_room:
            if not has_room:
                self._answer(503, _error(f"{MOST_HELD} requests wait for a first replica, which is the most"))
                return
            self._pass_on(Role(role), path, body)

    def _asked(self) -> tuple[Role | None, str]:
        """The pool, and the path at its workers."""
        name, _, path = self.path.removeprefix(f"{DOOR}/").partition("/")
        return (Role(name) if name in list(Role) else None), f"/{path}"

    def _pass_on(self, role: Role, path: str, body: bytes) -> None:
        door, until_s = self.server.door, time.monotonic() + self.server.door.hold_s
        while (left_s := until_s - time.monotonic()) > 0.0 and not door.is_over():
            if self._has_left():
                self.close_connection = True
                return
            worker = door.wait_for(role, min(left_s, LOOK_S))
            if worker is None:
                continue
            answer = _ask(worker, path, self.headers, body, door.hold_s)
            if answer is None or answer.status in GONE:
                time.sleep(LOOK_S / 10)
                continue
            self._relay(answer)
            return
        self._answer(503, _error(f"no worker was there within {door.hold_s:g} s"))

    def _has_left(self) -> bool:
        """Whoever asked: its end of the connection is closed."""
        if not select.select([self.connection], [], [], 0.0)[0]:
            return False
        with suppress(OSError):
            return not self.connection.recv(1, 2)  # MSG_PEEK
        return True

    def _relay(self, answer: HTTPResponse) -> None:
        """As it comes. A worker that dies meanwhile breaks this connection too, which the router tells the client."""
        try:
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in OWN_HEADERS | {"date", "server"}:
                    self.send_header(name, value)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while chunk := answer.read1(CHUNK_BYTES):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            self.wfile.write(b"0\r\n\r\n")
        except (OSError, HTTPException):
            self.close_connection = True
        finally:
            answer.close()

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if status == 503:
                self.send_header("Retry-After", "10")
            self.end_headers()
            self.wfile.write(data)


def _ask(worker: Worker, path: str, headers: Any, body: bytes, timeout_s: float) -> HTTPResponse | None:
    """None: nobody is there. The answer closes its connection with itself."""
    parts = urlsplit(worker.url)
    connection = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout_s)
    passed_on = {name: value for name, value in headers.items() if name.lower() not in OWN_HEADERS}
    try:
        connection.request("POST", parts.path.rstrip("/") + path, body, passed_on | {"Connection": "close"})
        return connection.getresponse()
    except (OSError, HTTPException):
        connection.close()
        return None


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "server_error", "code": None}}
