"""An engine that is paused and stepped by a page: a token a click, nobody else harmed, never taken for hung."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import MODEL_OPTIONS
from tests.server.hostile import connect
from tests.server.running import CLIENT, RunningServer, running_server
from tests.server.watching import WatchReader, tokens_of


@pytest.fixture
def viewer(server: RunningServer) -> Iterator[WatchReader]:
    with WatchReader(server.address) as reader:
        yield reader
    server.wait_until_idle()


def control(server: RunningServer, viewer: WatchReader, **wish: object) -> httpx.Response:
    return server.post("/watch/control", {"viewer": viewer.hello["viewer"], **wish})


class Asking:
    """A request that is answered on a thread, while others go on."""

    def __init__(self, server: RunningServer, name: str, **more: object) -> None:
        self.name = name
        body = {"prompt": "The sea is", "max_tokens": 6, "ignore_eos": True, "temperature": 0, "speculation": "off"}
        body |= more
        self._answer: httpx.Response | None = None

        def ask() -> None:
            self._answer = server.post("/v1/completions", body, headers={"x-request-id": name})

        self._thread = threading.Thread(target=ask, daemon=True)
        self._thread.start()

    @property
    def is_answered(self) -> bool:
        return not self._thread.is_alive()

    def answer(self) -> Any:
        self._thread.join(60)
        assert self._answer is not None and self._answer.status_code == 200, self._answer and self._answer.text
        return self._answer.json()


def arrived(viewer: WatchReader, name: str) -> int:
    viewer.wait(lambda seen: any(one["t"] == "arrived" and one["id"] == name for one in seen))
    r: int = viewer.of("arrived", id=name)[0]["r"]
    return r


def test_a_paused_engine_takes_a_step_a_click(server: RunningServer, viewer: WatchReader) -> None:
    assert control(server, viewer, paused=True).json() == {"paused": True}
    asking = Asking(server, viewer.hello["own_prefix"] + "stepped")
    r = arrived(viewer, asking.name)
    before = len(viewer.of("step"))
    time.sleep(0.3)
    assert len(viewer.of("step")) == before and server.get("/health").status_code == 200
    for number in range(1, 6):
        assert control(server, viewer, step=1).status_code == 200
        viewer.wait(lambda seen, number=number: tokens_of(seen, r) >= number)  # type: ignore[misc]
        time.sleep(0.15)
        assert len(viewer.of("step")) - before == tokens_of(viewer.events, r) == number, "one step, one token"
    assert not asking.is_answered and viewer.of("control", paused=True, stepping=True)
    assert control(server, viewer, paused=False).json() == {"paused": False}
    whole = asking.answer()
    assert viewer.ended(asking.name)[0]["output_tokens"] == 6
    again = Asking(server, "unhurried").answer()
    assert whole["choices"][0]["text"] == again["choices"][0]["text"], "steps change no token"


def test_several_steps_may_be_asked_for_at_once_and_none_are_saved_up(
    server: RunningServer, viewer: WatchReader
) -> None:
    control(server, viewer, paused=True)
    assert control(server, viewer, step=5).status_code == 200  # there is nothing to do
    time.sleep(0.7)
    asking = Asking(server, viewer.hello["own_prefix"] + "by-threes")
    r = arrived(viewer, asking.name)
    time.sleep(0.3)
    assert tokens_of(viewer.events, r) == 0
    control(server, viewer, step=3)
    viewer.wait(lambda seen: tokens_of(seen, r) >= 3)
    time.sleep(0.15)
    assert tokens_of(viewer.events, r) == 3
    control(server, viewer, paused=False)
    asking.answer()


def test_anybody_elses_request_lets_the_engine_go_on(server: RunningServer, viewer: WatchReader) -> None:
    control(server, viewer, paused=True)
    own = Asking(server, viewer.hello["own_prefix"] + "mine")
    arrived(viewer, own.name)
    assert Asking(server, "theirs").answer()["usage"]["completion_tokens"] == 6
    own.answer()
    last = viewer.of("control")[-1]
    assert not last["paused"] and "another client" in last["reason"]


def test_an_engine_that_works_for_others_is_not_paused(server: RunningServer, viewer: WatchReader) -> None:
    theirs = {"prompt": "The sea is", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with CLIENT.stream("POST", f"{server.base_url}/completions", json=theirs) as stream:
        lines = (line for line in stream.iter_lines() if line)
        assert next(lines).startswith("data: ")
        with server.held_engine():  # it cannot end meanwhile
            refused = control(server, viewer, paused=True)
        assert refused.status_code == 409 and "another client" in refused.json()["error"]["message"]
        assert next(lines).startswith("data: "), "it goes on"


def test_it_goes_on_when_the_page_that_paused_it_is_gone(server: RunningServer) -> None:
    with WatchReader(server.address) as other:
        with WatchReader(server.address) as holder:
            control(server, holder, paused=True)
            refused = control(server, other, paused=True)
            assert refused.status_code == 409 and "another page" in refused.json()["error"]["message"]
            assert control(server, other, step=1).status_code == 409
            asking = Asking(server, holder.hello["own_prefix"] + "left-behind")
            arrived(other, asking.name)
        asking.answer()
        other.wait(lambda seen: any("is gone" in one.get("reason", "") for one in seen))


def test_an_abort_is_told_while_the_engine_stands_still(server: RunningServer, viewer: WatchReader) -> None:
    control(server, viewer, paused=True)
    name = viewer.hello["own_prefix"] + "given-up"
    body = json.dumps({"prompt": "The sea is", "max_tokens": 500, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connect(server.address) as connection:
        connection.sendall(f"{head}X-Request-ID: {name}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        arrived(viewer, name)
    [ended] = viewer.ended(name)
    assert ended["reason"] == "abort" and ended["output_tokens"] == 0
    assert control(server, viewer, paused=False).status_code == 200


@pytest.mark.slow
def test_a_paused_engine_is_not_taken_for_a_hung_one(smollm2_path: Path, tmp_path: Path) -> None:
    options = (*MODEL_OPTIONS, "--engine-timeout", "4")  # a loop may then stand still for 12 s
    with running_server(tmp_path / "log", *options) as server, WatchReader(server.address) as viewer:
        engine = server.engine_pid()
        control(server, viewer, paused=True)
        asking = Asking(server, viewer.hello["own_prefix"] + "patient")
        arrived(viewer, asking.name)
        time.sleep(14)
        assert server.get("/health").status_code == 200 and not asking.is_answered
        control(server, viewer, paused=False)
        asking.answer()
        assert server.engine_pid() == engine and "hung" not in server.log()


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({}, "either paused or step"),
        ({"paused": True, "step": 1}, "either paused or step"),
        ({"step": 0}, "step"),
        ({"step": 65}, "step"),
        ({"step": "1"}, "step"),
        ({"paused": 1}, "paused"),
        ({"paused": True, "more": 1}, "more"),
        ({"paused": True, "viewer": "nobody"}, "viewer"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(
    server: RunningServer, wish: dict[str, object], said: str
) -> None:
    with WatchReader(server.address) as reader:
        refused = server.post("/watch/control", {"viewer": reader.hello["viewer"], **wish})
        assert refused.status_code == 400 and said in refused.json()["error"]["message"]


def test_a_queue_that_the_holder_filled_turns_nobody_else_away(
    scripted_options: tuple[str, ...], tmp_path: Path
) -> None:
    options = (*scripted_options, "--max-queue", "2", "--speculate", "off")
    with running_server(tmp_path / "log", *options) as server, WatchReader(server.address) as viewer:
        assert control(server, viewer, paused=True).status_code == 200
        own = [Asking(server, f"{viewer.hello['own_prefix']}{number}") for number in range(2)]
        for asking in own:
            arrived(viewer, asking.name)
        body = {"prompt": "The sea is", "max_tokens": 2}
        turned_away = server.post(
            "/v1/completions", body, headers={"x-request-id": viewer.hello["own_prefix"] + "third"}
        )
        assert turned_away.status_code == 429, "the queue is full, and the engine still paused"
        theirs = server.post("/v1/completions", body, headers={"x-request-id": "theirs"})
        assert theirs.status_code in (200, 429)  # the queue may take a moment to move
        server.wait_until(lambda: server.post("/v1/completions", body).status_code == 200)
        for asking in own:
            asking.answer()
        viewer.wait(lambda seen: any("another client" in one.get("reason", "") for one in seen))
