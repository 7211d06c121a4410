"""What became of a request, asked for by its id: over HTTP, by the commands, and by none but the key that sent it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.running import RunningServer, running_server
from twostroke.server.kept import ExplainedRequest, KeptRequests

ONE, TWO = {"Authorization": "Bearer key-one"}, {"Authorization": "Bearer key-two"}
COMMAND = [sys.executable, "-c", "from twostroke.cli import main; main()"]


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One at a time runs, so that the next waits for a slot."""
    options = ("smollm2", "--backend", "cpu", "--max-context", "1024", "--kv-memory", "60MB", "--max-running", "1")
    log = tmp_path_factory.mktemp("explaining") / "log"
    with running_server(log, *options, TWOSTROKE_API_KEYS="key-one,key-two") as running:
        yield running


def ask(server: RunningServer, text: str, headers: dict[str, str], **more: object) -> dict[str, object]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "ignore_eos": True, **more}
    answer = server.post("/v1/chat/completions", body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


def command(*arguments: str, url: str, key: str = "key-one", columns: int = 160) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TWOSTROKE_API_KEY": key}
    environment["COLUMNS"] = str(columns)
    return subprocess.run(
        [*COMMAND, *arguments, "--url", url], capture_output=True, text=True, timeout=120, env=environment
    )


def test_a_request_that_waited_for_a_slot_is_told_so_everywhere(server: RunningServer) -> None:
    with ThreadPoolExecutor(6) as pool:  # the last waits for five, so that no pause of its own is the longest
        answers = list(pool.map(lambda number: ask(server, f"Count to {number}.", ONE, max_tokens=12), range(6)))
    waited = max(answers, key=lambda answer: answer["timing"]["queue_s"])  # type: ignore[index]
    timing = waited["timing"]
    assert isinstance(timing, dict) and timing["cause"] == "queue"
    assert "went into the queue (1 of 1 running slots were taken" in timing["verdict"]

    found = server.get(f"/v1/twostroke/requests/{waited['id']}", headers=ONE).json()
    choice = found["choices"][0]
    assert choice["timing"] == timing and choice["slow_to"] == "start" and choice["stream"]
    assert (choice["predicted_by"], choice["doubt"] is None) != ("step_cost", False)
    kinds = [span["kind"] for span in choice["timeline"]]
    assert kinds[:2] == ["reception", "queue"] and kinds[-2:] == ["decode", "delivery"]
    assert choice["timeline"][1]["seconds"] == pytest.approx(timing["queue_s"], abs=1e-5)

    shown = command("explain", str(waited["id"]), url=server.base_url)
    assert shown.returncode == 0, shown.stderr
    assert "Slow to start: " in shown.stdout and "running slots were taken for" in " ".join(shown.stdout.split())

    short = str(waited["id"])[:17]
    top = command("top", "--once", "--interval", "0.2", url=server.address, columns=80)
    assert top.returncode == 0, top.stderr
    assert "smollm2 on cpu: ready" in top.stdout and short in top.stdout and "queue" in top.stdout
    assert len([line for line in top.stdout.splitlines() if line.startswith("chatcmpl-")]) == len(answers) + 1
    assert max(map(len, top.stdout.splitlines())) <= 80
    assert len(top.stdout.splitlines()) < 24, "all of it is on the screen"
    assert command("explain", short, url=server.base_url).stdout == shown.stdout, "a shown id is enough"


def test_each_key_sees_its_own_requests(server: RunningServer) -> None:
    mine = ask(server, "Hello.", ONE, n=2)
    path = f"/v1/twostroke/requests/{mine['id']}"
    assert len(server.get(path, headers=ONE).json()["choices"]) == 2
    assert server.get("/v1/twostroke/requests/last", headers=ONE).json()["id"] == mine["id"]
    refused = server.get(path, headers=TWO)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")
    assert server.get("/v1/twostroke/top", headers=TWO).json()["requests"] == []
    assert server.get(path).status_code == server.get("/v1/twostroke/top").status_code == 401


def test_the_commands_say_in_a_sentence_what_is_wrong(server: RunningServer) -> None:
    for arguments, url, key, part in (
        (("explain", "chatcmpl-none"), server.address, "key-one", "no finished request 'chatcmpl-none' is remembered"),
        (("top", "--once"), server.address, "wrong", "this API key is not known here"),
        (("explain",), "http://127.0.0.1:9", "key-one", "no server answers at http://127.0.0.1:9"),
        (("top", "--once"), "file:///etc/passwd", "key-one", "is no address of a server"),
    ):
        done = command(*arguments, url=url, key=key)
        assert done.returncode == 2 and part in done.stderr and "Traceback" not in done.stderr


def test_streams_and_other_routes_are_kept_too(server: RunningServer) -> None:
    stream = server.post(
        "/v1/completions", {"prompt": "Once", "max_tokens": 4, "stream": True, "ignore_eos": True}, headers=ONE
    )
    assert '"verdict":"' in stream.text
    assert server.get("/v1/twostroke/requests/last", headers=ONE).json()["id"].startswith("cmpl-")
    server.post("/v1/responses", {"input": "Hello", "max_output_tokens": 16}, headers=ONE)
    assert server.get("/v1/twostroke/requests/last", headers=ONE).json()["id"].startswith("resp_")


def test_what_is_kept_is_bounded() -> None:
    kept = KeptRequests(limit=3)
    for number in range(5):
        kept.keep(number % 2, ExplainedRequest(str(number), 0, "model", []))
    assert [request.id for request in kept.latest(0)] == ["4", "2"]
    assert kept.find(1, "3") is not None and kept.find(0, "3") is None and kept.find(1, "1") is None
    assert kept.find(2, "last") is None


def test_the_beginning_of_an_id_is_enough_where_it_is_one_requests_alone() -> None:
    kept = KeptRequests()
    names = ("chatcmpl-00aa11", "chatcmpl-00aa22", "chatcmpl-77bb00")
    for name in names:
        kept.keep(0, ExplainedRequest(name, 0, "model", []))
    found = kept.find(0, "chatcmpl-77bb")
    assert found is not None and found.id == names[2]
    assert kept.find(0, "chatcmpl-00aa") is None and kept.find(0, "chatcmpl-7") is None
    assert kept.find(1, "chatcmpl-77bb") is None, "another key's"
