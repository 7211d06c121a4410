"""Two pools without a worker that reads: a decode worker stands in, reads the prompt itself, and says so."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.routing import running_smg, until
from tests.server.running import running_server
from tests.server.scripted_model import make_scripted
from twostroke.cluster.fleet import free_port
from twostroke.cluster.role import STAND_IN, Role
from twostroke.cluster.router_client import CONFLICT, RouterClient, RouterError, Worker
from twostroke.cluster.standing_in import StandIn
from twostroke.cluster.tickets import opened
from twostroke.core.handoff import unread
from twostroke.server.errors import ApiError
from twostroke.server.handoffs import Handoffs

KEY = "a key that only this fleet has"
OWN = "http://10.0.0.8:8000"
ASKS = {"do_remote_decode": True, "do_remote_prefill": False}
WHY_NOT = "no worker that reads prompts was there"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    path = make_scripted(tmp_path_factory.mktemp("scripted") / "model", "hermes")
    return str(path), "--backend", "reference", "--name", "scripted"


class Asked(RouterClient):
    """Notes what it is asked."""

    def __init__(self, listed: list[Worker], error: RouterError | None = None) -> None:
        super().__init__("http://10.0.0.1:8000")
        self.listed, self.error, self.asked = listed, error, list[str]()

    def workers(self) -> list[Worker]:
        return self.listed

    def add(self, url: str, role: Role, api_key: str | None = None) -> str | None:
        self.asked.append(f"add {url} {role} {api_key}")
        if self.error is not None:
            raise self.error
        return "new"

    def remove(self, worker_id: str) -> None:
        self.asked.append(f"remove {worker_id}")


def worker(url: str, role: Role, *, is_healthy: bool | None = True, is_leaving: bool = False) -> Worker:
    return Worker(url, f"id of {url}", role, is_healthy, is_leaving)


ADDED = f"add {OWN}{STAND_IN} prefill look"
REMOVED = f"remove id of {OWN}{STAND_IN}"
READER, OTHER = "http://10.0.0.7:8000", f"http://10.0.0.9:8000{STAND_IN}"


@pytest.mark.parametrize(
    ("readers", "expected"),
    [
        ([], [ADDED]),
        ([worker(READER, Role.PREFILL)], []),
        ([worker(READER, Role.PREFILL, is_healthy=None)], []),
        ([worker(READER, Role.PREFILL, is_healthy=False)], [ADDED]),
        ([worker(READER, Role.PREFILL, is_leaving=True)], [ADDED]),
        ([worker(OTHER, Role.PREFILL)], [ADDED]),
        ([worker(f"{OWN}{STAND_IN}", Role.PREFILL)], []),
        ([worker(f"{OWN}{STAND_IN}", Role.PREFILL), worker(READER, Role.PREFILL)], [REMOVED]),
        ([worker(f"{OWN}{STAND_IN}", Role.PREFILL, is_leaving=True), worker(READER, Role.PREFILL)], []),
    ],
)
def test_it_is_there_as_long_as_nobody_reads(readers: list[Worker], expected: list[str]) -> None:
    router = Asked([worker(OWN, Role.DECODE), *readers])
    StandIn(router, OWN, lambda _: None, api_key="look").look(router.workers())
    assert router.asked == expected


def test_a_router_that_is_at_it_is_not_asked_twice_and_others_are_said() -> None:
    said: list[str] = []
    router = Asked([], RouterError("busy", CONFLICT))
    one = StandIn(router, OWN, said.append)
    one.look([])
    one.look([])
    one.look([worker(READER, Role.PREFILL)])
    assert said == ["no worker reads prompts: they are read here", "prompts are read by others again"]
    with pytest.raises(RouterError, match="away"):
        StandIn(Asked([], RouterError("away")), OWN, said.append).look([])


def question(**more: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": "?" * 80}], "max_tokens": 4, **more}


def test_that_nobody_read_is_believed_of_the_own_fleet_alone() -> None:
    writer, stranger = Handoffs("decode", KEY.encode(), ()), Handoffs("decode", b"another key, of others", ())
    params = writer.stand_in()
    assert params is not None and Handoffs("both", KEY.encode(), ()).stand_in() is None
    for _ in range(2):  # it names nothing that could be used up
        handoff = writer.wish(params, [(1, 2, 3)]).handoff
        assert handoff is not None and handoff.unread == WHY_NOT
    with pytest.raises(ApiError, match="was not made by an engine of this fleet"):
        stranger.wish(params, [(1, 2, 3)])
    assert opened(KEY.encode(), params, (1, 2, 3), (), time.time() + 60) == unread(WHY_NOT)


@pytest.mark.fleet
def test_who_writes_says_that_nobody_read(model: tuple[str, ...], tmp_path: Path) -> None:
    """And takes such a word of its own fleet alone."""
    options = (*model, "--role", "decode", "--kv-host-gb", "0.01")
    with running_server(tmp_path / "log", *options, TWOSTROKE_FLEET_KEY=KEY) as server:
        for path in ("/health", "/v1/models", "/version", "/v1/loads"):
            assert server.get(f"{STAND_IN}{path}").status_code == 200
        read = server.post(f"{STAND_IN}/v1/chat/completions", question(kv_transfer_params=ASKS)).json()
        params = read["kv_transfer_params"]
        answer = server.post("/v1/chat/completions", question(kv_transfer_params=params)).json()
        assert answer["choices"][0]["message"] is not None
        told = answer["timing"]["handoff"]
        assert told["why_not"] == WHY_NOT and told["read_by"] == "" and told["tokens"] == 0
        assert told["sentence"] == f"{WHY_NOT}: the prompt was read here"
        forged = {**params, "twostroke": params["twostroke"][:-6] + "AAAA=="}
        assert server.post("/v1/chat/completions", question(kv_transfer_params=forged)).status_code == 400


@pytest.mark.fleet
def test_a_fleet_without_readers_serves_and_hands_over_when_one_comes(model: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("smg")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    client = RouterClient(url)
    options = (*model, "--register", url, "--kv-host-gb", "0.01", "--drain", "1", "--hand-over", "all")
    key = {"TWOSTROKE_FLEET_KEY": KEY}

    def ask() -> Any:
        return httpx.post(f"{url}/v1/chat/completions", json=question(), timeout=60)

    def is_handed_over() -> bool:
        answer = ask()
        return answer.status_code == 200 and answer.json()["timing"]["handoff"]["read_by"] != ""

    def listed() -> set[str]:
        return {one.url.rstrip("/") for one in client.workers() if one.is_healthy and not one.is_leaving}

    with running_smg(tmp_path / "smg.log", port, has_roles=True):
        with running_server(tmp_path / "decode", *options, "--role", "decode", **key) as writer:
            stand_in = f"{writer.address}{STAND_IN}"
            until(lambda: listed() == {writer.address, stand_in}, said=writer.log)
            answer = ask()
            assert answer.status_code == 200, answer.text
            assert answer.json()["timing"]["handoff"]["why_not"] == WHY_NOT
            with running_server(tmp_path / "prefill", *options, "--role", "prefill", **key) as reader:
                until(lambda: listed() == {writer.address, reader.address}, said=writer.log)
                until(is_handed_over, said=reader.log)
                reader.process.kill()
            until(lambda: stand_in in listed(), said=writer.log)
            until(lambda: ask().status_code == 200, said=writer.log)
        until(lambda: not listed(), said=writer.log)
