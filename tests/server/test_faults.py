"""What goes wrong around a server: a killed engine, clients that vanish, do not read or send too much, a pool that is
full, a log that cannot be written. Each gets a clear answer, and the server is alive after."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import MODEL_OPTIONS
from tests.server.running import ANSWER_LIMIT_S, CLIENT, STOP_LIMIT_S, RunningServer, running_server
from twostroke import LLM, SamplingParams

LONG = {"prompt": "Count:", "temperature": 0, "max_tokens": 1500, "ignore_eos": True, "speculation": "off"}
ENGINE_TIMEOUT_S = 3
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture(scope="module")
def fragile(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that tests may treat badly."""
    options = (*MODEL_OPTIONS, "--engine-timeout", str(ENGINE_TIMEOUT_S))
    with running_server(tmp_path_factory.mktemp("fragile") / "log", *options) as running:
        yield running


def answers_as_ever(server: RunningServer, offline: LLM) -> None:
    response = server.post("/v1/completions", {"prompt": "The sea is", "temperature": 0, "max_tokens": 8})
    expected = offline.generate("The sea is", SamplingParams(temperature=0.0, max_tokens=8))[0].text
    assert response.json()["choices"][0]["text"] == expected


def begin(server: RunningServer, body: dict) -> socket.socket:
    """A connection that has asked, and may leave whenever it likes."""
    payload = json.dumps(body).encode()
    host, port = server.address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=ANSWER_LIMIT_S)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
    return connection


def begin_stream(server: RunningServer, body: dict) -> tuple[socket.socket, bytes]:
    """A connection whose answer has begun, and the first bytes of it."""
    connection = begin(server, {**body, "stream": True})
    return connection, connection.recv(200)


def wait_until_healthy(server: RunningServer) -> None:
    server.wait_until(lambda: server.get("/health").status_code == 200)


