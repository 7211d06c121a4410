"""A server's place at a real smg: it is added, added again when smg was killed and started anew, and taken out before
it drains. A router that is away is no reason not to serve."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("smg")

from tests.cluster.routing import running_smg, until
from tests.server.running import CLIENT, running_server
from tests.server.scripted_model import make_scripted
from twostroke.cluster.fleet import free_port
from twostroke.cluster.role import Role
from twostroke.cluster.router_client import ROUTER_KEY_VARIABLE, RouterClient, RouterError
from twostroke.core.errors import BadRequestError
from twostroke.server.joining import registration_of
from twostroke.server.settings import ServerSettings

ROUTER_KEY = "between-router-and-workers"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    path = make_scripted(tmp_path_factory.mktemp("scripted") / "model", "hermes")
    return str(path), "--backend", "reference", "--name", "scripted"


@pytest.mark.fleet
def test_it_joins_joins_again_and_leaves(model: tuple[str, ...], tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "smg.log"
    url = f"http://127.0.0.1:{port}"
    client = RouterClient(url, ROUTER_KEY)
    options = (*model, "--register", url)
    with running_server(tmp_path / "log", *options, **{ROUTER_KEY_VARIABLE: ROUTER_KEY}) as server:
        server.wait_until(lambda: "not registered: no router answers" in server.log())
        assert server.get("/health").status_code == 200
        with running_smg(log, port, ROUTER_KEY):
            until(lambda: [worker.url for worker in client.workers()] == [server.address], said=server.log)
            [worker] = client.workers()
            assert worker.role is Role.BOTH and worker.worker_id and worker.model == "scripted"
            server.wait_until(lambda: server.log().count("registered with the router") == 1)
            with pytest.raises(RouterError) as refused:
                RouterClient(url, "another").workers()
            assert refused.value.status in (401, 403)
            question = {"model": "scripted", "messages": [{"role": "user", "content": "?"}], "max_tokens": 4}
            answer = CLIENT.post(f"{url}/v1/chat/completions", json=question)
            assert answer.status_code == 200 and answer.json()["choices"], answer.text
        with running_smg(log, port, ROUTER_KEY):  # killed, and started anew: it knows nobody
            until(lambda: [worker.url for worker in client.workers()] == [server.address], said=server.log)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
            said = server.log()
            assert said.index("taken out of the router") < said.index("stopping: "), "before it drains"
            assert all(worker.is_leaving for worker in client.workers()), "it is sent nothing more"
            until(lambda: client.workers() == [])
    assert server.log().count("not registered") <= 4, "each trouble is said once"


class Refusing(BaseHTTPRequestHandler):
    """A router that lists nobody and takes nobody."""

    asked: list[tuple[str, Any]]

    def do_GET(self) -> None:
        self._answer(200, {"workers": []})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.headers.get("Authorization", ""), body))
        self._answer(500, {"error": "no"})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    asked: list[tuple[str, Any]] = []
    handler = type("Handler", (Refusing,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as router:
        threading.Thread(target=router.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{router.server_address[1]}", asked
        router.shutdown()


def test_what_a_worker_says_of_itself(refusing: tuple[str, list[tuple[str, Any]]]) -> None:
    url, asked = refusing
    client = RouterClient(url, "secret")
    for role in Role:
        with pytest.raises(RouterError, match="answers POST /workers with 500"):
            client.add("http://10.0.0.7:8000", role, None if role is Role.BOTH else "sk-1")
    keys, (prefill, decode, both) = {key for key, _ in asked}, [body for _, body in asked]
    assert keys == {"Bearer secret"}
    assert both == {"url": "http://10.0.0.7:8000", "worker_type": "regular"}
    nixl = {"url": "http://10.0.0.7:8000", "kv_connector": "NixlConnector", "api_key": "sk-1"}
    assert prefill == {**nixl, "worker_type": "prefill"} and decode == {**nixl, "worker_type": "decode"}


def test_a_wildcard_is_no_address() -> None:
    settings = ServerSettings("m", host="0.0.0.0", register="http://10.0.0.1:8000")
    with pytest.raises(BadRequestError, match="--register needs --advertise URL"):
        registration_of(settings, "http://0.0.0.0:8000")
    named = ServerSettings("m", host="0.0.0.0", register="http://10.0.0.1:8000", advertise="http://10.0.0.7:8000")
    assert registration_of(named, "http://0.0.0.0:8000") is not None
    assert registration_of(ServerSettings("m"), "http://0.0.0.0:8000") is None


@pytest.mark.parametrize("url", ["10.0.0.1:8000", "ftp://a", "http://", "http://a/b", "http://0.0.0.0:1", "http://a:x"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(BadRequestError, match="register must be an address like"):
        ServerSettings("m", register=url)


def test_a_router_that_may_look_lets_nobody_in(model: tuple[str, ...], tmp_path: Path) -> None:
    """smg sends the key that it was given with requests that came without one: it must open nothing."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running_smg(tmp_path / "smg.log", port):
        options = (*model, "--register", url)
        with running_server(tmp_path / "log", *options, TWOSTROKE_API_KEYS="sk-client") as server:
            until(lambda: any(worker.is_healthy for worker in RouterClient(url).workers()), said=server.log)
            question = {"model": "scripted", "messages": [{"role": "user", "content": "?"}], "max_tokens": 4}
            for key, status in ((None, 401), ("sk-client", 200), ("sk-other", 401)):
                headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                answer = CLIENT.post(f"{url}/v1/chat/completions", json=question, headers=headers)
                assert answer.status_code == status, (key, answer.text)
            [load] = CLIENT.get(f"{url}/get_loads").json()["loads"]
            assert load["max_total_num_tokens"] > 0, "it was let look at the load"
