"""What a client may do to a connection: be one too many, dawdle over its headers or its body, not read its answer."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import MODEL_OPTIONS
from tests.server.running import RunningServer, running_server
from twostroke import LLM, SamplingParams

HEADER_TIMEOUT_S = 1.0
MAX_CONNECTIONS = 8
OPTIONS = ("--header-timeout", f"{HEADER_TIMEOUT_S:g}", "--reader-timeout", "2")
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture(scope="module")
def strict(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("strict") / "log"
    with running_server(log, *MODEL_OPTIONS, *OPTIONS, "--max-connections", str(MAX_CONNECTIONS)) as running:
        yield running


def connect(server: RunningServer, receive_bytes: int | None = None) -> socket.socket:
    host, port = server.address.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(20)
    connection.connect((host, int(port)))
    return connection


def all_of(connection: socket.socket) -> bytes:
    """Until the server closes it."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            received += piece
    return received


def ask_version(connection: socket.socket) -> None:
    connection.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
    answer = connection.recv(4096)
    while b"}" not in answer:
        answer += connection.recv(4096)
    assert b"200 OK" in answer


def post(body: dict[str, object], head: str = "") -> bytes:
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{head}"
    return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload


@pytest.mark.parametrize("said", ["", "GET /hea", "GET /health HTTP/1.1\r\nX-A: b\r\n"])
def test_headers_that_do_not_come_end_the_wait(strict: RunningServer, said: str) -> None:
    with connect(strict) as connection:
        began_s = time.monotonic()
        connection.sendall(said.encode())
        answer = all_of(connection)
        assert answer.startswith(b"HTTP/1.1 408 ") and b"headers did not arrive within 1 s" in answer
        assert HEADER_TIMEOUT_S * 0.9 < time.monotonic() - began_s < HEADER_TIMEOUT_S + 5


def test_a_trickle_of_headers_does_not_buy_time(strict: RunningServer) -> None:
    """On a connection that was used before, too."""
    with connect(strict) as connection:
        for _ in range(2):
            ask_version(connection)
            time.sleep(1.2 * HEADER_TIMEOUT_S)  # idle, it is kept
        connection.sendall(b"GET /version HTTP/1.1\r\n")
        began_s = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began_s < 10:
                connection.sendall(b"X-A: b\r\n")
                time.sleep(0.1)
        assert time.monotonic() - began_s < HEADER_TIMEOUT_S + 5


def test_a_trickle_of_a_body_after_its_answer_is_cut(strict: RunningServer) -> None:
    with connect(strict) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n")
        assert b"404" in connection.recv(4096)
        began_s = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began_s < 10:
                connection.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - began_s < HEADER_TIMEOUT_S + 5


def test_one_connection_too_many_is_turned_away(strict: RunningServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            connection = stack.enter_context(connect(strict))
            ask_version(connection)
        refused = strict.get("/health")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "connections_full"
        assert refused.headers["retry-after"] == "1"
    end_s = time.monotonic() + 10
    while strict.get("/health").status_code != 200:
        assert time.monotonic() < end_s
        time.sleep(0.05)
    assert strict.metric("twostroke_rejected_total", reason="connections") >= 1


def test_a_stream_is_the_same_to_a_client_of_http_1_0(strict: RunningServer) -> None:
    """Whose answer is not cut into chunks, and passes through the server's own `send`."""
    body = {"prompt": "The sea is", "temperature": 0, "max_tokens": 12, "stream": True, "n": 2}
    answers = []
    for version in ("1.1", "1.0"):
        with connect(strict) as connection:
            connection.sendall(post(body, "Connection: close\r\n").replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
            head, _, payload = all_of(connection).partition(b"\r\n\r\n")
        assert (b"chunked" in head) == (version == "1.1")
        lines = [line for line in payload.splitlines() if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]"
        choices = [choice for line in lines[:-1] for choice in json.loads(line[6:])["choices"]]
        answers.append([[choice["text"] for choice in choices if choice["index"] == index] for index in range(2)])
    assert ["".join(texts) for texts in answers[0]] == ["".join(texts) for texts in answers[1]]
    assert answers[0][0][0]


def resident_mb(server: RunningServer) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1000


@on_linux
def test_a_client_that_never_reads_is_cut_off_and_holds_nobody_up(strict: RunningServer, offline: LLM) -> None:
    strict.wait_until_idle()
    before_mb, cut = resident_mb(strict), strict.metric("twostroke_requests_total", reason="abort")
    body = {"prompt": "Count:", "max_tokens": 1800, "ignore_eos": True, "stream": True, "logprobs": 5, "n": 8}
    with connect(strict, receive_bytes=4096) as connection:
        connection.sendall(post(body))
        time.sleep(0.5)
        asked = {"prompt": "The sea is", "temperature": 0, "max_tokens": 30}
        with httpx.stream(
            "POST", f"{strict.base_url}/completions", json={**asked, "stream": True}, timeout=60
        ) as stream:
            lines = [line for line in stream.iter_lines() if line]
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
        assert text == offline.generate("The sea is", SamplingParams(temperature=0.0, max_tokens=30))[0].text
        strict.wait_until_idle(60)  # long before 14400 tokens are written
        assert strict.metric("twostroke_requests_total", reason="abort") == cut + 8
        assert resident_mb(strict) < before_mb + 30
        assert b"[DONE]" not in all_of(connection)
    assert "Traceback" not in strict.log()
