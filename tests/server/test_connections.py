"""What a client may do to a connection: be one too many, dawdle over its headers or its body, leave or fall silent
before its answer, not read it. And how each request is told from others in the log."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import MODEL_OPTIONS
from tests.server.hostile import stall
from tests.server.running import ANSWER_LIMIT_S, CLIENT, RunningServer, running_server
from twostroke import LLM, SamplingParams

HEADER_TIMEOUT_S = 1.0
MAX_CONNECTIONS = 8
OPTIONS = ("--header-timeout", f"{HEADER_TIMEOUT_S:g}", "--reader-timeout", "2", "--access-log")
HOST = ("--allowed-host", "gpu.example")
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture(scope="module")
def strict(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("strict") / "log"
    with running_server(log, *MODEL_OPTIONS, *OPTIONS, *HOST, "--max-connections", str(MAX_CONNECTIONS)) as running:
        yield running


def connect(server: RunningServer, receive_bytes: int | None = None) -> socket.socket:
    host, port = server.address.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(ANSWER_LIMIT_S)
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
    connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = connection.recv(4096)
    while b"}" not in answer:
        answer += connection.recv(4096)
    assert b"200 OK" in answer


def post(body: dict[str, object], head: str = "") -> bytes:
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{head}"
    return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload


def test_headers_that_do_not_come_end_the_wait(strict: RunningServer) -> None:
    with contextlib.ExitStack() as stack:
        began_s, connections = time.monotonic(), []
        for said in (b"", b"GET /hea", b"GET /health HTTP/1.1\r\nX-A: b\r\n"):
            connections.append(stack.enter_context(connect(strict)))
            connections[-1].sendall(said)
        for connection in connections:
            answer = all_of(connection)
            assert answer.startswith(b"HTTP/1.1 408 ") and b"headers did not arrive within 1 s" in answer
            assert time.monotonic() - began_s > HEADER_TIMEOUT_S * 0.9


def check_trickle_is_cut(connection: socket.socket, piece: bytes) -> None:
    end_s = time.monotonic() + 60 * HEADER_TIMEOUT_S
    with pytest.raises(ConnectionError):
        while time.monotonic() < end_s:
            connection.sendall(piece)
            time.sleep(0.1)


def test_a_trickle_of_headers_does_not_buy_time(strict: RunningServer) -> None:
    """On a connection that was used before, too."""
    with connect(strict) as connection:
        ask_version(connection)
        time.sleep(1.2 * HEADER_TIMEOUT_S)  # idle, it is kept
        ask_version(connection)
        connection.sendall(b"GET /version HTTP/1.1\r\n")
        check_trickle_is_cut(connection, b"X-A: b\r\n")


def test_a_trickle_of_a_body_after_its_answer_is_cut(strict: RunningServer) -> None:
    with connect(strict) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        assert b"404" in connection.recv(4096)
        check_trickle_is_cut(connection, b"x")


def connect_where_there_is_room(server: RunningServer) -> socket.socket:
    """The server may not have heard yet that an earlier connection is closed."""
    while True:
        connection = connect(server)
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = connection.recv(4096)
        if b"200 OK" in answer:
            return connection
        assert b" 503 " in answer, answer
        connection.close()


def test_one_connection_too_many_is_turned_away(strict: RunningServer) -> None:
    with contextlib.ExitStack() as stack:
        strict.wait_until_idle()
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(connect_where_there_is_room(strict))
        refused = strict.get("/health")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "connections_full"
        assert refused.headers["retry-after"] == "1"
    strict.wait_until(lambda: strict.get("/health").status_code == 200)
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
    body = {
        "prompt": "Count:",
        "max_tokens": 1800,
        "speculation": "off",
        "ignore_eos": True,
        "stream": True,
        "logprobs": 5,
        "n": 8,
    }
    with connect(strict, receive_bytes=4096) as connection:
        connection.sendall(post(body))
        time.sleep(0.5)
        asked = {"prompt": "The sea is", "temperature": 0, "max_tokens": 30}
        with CLIENT.stream(
            "POST", f"{strict.base_url}/completions", json={**asked, "stream": True}, timeout=60
        ) as stream:
            lines = [line for line in stream.iter_lines() if line]
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
        assert text == offline.generate("The sea is", SamplingParams(temperature=0.0, max_tokens=30))[0].text
        strict.wait_until_idle()
        assert strict.metric("twostroke_requests_total", reason="abort") == cut + 8, "before 14400 tokens are written"
        assert resident_mb(strict) < before_mb + 30
        assert b"[DONE]" not in all_of(connection)
    assert "Traceback" not in strict.log()


def logged(server: RunningServer, words: str) -> str:
    """The line of the log that has these words, once it is there."""
    end_s = time.monotonic() + ANSWER_LIMIT_S
    while True:
        for line in server.log().splitlines():
            if words in line:
                return line
        assert time.monotonic() < end_s, f"{words!r} is not in the log:\n{server.log()}"
        time.sleep(0.02)


def test_an_id_is_taken_returned_logged_and_kept(strict: RunningServer) -> None:
    body = {"prompt": "a", "max_tokens": 2}
    for given in ("client-1:a/b", "0" * 128):
        for is_streamed in (False, True):
            answer = strict.post("/v1/completions", {**body, "stream": is_streamed}, headers={"X-Request-ID": given})
            assert answer.status_code == 200 and answer.headers["x-request-id"] == given
        assert strict.get("/v1/twostroke/requests/last").json()["request_id"] == given
        assert " POST /v1/completions 200 " in logged(strict, f" s {given}")
    assert strict.get("/v1/twostroke/requests/client-1:a%2Fb").json()["request_id"] == "client-1:a/b"
    last = strict.get("/v1/twostroke/requests/last").json()
    assert strict.get("/v1/twostroke/requests/" + "0" * 128).json() == last
    for path, status in (("/health", 200), ("/none", 404), ("/v1/completions", 405), ("/a%0Ab", 404)):
        answer = strict.get(path, headers={"Host": "gpu.example"})
        own = answer.headers["x-request-id"]
        assert answer.status_code == status and own.startswith("req_")
        assert f" GET {path} {status} " in logged(strict, own)
    refused = strict.get("/health", headers={"X-Request-ID": "a b"})
    assert refused.status_code == 400 and " GET /health 400 " in logged(strict, refused.headers["x-request-id"])
    assert strict.get("/health", headers={"Host": "evil.example"}).status_code == 421


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_has_said_all_is_answered(strict: RunningServer, offline: LLM, is_streamed: bool) -> None:
    """It has closed its side, as `nc -N` does, and listens."""
    body = {"prompt": "The sea is", "temperature": 0, "max_tokens": 20, "stream": is_streamed}
    with connect(strict) as connection:
        connection.sendall(post(body))
        connection.shutdown(socket.SHUT_WR)
        answer = all_of(connection)
    interim, _, rest = answer.partition(b"\r\n\r\n")
    answer = rest if interim == b"HTTP/1.1 100 Continue" else answer
    assert answer.startswith(b"HTTP/1.1 200 ")
    expected = offline.generate("The sea is", SamplingParams(temperature=0.0, max_tokens=20))[0].text
    if is_streamed:
        pieces = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b'data: {"')]
        assert "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"]) == expected
        assert b"data: [DONE]" in answer
    else:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == expected
    with connect(strict) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 9000 + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert b'"version"' in all_of(connection)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_has_left_is_told_from_one_that_has_said_all(strict: RunningServer, is_streamed: bool) -> None:
    strict.wait_until_idle()
    aborted = strict.metric("twostroke_requests_total", reason="abort")
    with connect(strict) as connection:
        connection.sendall(
            post(
                {
                    "prompt": "Count:",
                    "max_tokens": 1900,
                    "speculation": "off",
                    "ignore_eos": True,
                    "stream": is_streamed,
                    "n": 4,
                }
            )
        )
        strict.wait_until(lambda: strict.metric("twostroke_running") == 4)
        if is_streamed:
            assert connection.recv(100)
    strict.wait_until_idle()
    assert strict.metric("twostroke_requests_total", reason="abort") == aborted + 4


def test_a_client_that_leaves_inside_its_body_leaves_one_line(strict: RunningServer) -> None:
    """Whether it left, or went on with what is no chunk."""
    before = strict.log()
    head = post({"prompt": "a"}, "X-Request-ID: left\r\n").partition(b"Content-Length")[0]
    with connect(strict) as connection:
        connection.sendall(head + b'Content-Length: 15\r\n\r\n{"prompt"')
    logged(strict, " s left")
    with connect(strict) as connection:
        connection.sendall(head.replace(b"left", b"lost") + b"Transfer-Encoding: chunked\r\n\r\nno chunk\r\n")
        assert all_of(connection).startswith(b"HTTP/1.1 400 ")
    logged(strict, " s lost")
    # The line of an earlier request may come late: theirs are told by their ids.
    new = [line for line in strict.log()[len(before) :].splitlines() if " req_" not in line]
    assert sum(line.endswith((" left", " lost")) for line in new) == 2, new
    assert len(new) <= 3 and not any("Traceback" in line for line in new), new
    assert strict.metric("twostroke_client_disconnects_total") >= 1


def test_a_body_known_to_be_too_large_is_not_waited_for(strict: RunningServer) -> None:
    """Neither by a client that asks first, whom `100 Continue` would tell to send it, nor by one that does not."""
    for expect in (b"Expect: 100-continue\r\n", b""):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + expect
        with connect(strict) as connection:
            connection.sendall(head + b"Content-Length: 9000000\r\n\r\n")
            answer = connection.recv(4096)
            while b"}}" not in answer:
                answer += connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 413 ")
            if not expect:  # it may send its body all the same, and ask again
                connection.sendall(b"x" * 9_000_000)
                ask_version(connection)
    told = CLIENT.post(f"{strict.base_url}/completions", content=b"x" * 9_000_000)
    assert told.status_code == 413
    told = CLIENT.post(f"{strict.base_url}/completions", content=iter([b"x" * 65536] * 140))
    assert told.status_code in (413, 415)
    json_kind = {"Content-Type": "application/json", "Connection": "close"}
    for content in (b"x" * 9_000_000, iter([b"x" * 65536] * 140)):
        told = CLIENT.post(f"{strict.base_url}/completions", content=content, headers=json_kind)
        assert told.status_code == 413


def test_a_body_that_is_asked_for_is_told_to_come(strict: RunningServer) -> None:
    with connect(strict) as connection:
        head, _, payload = post({"prompt": "a", "max_tokens": 1}, "Expect: 100-continue\r\n").partition(b"\r\n\r\n")
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 100 ")
        connection.sendall(payload)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_the_first_to_ask_what_there_is_keeps_nobody_waiting(strict: RunningServer) -> None:
    """The description of all routes takes a tenth of a second to make: it is there before the server is ready."""
    assert stall(strict, lambda address: [CLIENT.get(f"{address}/openapi.json").status_code]).work_s <= 0.05


def test_a_wish_for_a_web_socket_is_no_news(strict: RunningServer) -> None:
    before = len(strict.log())
    wish = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "a" * 24,
    }
    refused = strict.get("/v1/realtime", headers={**wish, "X-Request-ID": "socket"})
    assert refused.status_code == 404 and "there is no GET /v1/realtime here" in refused.json()["error"]["message"]
    logged(strict, " s socket")
    # The line of an earlier request may come late: what has no request's line is the news.
    news = [line for line in strict.log()[before:].splitlines() if " req_" not in line]
    assert len(news) == 1 and "uvicorn" not in news[0], news


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        (b"what is this\r\n\r\n", b"400", b"not valid HTTP"),
        (b"GET /version HTTP/1.1\r\n\r\n", b"400", b"Host"),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n", b"400", b"Content-Length"),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 40_000 + b"\r\n\r\n", b"431", b"32768"),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + b"a:b\r\n" * 20_000 + b"\r\n", b"431", b"32768"),
    ],
)
def test_what_is_no_http_is_told_so_in_words(strict: RunningServer, said: bytes, status: bytes, words: bytes) -> None:
    with connect(strict) as connection:
        connection.sendall(said)
        head, _, body = all_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status) and words in body and json.loads(body)["error"]["message"]
    assert "Traceback" not in strict.log()
