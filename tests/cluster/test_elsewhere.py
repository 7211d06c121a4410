"""A response is gone on from, shown and deleted at any server of a fleet, whoever wrote it; by the key that asked for
it alone. Where its server is gone, that is said."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai import OpenAI

from tests.cluster.routing import running_smg, until
from tests.server.running import RunningServer, running_server
from tests.server.scripted_model import make_scripted
from twostroke.cluster.fleet import free_port
from twostroke.cluster.role import Role
from twostroke.cluster.router_client import ROUTER_KEY_VARIABLE, RouterClient, RouterError, Worker
from twostroke.server import elsewhere
from twostroke.server.elsewhere import Elsewhere, SentTurns, tag_of
from twostroke.server.errors import ApiError
from twostroke.server.response_store import StoredResponse, Turn

OWN = "http://10.0.0.8:8000"
ROUTER_KEY = "between-router-and-workers"


class Listing(RouterClient):
    """Knows these workers, until it knows nobody any more."""

    def __init__(self, *urls: str) -> None:
        super().__init__("http://10.0.0.1:8000")
        self.urls: tuple[str, ...] | None = urls

    def workers(self) -> list[Worker]:
        if self.urls is None:
            raise RouterError("away")
        return [Worker(url, None, Role.BOTH, True) for url in self.urls]


def stored(response_id: str) -> StoredResponse:
    def item(name: str) -> dict[str, Any]:
        return {"id": name, "type": "message", "role": "user", "content": [{"type": "input_text", "text": "é" * 3}]}

    turns = (Turn.of([item("a"), item("b")], [item("c")]), Turn.of([item("d")], []))
    return StoredResponse(response_id, b'{"id":"' + response_id.encode() + b'","output":[]}', turns)


def test_a_conversation_travels_as_it_is() -> None:
    kept = stored("resp_x")
    sent = msgspec.json.decode(msgspec.json.encode(SentTurns.of(kept)), type=SentTurns).stored("resp_x")
    assert sent.reply == kept.reply and sent.conversation() == kept.conversation()
    assert sent.input_items() == kept.input_items() and sent.num_bytes == kept.num_bytes


class Owner(BaseHTTPRequestHandler):
    """One that has one response, of one key."""

    def do_GET(self) -> None:
        name = self.path.removeprefix("/v1/responses/").removesuffix("/turns")
        is_there = self.headers.get("Authorization") == "Bearer one" and name.endswith("0" * 32)
        body = msgspec.json.encode(SentTurns.of(stored(name))) if is_there else b"{}"
        body = b"nonsense" if name.endswith("1" * 32) else body
        self.send_response(200 if is_there or body == b"nonsense" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_DELETE(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def owner() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Owner)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_who_wrote_it_is_asked_with_the_clients_key(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "LISTED_S", 0.0)
    router = Listing(OWN, owner)
    key = {"authorization": "Bearer one", "cookie": "not passed on"}

    async def ask() -> None:
        asking = Elsewhere(router, OWN, 1 << 20)
        there = f"resp_{tag_of(owner)}_{'0' * 32}"
        found = await asking.find(there, key)
        assert found is not None and found.conversation() == stored(there).conversation()
        assert await asking.delete(there, key)
        assert await asking.find(there, {"authorization": "Bearer two"}) is None
        for unknown in ("resp_" + "0" * 32, asking.new_id(), "resp_../../x", f"resp_{tag_of(owner)}_{'2' * 32}"):
            assert await asking.find(unknown, key) is None
        small = Elsewhere(router, OWN, 10)
        for one, response_id, status, said in (
            (asking, f"resp_{tag_of(owner)}_{'1' * 32}", 404, "cannot be read"),
            (asking, f"resp_{'a' * 12}_{'0' * 32}", 404, "not of this fleet any more"),
            (small, there, 413, "too much before it"),
        ):
            with pytest.raises(ApiError, match=said) as refused:
                await one.find(response_id, key)
            assert refused.value.status_code == status
        router.urls = (f"http://127.0.0.1:{free_port()}",)
        with pytest.raises(ApiError, match="does not answer"):
            await asking.find(f"resp_{tag_of(router.urls[0])}_{'0' * 32}", key)
        router.urls = None
        with pytest.raises(ApiError, match="the router does not say"):
            await asking.find(there, key)

    asyncio.run(ask())


@pytest.mark.fleet
@pytest.mark.timeout(300)
def test_a_conversation_goes_on_at_any_server(tmp_path: Path) -> None:
    pytest.importorskip("smg")
    path = make_scripted(tmp_path / "model", "hermes")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = (str(path), "--backend", "reference", "--name", "scripted", "--register", url)
    keys = {"TWOSTROKE_API_KEYS": "one,two", ROUTER_KEY_VARIABLE: ROUTER_KEY}
    router = RouterClient(url, ROUTER_KEY)
    with (
        running_smg(tmp_path / "smg.log", port, ROUTER_KEY),
        running_server(tmp_path / "a", *options, **keys) as a,
        running_server(tmp_path / "b", *options, **keys) as b,
    ):
        until(lambda: sum(bool(one.is_healthy) for one in router.workers()) == 2, said=a.log)
        at_a, at_b = client_of(a.base_url), client_of(b.base_url)
        first = at_a.responses.create(model="scripted", input="Say one thing.")
        second = at_b.responses.create(model="scripted", input="And?", previous_response_id=first.id)
        third = at_a.responses.create(model="scripted", input="And then?", previous_response_id=second.id)
        alone = at_a.responses.create(
            model="scripted",
            input=[
                *({"role": "user", "content": "Say one thing."}, *first.output),
                *({"role": "user", "content": "And?"}, *second.output),
                {"role": "user", "content": "And then?"},
            ],
        )
        assert third.usage is not None and alone.usage is not None
        assert third.usage.input_tokens == alone.usage.input_tokens
        assert at_a.responses.retrieve(second.id).id == second.id
        listed = [len(at.responses.input_items.list(third.id).data) for at in (at_a, at_b)]
        assert listed[0] == listed[1] == 3 + len(first.output) + len(second.output)
        routed = client_of(f"{url}/v1").responses.create(model="scripted", input="?", previous_response_id=third.id)
        assert routed.id.split("_")[1] in {tag_of(one.address) for one in (a, b)}
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client_of(b.base_url, "two").responses.create(model="scripted", input="?", previous_response_id=first.id)
        at_b.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="it was never kept"):
            at_a.responses.retrieve(first.id)
        _gone_with_its_server(a, at_b, third.id)


def _gone_with_its_server(owner: RunningServer, other: OpenAI, response_id: str) -> None:
    owner.process.kill()
    owner.process.wait()
    with pytest.raises(openai.NotFoundError, match=r"does not answer|not of this fleet any more"):
        other.responses.create(model="scripted", input="?", previous_response_id=response_id)


def client_of(base_url: str, key: str = "one") -> OpenAI:
    return OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=httpx.Timeout(60))
