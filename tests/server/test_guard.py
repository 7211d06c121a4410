"""What the guard does with bodies that arrive slowly, lie about their length, or come to a client that is not ready."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError
from twostroke.server.app import create_app
from twostroke.server.client import EngineClient, EngineState
from twostroke.server.errors import ApiError
from twostroke.server.guard import Guard
from twostroke.server.heartbeat import Doing, Heart, HeartWatch
from twostroke.server.messages import EngineSettings
from twostroke.server.metrics import Metrics
from twostroke.server.restarts import STEADY_AFTER_S
from twostroke.server.service import Service
from twostroke.server.settings import Limits, ServerSettings


def call(settings: ServerSettings, pieces: list[bytes | None], *headers: tuple[bytes, bytes]) -> tuple[int, Any]:
    """Post to an app whose engine was never started; None in `pieces` is a pause without end."""
    sent: list[dict[str, Any]] = []
    remaining = iter(pieces)

    async def receive() -> dict[str, Any]:
        piece = next(remaining, b"")
        if piece is None:
            await asyncio.sleep(60)
        left = remaining.__length_hint__()
        return {"type": "http.request", "body": piece, "more_body": left > 0}

    async def send(message: Any) -> None:
        sent.append(message)

    async def scenario() -> None:
        metrics = Metrics()
        client = EngineClient(EngineSettings("none", EngineConfig()), metrics)
        app = create_app(Service(settings, client, metrics))
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), *headers],
        }
        await app(scope, receive, send)
        await client.close()

    asyncio.run(scenario())
    return sent[0]["status"], json.loads(sent[1]["body"])


def settings(**limits: Any) -> ServerSettings:
    return ServerSettings("small", limits=Limits(**limits))


def test_a_body_that_does_not_come_ends_the_wait() -> None:
    status, body = call(settings(body_timeout_s=0.1), [b'{"prompt"', None, b"x"])
    assert status == 408 and "0.1 s" in body["error"]["message"]


def test_what_arrives_is_counted_whatever_was_declared() -> None:
    pieces: list[bytes | None] = [b"x" * 60, b"x" * 60, b"x"]
    status, body = call(settings(max_body_bytes=100), pieces, (b"content-length", b"50"))
    assert status == 413 and "120" in body["error"]["message"] and "100" in body["error"]["message"]
    status, body = call(settings(max_body_bytes=100), pieces, (b"content-length", b"121"))
    assert status == 413 and "121" in body["error"]["message"]


def test_all_bodies_together_have_a_limit() -> None:
    pieces: list[bytes | None] = [b"x" * 60, b"x" * 60, b"x"]
    status, body = call(settings(max_bodies_bytes=100), pieces)
    assert status == 503 and body["error"]["code"] == "bodies_full" and "100" in body["error"]["message"]

    async def two_at_a_time() -> list[int]:
        """The first is held while it waits for the engine; what it took is free after it."""
        statuses: list[int] = []
        answered = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            while (await receive()).get("more_body"):
                pass
            if scope["path"] == "/first":
                await answered.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        guard = Guard(app, settings(max_bodies_bytes=100), Metrics())

        async def post(path: str) -> None:
            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": b"x" * 60, "more_body": False}

            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])

            try:
                await guard({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
            except ApiError as error:  # FastAPI would word it
                statuses.append(error.status_code)

        first = asyncio.create_task(post("/first"))
        await asyncio.sleep(0)
        await post("/second")
        answered.set()
        await first
        await post("/third")
        return statuses

    assert asyncio.run(two_at_a_time()) == [503, 200, 200]


def test_before_the_engine_is_ready_requests_are_told_so() -> None:
    status, body = call(settings(), [b'{"prompt": "Hi"}'])
    assert status == 503 and body["error"]["code"] == "engine_unavailable" and "starting" in body["error"]["message"]


def test_an_engine_that_is_silent_too_long_is_stalled() -> None:
    async def scenario() -> None:
        client = EngineClient(EngineSettings("none", EngineConfig()), Metrics())
        assert client.health == "starting"
        beats, heart = os.pipe()
        Heart(heart).beat()
        client._watch = watch = HeartWatch(beats, 10.0)
        client.state = EngineState.READY
        assert watch.look() is None and client.health == "ready"
        watch._doing, watch.silent_s = Doing.WAITING, 5.1  # half of what it may be
        assert client.health == "stalled" and watch.look() is None
        client.state = EngineState.STARTING
        await client.close()
        watch.close()
        os.close(heart)

    asyncio.run(scenario())


def test_an_engine_that_keeps_ending_is_started_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as late each time, up to a limit; one that lived for long begins anew."""
    lives_s = [1.0] * 8 + [STEADY_AFTER_S + 1] + [1.0]
    clock_s, waited_s = 0.0, []

    async def live(self: EngineClient, path: Path) -> None:
        nonlocal clock_s
        assert self.health != "ready"
        if not lives_s:
            self.state = EngineState.STOPPED
            return
        self.state = EngineState.READY
        clock_s += lives_s.pop(0)

    async def sleep(seconds: float) -> None:
        waited_s.append(seconds)

    async def scenario() -> int:
        client = EngineClient(EngineSettings("none", EngineConfig()), Metrics())
        client._ready = asyncio.get_running_loop().create_future()
        client._ready.set_result(None)  # type: ignore[arg-type]  # it was ready once
        monkeypatch.setattr(EngineClient, "_live", live)
        client.restarts._clock = lambda: clock_s
        monkeypatch.setattr("twostroke.server.client.asyncio.sleep", sleep)
        await client._supervise()
        monkeypatch.undo()
        await client.close()
        return client.restarts.by_reason.total()

    assert asyncio.run(scenario()) == 10
    assert waited_s == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 0.5, 1.0]


@pytest.mark.parametrize("name", ["max_queue", "max_per_key", "max_output_tokens", "max_samples", "max_connections"])
def test_a_limit_that_lets_nothing_through_is_refused(name: str) -> None:
    settings(**{name: 1})
    with pytest.raises(BadRequestError, match=f"{name} must be an integer of at least 1, not 0"):
        settings(**{name: 0})


@pytest.mark.parametrize("seconds", [float("nan"), -1.0])
def test_times_that_are_none_are_refused(seconds: float) -> None:
    for name in ("request", "headers", "body", "reader"):
        with pytest.raises(BadRequestError, match=f"{name}_timeout_s must be a number above 0, not"):
            settings(**{f"{name}_timeout_s": seconds})
    with pytest.raises(BadRequestError, match="drain_s must be a number of at least 0, not"):
        ServerSettings("small", drain_s=seconds)


@pytest.mark.parametrize("key", ["", " ", "schlüssel", "a\nb"])
def test_keys_are_plain_text(key: str) -> None:
    with pytest.raises(BadRequestError, match="API key"):
        ServerSettings("small", api_keys=(key,))
