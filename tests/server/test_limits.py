"""Who may ask, how much, and how often: keys, caps, the queue, time."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import MODEL_OPTIONS
from tests.server.running import ANSWER_LIMIT_S, CLIENT, RunningServer, running_server

ALICE = {"Authorization": "Bearer alice-key"}
BOB = {"Authorization": "Bearer bob-key"}
CAROL = {"X-API-Key": "carol-key"}
TIMEOUT_S = 4.0
LONG = {"prompt": "Count:", "temperature": 0, "max_tokens": 400, "ignore_eos": True, "speculation": "off"}


@pytest.fixture(scope="module")
def limited(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("limited")
    keys = folder / "keys"
    keys.write_text("# who may ask\nalice-key\n")
    options = ("--api-key-file", str(keys), "--cors", "https://page.example")
    limits = ("--max-context", "8192", "--max-output-tokens", "7900", "--max-queue", "2")
    limits += ("--max-running", "1", "--max-per-key", "2", "--max-samples", "4")
    environment = {"TWOSTROKE_API_KEYS": "bob-key, carol-key"}
    with running_server(folder / "log", *MODEL_OPTIONS, *options, *limits, **environment) as server:
        yield server


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/openapi.json", "/v1/nothing"])
def test_every_route_but_health_asks_for_a_key(limited: RunningServer, path: str) -> None:
    assert error_of(limited.get(path), 401)["code"] == "invalid_api_key"
    for wrong in ("Bearer alice", "Bearer alice-key2", "Basic alice-key", "alice-key", "Bearer", "Bearer \xe9"):
        response = limited.get(path, headers={"Authorization": wrong.encode("latin-1")})
        assert error_of(response, 401)["type"] == "authentication_error"
    assert limited.get(path, headers=ALICE).status_code in (200, 404)
    assert limited.get(path, headers=CAROL).status_code in (200, 404)
    assert limited.get("/health").status_code == limited.get("/ready").status_code == 200


def test_a_request_without_key_is_never_read(limited: RunningServer) -> None:
    error_of(limited.post("/v1/completions", LONG), 401)
    error_of(limited.post("/v1/chat/completions", {"no": "such"}), 401)


@pytest.mark.parametrize(
    ("changes", "param", "numbers"),
    [
        ({"n": 5}, "n", ("5", "4")),
        ({"max_tokens": 7901}, "max_tokens", ("7901", "7900")),
        ({"stop": ["x"] * 17}, "stop", ("17", "16")),
        ({"stop": "x" * 2000}, "stop", ("2000", "1024")),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias", ("2000", "1024")),
        ({"prompt": ["a"] * 300}, "prompt", ("300", "256")),
        ({"prompt": [[1] * 8200]}, "prompt", ("8200", "8192")),
        ({"prompt": "word " * 9000}, "prompt", ("9001", "8192")),
        ({"prompt": [[1] * 8100], "max_tokens": 100}, "max_tokens", ("8100", "100", "8192")),
        ({"prompt": [[60000]]}, "prompt", ("60000", "49151")),
        ({"logprobs": 65}, "logprobs", ("64",)),
    ],
)
def test_caps_name_the_field_and_both_numbers(
    limited: RunningServer, changes: dict, param: str, numbers: tuple[str, ...]
) -> None:
    error = error_of(limited.post("/v1/completions", {**LONG, **changes}, headers=ALICE), 400)
    assert error["param"] == param and error["type"] == "invalid_request_error"
    for number in numbers:
        assert number in error["message"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
    ],
)
def test_an_answer_that_may_not_be_so_long_is_told_by_the_field_that_asked(
    limited: RunningServer, path: str, param: str
) -> None:
    for text, wanted, code, limit in (
        ("word " * 400, 7900, "context_length_exceeded", "8192"),
        ("Hi", 7901, None, "7900"),
    ):
        body = {"input": text} if path == "/v1/responses" else {"messages": [{"role": "user", "content": text}]}
        error = error_of(limited.post(path, {**body, param: wanted}, headers=ALICE), 400)
        assert (error["param"], error["code"]) == (param, code)
        assert f"{param} " in error["message"] and str(wanted) in error["message"] and limit in error["message"]


def send_only(server: RunningServer, headers: dict) -> socket.socket:
    """A long stream that nobody reads."""
    payload = json.dumps({**LONG, "max_tokens": 7900, "stream": True}).encode()
    host, port = server.address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=ANSWER_LIMIT_S)
    lines = [f"{name}: {value}" for name, value in {**headers, "Content-Length": str(len(payload))}.items()]
    head = "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *lines])
    connection.sendall(f"{head}\r\n\r\n".encode() + payload)
    return connection


def test_a_busy_key_and_a_full_queue_get_429(limited: RunningServer) -> None:
    """One runs, two may wait, and a key may have two in flight."""
    short = {**LONG, "max_tokens": 1}
    with contextlib.ExitStack() as held:
        running = held.enter_context(send_only(limited, ALICE))
        assert b"200 OK" in running.recv(100)
        for headers in (ALICE, BOB):
            held.enter_context(send_only(limited, headers))
        limited.wait_until(lambda: limited.get("/ready").status_code != 200)
        assert limited.get("/ready").json() == {"status": "queue full"}
        busy = limited.post("/v1/completions", short, headers=ALICE)
        assert error_of(busy, 429)["code"] == "concurrency_limit" and busy.headers["retry-after"] == "1"
        full = limited.post("/v1/completions", short, headers=CAROL)
        assert error_of(full, 429)["code"] == "queue_full" and error_of(full, 429)["type"] == "rate_limit_error"
        assert 1 <= int(full.headers["retry-after"]) <= 60
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert error_of(limited.post(path, body, headers=CAROL), 429)["code"] == "queue_full"
            assert error_of(limited.post(path, body, headers=ALICE), 429)["code"] == "concurrency_limit"
    limited.wait_until_idle(headers=ALICE)
    assert limited.post("/v1/completions", short, headers=ALICE).status_code == 200


def test_grammars_that_are_checked_count_among_the_requests_of_a_key(limited: RunningServer) -> None:
    """They are the costliest work before the queue: one after the other, up to a second each."""
    slow = "start: " + " ".join(["x?"] * 20_000) + '\nx: "a"'
    with ThreadPoolExecutor(4) as threads:
        bodies = [{**LONG, "max_tokens": 1, "ignore_eos": False, "guided_grammar": slow + "\n" * i} for i in range(4)]
        answers = list(threads.map(lambda body: limited.post("/v1/completions", body, headers=BOB), bodies))
    codes = [answer.json().get("error", {}).get("code") for answer in answers]
    assert "concurrency_limit" in codes, codes
    assert {answer.status_code for answer in answers} <= {200, 400, 429}
    limited.wait_until_idle(headers=ALICE)
    assert limited.post("/v1/completions", {**LONG, "max_tokens": 1}, headers=BOB).status_code == 200


def test_a_request_that_takes_too_long_is_ended(scripted_options: tuple[str, ...], tmp_path: Path) -> None:
    """One of them runs and streams; the other is still in the queue when its time is over."""
    options = (*scripted_options, "--request-timeout", f"{TIMEOUT_S:g}", "--max-running", "1")
    with running_server(tmp_path / "log", *options) as server:
        began_s = time.monotonic()
        with CLIENT.stream("POST", f"{server.base_url}/completions", json={**LONG, "stream": True}) as stream:
            lines = (line for line in stream.iter_lines() if line)
            assert next(lines).startswith("data: ")
            with server.held_engine():  # it cannot end by itself meanwhile
                queued = server.post("/v1/completions", LONG)
                last = list(lines)[-1]
        assert time.monotonic() - began_s > 0.9 * TIMEOUT_S
        assert stream.status_code == 200 and '"code": "timeout"' in last
        assert error_of(queued, 504)["code"] == "timeout"
        server.wait_until_idle()
        assert server.post("/v1/completions", {**LONG, "max_tokens": 1}).status_code == 200


def test_cors_answers_the_one_origin_that_was_named(limited: RunningServer) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    url = f"{limited.base_url}/completions"
    allowed = CLIENT.options(url, headers={**ask, "Origin": "https://page.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    refused = CLIENT.options(url, headers={**ask, "Origin": "https://other.example"})
    assert "access-control-allow-origin" not in refused.headers


def test_cors_is_off_unless_asked(server: RunningServer) -> None:
    response = server.get("/v1/models", headers={"Origin": "https://page.example"})
    assert "access-control-allow-origin" not in response.headers
