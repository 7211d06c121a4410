"""Requests to a pool that is empty: they are held at the door until a worker is there, and none is lost."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cluster.routing import running_smg, until
from tests.server.running import CLIENT, RunningServer, running_server
from tests.server.scripted_model import make_scripted
from twostroke.cluster import door as door_module
from twostroke.cluster.door import Door
from twostroke.cluster.fleet import free_port
from twostroke.cluster.role import DOOR, Role
from twostroke.cluster.router_client import ROUTER_KEY_VARIABLE, RouterClient, Worker

CHAT = "/v1/chat/completions"
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "?"}], "max_tokens": 4}


class Listed(RouterClient):
    """A router that is a list."""

    def __init__(self) -> None:
        super().__init__("http://10.0.0.1:8000")
        self.listed: list[Worker] = []

    def workers(self) -> list[Worker]:
        return list(self.listed)

    def add(self, url: str, role: Role, api_key: str | None = None) -> str | None:
        self.listed.append(Worker(url, url, role, True))
        return url

    def remove(self, worker_id: str) -> None:
        self.listed = [one for one in self.listed if one.worker_id != worker_id]


class Answering(BaseHTTPRequestHandler):
    """A worker: it says what it was asked, in pieces, and breaks off where it is told to."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._whole({"object": "list", "data": [{"id": "scripted"}]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/busy"):
            self.send_error(429)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("x-request-id", self.headers["x-request-id"] or "")
        self.end_headers()
        for piece in (self.path.encode(), b" ", body):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        if not self.path.endswith("/dies"):
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def _whole(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def answering() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def doors(router: RouterClient, *roles: Role, hold_s: float = 30.0) -> Iterator[tuple[Door, list[Role]]]:
    woken: list[Role] = []
    door = Door(router, "127.0.0.1", roles, woken.append, look_s=0.02, hold_s=hold_s)
    try:
        yield door, woken
    finally:
        door.close()


def ask(door: Door, role: Role, path: str = CHAT, body: Any = BODY) -> Any:
    return CLIENT.post(f"{door.url}/{role.value}{path}", json=body, headers={"x-request-id": "mine"})


def test_it_is_in_the_list_of_each_pool_that_is_empty_once_it_knows_the_model() -> None:
    router = Listed()
    with doors(router, Role.PREFILL, Role.DECODE) as (door, woken), answering() as worker:
        time.sleep(0.1)
        assert not router.listed, "a router asks it for its models, which nobody has told yet"
        router.add(worker, Role.DECODE)
        until(lambda: [one.url for one in router.listed] == [worker, f"{door.url}/prefill"])
        assert CLIENT.get(f"{door.url}/prefill/v1/models").json()["data"] == [{"id": "scripted"}]
        assert not woken, "nobody asked for anything"
        router.remove(worker)
        until(lambda: {one.role for one in router.listed} == {Role.PREFILL, Role.DECODE})
        router.add(worker, Role.PREFILL)
        until(lambda: [one.role for one in router.listed] == [Role.DECODE, Role.PREFILL])
    assert [one.url for one in router.listed] == [worker]


def test_what_came_to_an_empty_pool_is_passed_on_whole_and_wakes_all_that_it_needs() -> None:
    router = Listed()
    with (
        doors(router, Role.PREFILL, Role.DECODE) as (door, woken),
        answering() as worker,
        ThreadPoolExecutor(8) as pool,
    ):
        asked = [pool.submit(ask, door, Role.DECODE, f"/v1/{name}") for name in ("chat/completions", "dies", "busy")]
        until(lambda: door.num_held == 3 and set(woken) == {Role.PREFILL, Role.DECODE})
        router.add(worker, Role.DECODE)
        answer, busy = asked[0].result(10), asked[2].result(10)
        assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine"
        assert answer.text.startswith("/v1/chat/completions {") and json.loads(answer.text.partition(" ")[2]) == BODY
        assert busy.status_code == 429, "what a worker answers is passed on"
        assert isinstance(asked[1].exception(10), Exception), "an answer that breaks off does not look whole"
        until(lambda: door.num_held == 0)


def test_a_busy_pool_of_writers_wakes_one_that_reads() -> None:
    router = Listed()
    with doors(router, Role.PREFILL) as (_, woken), answering() as worker:
        router.listed.append(Worker(worker, "writes", Role.DECODE, True, load=0))
        time.sleep(0.1)
        assert not woken
        router.listed[0] = Worker(worker, "writes", Role.DECODE, True, load=2)
        until(lambda: woken and set(woken) == {Role.PREFILL})


def test_nobody_waits_for_ever_and_who_leaves_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "LOOK_S", 0.05)
    monkeypatch.setattr(door_module, "MOST_HELD", 2)
    with doors(Listed(), Role.BOTH, hold_s=1.0) as (door, _), ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, door, Role.BOTH) for _ in range(2)]
        until(lambda: door.num_held == 2)
        full = ask(door, Role.BOTH)
        assert full.status_code == 503 and "which is the most" in full.text and full.headers["retry-after"]
        for one in asked:
            assert one.result(10).status_code == 503 and "no worker was there within 1 s" in one.result().text
        until(lambda: door.num_held == 0)
        door.hold_s = 600.0
        leaves = http.client.HTTPConnection("127.0.0.1", urlsplit(door.url).port)
        leaves.request("POST", f"{DOOR}/both{CHAT}", b"{}")
        until(lambda: door.num_held == 1)
        leaves.close()
        until(lambda: door.num_held == 0, 10)
        wrong = CLIENT.post(f"{door.url}/nothing{CHAT}", json=BODY)
        assert wrong.status_code == 400 and CLIENT.get(f"{door.url}/both/v1/files").status_code == 404


@pytest.mark.fleet
def test_smg_without_a_worker_sends_them_to_the_door(tmp_path: Path) -> None:
    """A worker leaves, and another is started when somebody asks. What it answers is what the first one answered."""
    pytest.importorskip("smg")
    model = str(make_scripted(tmp_path / "model", "hermes")), "--backend", "reference", "--name", "scripted"
    port, key = free_port(), "between-router-and-workers"
    url = f"http://127.0.0.1:{port}"
    client, started = RouterClient(url, key), list[RunningServer]()
    with ExitStack() as stack, running_smg(tmp_path / "smg.log", port, key):
        is_wanted = threading.Event()

        def start(name: str) -> RunningServer:
            options = (*model, "--register", url)
            started.append(stack.enter_context(running_server(tmp_path / name, *options, **{ROUTER_KEY_VARIABLE: key})))
            return started[-1]

        door = Door(client, "127.0.0.1", [Role.BOTH], lambda _: is_wanted.set(), look_s=0.2)
        stack.callback(door.close)

        def urls() -> list[str]:
            return [one.url for one in client.workers() if not one.is_leaving]

        first = start("first")
        until(lambda: urls() == [first.address], said=first.log)
        expected = CLIENT.post(url + CHAT, json=BODY).json()["choices"]
        until(lambda: door.models is not None)
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(60) == 0
        until(lambda: urls() == [f"{door.url}/both"])
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(CLIENT.post, url + CHAT, json=BODY) for _ in range(3)]
            streamed = pool.submit(CLIENT.post, url + CHAT, json={**BODY, "stream": True})
            assert is_wanted.wait(30)
            second = start("second")
            for one in asked:
                assert one.result(60).status_code == 200, one.result().text
                assert one.result().json()["choices"] == expected
            assert "data: [DONE]" in streamed.result(60).text
        until(lambda: urls() == [second.address])
        assert CLIENT.post(url + CHAT, json=BODY).json()["choices"] == expected