@on_linux
def test_a_killed_engine_is_an_error_to_those_in_flight_and_comes_back(fragile: RunningServer, offline: LLM) -> None:
    whole: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: whole.append(fragile.post("/v1/completions", LONG)))
    asking.start()
    body = {**LONG, "stream": True, "n": 2}
    with CLIENT.stream("POST", f"{fragile.base_url}/completions", json=body) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        fragile.wait_until(lambda: fragile.metric("twostroke_running") == 3)  # the engine has told of all its work
        os.kill(fragile.engine_pid(), signal.SIGKILL)
        last = [line for line in lines if line][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "engine_unavailable" and "started again" in error["message"]
    asking.join()
    assert whole[0].status_code == 503 and whole[0].json()["error"]["type"] == "server_error"
    health = fragile.get("/health")
    assert health.status_code == 503 and health.json() == {"status": "restarting"}
    shown = fragile.get("/metrics").text
    assert 'twostroke_requests_total{reason="error"} 3.0' in shown and "twostroke_engine_up 0.0" in shown
    for name in ("running", "waiting", "kv_blocks", "kv_occupancy"):  # the dead engine's work is nobody's
        assert f"twostroke_{name}" not in shown
    refused = fragile.post("/v1/completions", LONG)
    assert refused.status_code == 503 and 1 <= int(refused.headers["retry-after"]) <= 30
    wait_until_healthy(fragile)
    answers_as_ever(fragile, offline)
    assert fragile.metric("twostroke_engine_restarts_total", reason="died") == 1
    assert fragile.metric("twostroke_requests_total", reason="error") == 3
    assert fragile.metric("twostroke_kv_blocks", state="free") > 0


@on_linux
def test_a_frozen_engine_is_an_error_to_those_in_flight_and_is_started_again(
    fragile: RunningServer, offline: LLM
) -> None:
    """Its process is there, and does nothing any more."""
    hung_before = fragile.metric("twostroke_engine_restarts_total", reason="hung")
    with ThreadPoolExecutor(1) as threads:
        frozen = fragile.engine_pid()
        body = {**LONG, "stream": True}
        with CLIENT.stream("POST", f"{fragile.base_url}/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(frozen, signal.SIGSTOP)
            began_s = time.monotonic()
            waiting = threads.submit(fragile.post, "/v1/completions", LONG)
            last = [line for line in lines if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "engine_unavailable" and "the engine hung" in error["message"]
        answer = waiting.result()
    assert answer.status_code == 503 and answer.json()["error"]["message"] == error["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    assert ENGINE_TIMEOUT_S / 2 < time.monotonic() - began_s < ANSWER_LIMIT_S  # not the 600 s of a request
    for path in ("/health", "/ready"):
        state = fragile.get(path)
        assert state.status_code == 503 and state.json() == {"status": "restarting"}
    fragile.wait_until(lambda: not Path(f"/proc/{frozen}").exists())  # its callers are told before it is ended
    wait_until_healthy(fragile)
    answers_as_ever(fragile, offline)
    assert fragile.metric("twostroke_engine_restarts_total", reason="hung") == hung_before + 1
    assert "the engine process hung and was ended (it gave no sign of life for" in fragile.log()


@pytest.mark.slow
@on_linux
def test_a_server_that_was_stopped_itself_keeps_its_engine(fragile: RunningServer, offline: LLM) -> None:
    """As when a machine sleeps: nobody's silence counts while nobody listens."""
    engine = fragile.engine_pid()
    for order in ((fragile.process.pid,), (engine, fragile.process.pid)):  # alone, and both, as in a frozen container
        for pid in order:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(ENGINE_TIMEOUT_S + 1.5)
        for pid in reversed(order):
            os.kill(pid, signal.SIGCONT)
        answers_as_ever(fragile, offline)
        time.sleep(1.0)
        assert fragile.engine_pid() == engine and fragile.get("/health").status_code == 200


def test_vanished_clients_free_their_blocks_at_once(fragile: RunningServer, offline: LLM) -> None:
    fragile.wait_until_idle()
    ended = {reason: fragile.metric("twostroke_requests_total", reason=reason) for reason in ("abort", "length")}
    connections = [begin(fragile, LONG)]  # not streaming: gone while it waits
    for _ in range(4):  # streaming: closed in the middle
        connection, first = begin_stream(fragile, LONG)
        assert b"200 OK" in first
        connections.append(connection)
    fragile.wait_until(lambda: fragile.metric("twostroke_running") == 5)  # the engine has told of its work
    for connection in connections:
        connection.close()
    fragile.wait_until_idle()
    assert fragile.metric("twostroke_requests_total", reason="abort") == ended["abort"] + 5
    assert fragile.metric("twostroke_requests_total", reason="length") == ended["length"], "one went on to its end"
    answers_as_ever(fragile, offline)


def test_a_client_that_vanishes_while_its_request_is_made_ready_is_dropped(
    fragile: RunningServer, offline: LLM
) -> None:
    gone_before = fragile.metric("twostroke_client_disconnects_total")
    slow = "start: " + " ".join(["x?"] * 20_000) + '\nx: "a"'  # compiled for a second, and then refused
    with begin(fragile, {"prompt": "Count:", "guided_grammar": slow}):
        fragile.wait_until(lambda: fragile.metric("twostroke_http_in_flight") == 2)  # and the one that asks
    fragile.wait_until(lambda: fragile.metric("twostroke_client_disconnects_total") > gone_before)
    answers_as_ever(fragile, offline)


def test_a_client_that_does_not_read_holds_nobody_up(fragile: RunningServer, offline: LLM) -> None:
    connections = [begin_stream(fragile, {**LONG, "n": 4})[0] for _ in range(2)]
    answers_as_ever(fragile, offline)
    for connection in connections:
        connection.close()
    fragile.wait_until_idle()


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_100_mb_is_refused(fragile: RunningServer, offline: LLM, declared: bool) -> None:
    piece = b"x" * 2**20

    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield piece

    headers = {"Content-Type": "application/json"}
    if declared:
        headers["Content-Length"] = str(100 * len(piece))
    response = CLIENT.post(f"{fragile.base_url}/completions", content=pieces(), headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large" and "8388608" in response.json()["error"]["message"]
    answers_as_ever(fragile, offline)


def test_long_headers_and_such_without_end_are_refused(fragile: RunningServer, offline: LLM) -> None:
    response = fragile.get("/health", headers={"X-Long": "x" * 40_000})
    assert response.status_code == 431 and "32768" in response.json()["error"]["message"]
    host, port = fragile.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=ANSWER_LIMIT_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Long: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"x" * 10_000)
        with contextlib.suppress(ConnectionError):
            assert b"431" in connection.recv(100)
    answers_as_ever(fragile, offline)


def test_a_full_kv_pool_delays_and_loses_nothing(smollm2_path: Path, tmp_path: Path, offline: LLM) -> None:
    options = ("smollm2", "--backend", "cpu", "--max-context", "512", "--kv-memory", "12MB")
    prompts = [f"Write about the number {number}." for number in range(8)]
    greedy = SamplingParams(temperature=0.0, max_tokens=75, ignore_eos=True)
    expected = [result.text for result in offline.generate(prompts, greedy)]
    body = {"temperature": 0, "max_tokens": 75, "ignore_eos": True}
    with running_server(tmp_path / "log", *options) as server:
        # In one request, so that they are there together however slow this machine is.
        answer = server.post("/v1/completions", {**body, "prompt": prompts}).json()
        assert [choice["text"] for choice in answer["choices"]] == expected
        server.wait_until_idle()
        assert server.metric("twostroke_preemptions_total") > 0


@on_linux
def test_a_log_on_a_full_disk_stops_nothing(smollm2_path: Path, tmp_path: Path, offline: LLM) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    options = (*MODEL_OPTIONS, "--access-log")
    with running_server(tmp_path / "log", *options, stderr=full) as server:
        os.close(full)
        wait_until_healthy(server)
        answers_as_ever(server, offline)


@pytest.mark.parametrize(("sent", "drain_s"), [(signal.SIGTERM, "30"), (signal.SIGINT, "inf")])
def test_a_signal_lets_a_stream_finish_and_ends_the_engine_too(
    smollm2_path: Path, tmp_path: Path, offline: LLM, sent: signal.Signals, drain_s: str
) -> None:
    body = {**LONG, "max_tokens": 100, "stream": True}
    with running_server(tmp_path / "log", *MODEL_OPTIONS, "--drain", drain_s) as server:
        engine = server.engine_pid() if sys.platform.startswith("linux") else None
        with (
            contextlib.ExitStack() as held,
            CLIENT.stream("POST", f"{server.base_url}/completions", json=body) as stream,
        ):
            lines = stream.iter_lines()
            received = [next(lines)]
            if engine is not None:  # it writes on once the server has heard the signal
                os.kill(engine, signal.SIGSTOP)
                held.callback(os.kill, engine, signal.SIGCONT)
            server.process.send_signal(sent)
            server.wait_until(lambda: "1 requests in flight may finish" in server.log())
            held.close()
            received += [line for line in lines if line]
        assert received[-1] == "data: [DONE]"
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in received[:-1])
        greedy = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        assert text == offline.generate("Count:", greedy)[0].text
        assert server.process.wait(STOP_LIMIT_S) == 0
        assert engine is None or not Path(f"/proc/{engine}").exists()


def test_while_it_drains_the_server_says_so_and_what_takes_too_long_ends_with_a_word(
    scripted_options: tuple[str, ...], tmp_path: Path
) -> None:
    options = (*scripted_options, "--drain", "6")
    with (
        running_server(tmp_path / "log", *options) as server,
        ThreadPoolExecutor(1) as threads,
        contextlib.ExitStack() as held,
    ):
        whole = threads.submit(server.post, "/v1/completions", {**LONG, "n": 8})
        body = {**LONG, "stream": True, "n": 8}
        with CLIENT.stream("POST", f"{server.base_url}/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            server.wait_until(lambda: server.metric("twostroke_http_in_flight") == 3)  # and the one that asks
            held.enter_context(server.held_engine())  # neither ends by itself
            server.process.send_signal(signal.SIGTERM)
            while (ready := server.get("/ready")).status_code == 200:  # the signal is on its way
                pass
            assert ready.status_code == 503 and ready.json() == {"status": "draining"}
            assert server.get("/health").status_code == 200
            refused = server.post("/v1/completions", LONG)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["message"] == "the server is stopping"
            received = [line for line in lines if line]  # to a proper end: a cut connection would raise
        error = json.loads(received[-1].removeprefix("data: "))["error"]
        assert error["code"] == "server_stopping" and error["type"] == "server_error"
        answer = whole.result()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "server_stopping"
        held.close()
        assert server.process.wait(STOP_LIMIT_S) == 0


@on_linux
def test_a_second_signal_waits_for_nobody_and_says_so(scripted_options: tuple[str, ...], tmp_path: Path) -> None:
    with running_server(tmp_path / "log", *scripted_options, "--drain", "inf") as server:
        engine = server.engine_pid()
        connection, _ = begin_stream(server, {**LONG, "n": 8})
        with connection:
            server.process.send_signal(signal.SIGINT)
            server.wait_until(lambda: server.get("/ready").status_code != 200)
            server.process.send_signal(signal.SIGINT)
            received = b""
            while data := connection.recv(1 << 16):
                received += data
            server.process.wait(STOP_LIMIT_S)
        last = next(line for line in reversed(received.splitlines()) if line.startswith(b"data: "))
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["code"] == "server_stopping" and "told to stop at once" in error["message"]
        assert "a second Ctrl-C stops at once" in server.log() and "Traceback" not in server.log()
        assert not Path(f"/proc/{engine}").exists()


def has_ended(process: Path) -> bool:
    try:
        return "Z" in (process / "stat").read_text().rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return True


@on_linux
def test_the_engine_ends_with_a_killed_server(scripted_options: tuple[str, ...], tmp_path: Path) -> None:
    with running_server(tmp_path / "log", *scripted_options) as server:
        engine = Path(f"/proc/{server.engine_pid()}")
        server.process.kill()
        server.process.wait()
        server.wait_until(lambda: has_ended(engine))
