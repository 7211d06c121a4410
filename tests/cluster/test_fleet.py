"""Prompts read by one server and answered by another, over HTTP as routers have it: what clients are told is what one
server alone tells them; what goes wrong between the two costs time, and no answer."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fleets import (
    ASKS,
    NOBODY,
    TEXTS,
    WORDS,
    body_of,
    drawn_request,
    first_leg,
    read,
    servers,
    told,
    write,
)
from tests.server.running import CLIENT, RunningServer

Fleet = tuple[RunningServer, RunningServer, RunningServer]


@pytest.fixture(scope="module")
def fleet(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with servers(tmp_path_factory.mktemp("fleet"), "prefill", "decode", "alone") as started:
        yield started


def prompt_of(seed: int, length: int = 160) -> dict[str, Any]:
    drawn = random.Random(seed)
    text = " ".join(drawn.choice(WORDS) for _ in range(length))
    return {"model": "smollm2", "prompt": text, "max_tokens": 6, "temperature": 0.0}


def test_clients_are_told_what_one_server_alone_tells_them(fleet: Fleet) -> None:
    reader, writer, alone = fleet
    num_handed, drawn = 0, random.Random(5)
    for number in range(6):
        path, body = drawn_request(number, drawn.choices(WORDS, k=drawn.randint(5, 160)), seed=number)
        params = read(reader, path, body)
        answer = write(writer, path, body, params)
        assert told(answer) == told(alone.post(path, body)), body
        num_handed += '"peer"' in answer.text
    assert num_handed > 1
    reader.wait_until(lambda: reader.metric("twostroke_kv_leases") == 0)
    writer.wait_until_idle()
    assert writer.metric("twostroke_handoffs_total", outcome="failed") == 0


def test_an_answer_says_who_read_its_prompt_and_what_came_over(fleet: Fleet) -> None:
    reader, writer, _ = fleet
    body = prompt_of(1)
    params = read(reader, "/v1/completions", body, NOBODY)  # so that all of it comes after reading
    answer = write(writer, "/v1/completions", body, params).json()
    handoff, prefill = answer["timing"]["handoff"], answer["timing"]["prefill"]
    assert handoff["tokens"] == prefill["cached_tokens"] == prefill["cached_by_tier"]["peer"] > 100
    assert handoff["bytes"] > 1e6 and 0 < handoff["seconds"] < 60 and handoff["why_not"] is None
    assert "read the prompt in" in handoff["sentence"] and "came over in" in handoff["sentence"]
    kept = writer.get("/v1/twostroke/requests/last").json()["choices"][0]
    kinds = [span["kind"] for span in kept["timeline"]]
    assert kinds[:1] == ["queue there"] or kinds[:1] == ["prefill there"]
    assert kinds.index("prefill there") < kinds.index("handoff") < kinds.index("prefill")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 0.9, "seed": 7, "logprobs": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.9, "seed": 7, "min_tokens": 4, "logit_bias": {"30": 2.0}, "stream": True},
        {"guided_regex": "[a-z ]{3,20}\\.", "logprobs": 2},
        {"max_tokens": 1, "logprobs": 2},
        {"stop_at_first": True},
        {"temperature": 0.9, "seed": 7, "n": 2},
        {"echo": True, "logprobs": 2},
    ],
    ids=["greedy", "penalties", "least", "grammar", "one token", "stop", "two", "echo"],
)
def test_the_first_token_comes_with_the_request(fleet: Fleet, change: dict[str, Any]) -> None:
    """Of one sample, whose prompt's probabilities nobody asks for. Else the server that writes draws it."""
    reader, writer, alone = fleet
    path, body = "/v1/completions", {**prompt_of(40), **change}
    if body.pop("stop_at_first", False):
        body["stop"] = alone.post(path, body).json()["choices"][0]["text"][:2]
    answer = write(writer, path, body, read(reader, path, body))
    assert told(answer) == told(alone.post(path, body))
    came = not ({"n", "echo"} & set(change))
    assert f'"first_token":{str(came).lower()}' in answer.text, answer.text
    ends = "ended the answer" in answer.text
    assert ends == ("max_tokens" in change or "stop_at_first" in change)
    reader.wait_until(lambda: reader.metric("twostroke_kv_leases") == 0)


def test_of_another_draw_it_is_not_taken(fleet: Fleet) -> None:
    """A client who asks for other things of both servers is told what he would be told by one."""
    reader, writer, alone = fleet
    path, body = "/v1/completions", {**prompt_of(41), "temperature": 0.9, "seed": 1}
    params = read(reader, path, {**body, "seed": 2})
    answer = write(writer, path, body, params)
    assert told(answer) == told(alone.post(path, body))
    assert answer.json()["timing"]["handoff"]["first_token"] is False
    assert answer.json()["timing"]["handoff"]["why_not"] is None


@pytest.mark.parametrize("path", TEXTS)
def test_other_apis_are_read_there_and_written_here_too(fleet: Fleet, path: str) -> None:
    reader, writer, alone = fleet
    body = body_of(path)
    read_there = first_leg(reader, path, body)
    written = read_there["eval_count"] if path.startswith("/api") else read_there["usage"]["output_tokens"]
    assert written == 1, "whoever reads writes no answer"
    params = read_there["kv_transfer_params"]
    answer = write(writer, path, body, params).json()
    text = TEXTS[path](answer)
    assert text and text == TEXTS[path](alone.post(path, body).json())
    assert answer["timing"]["handoff"]["why_not"] is None and answer["timing"]["handoff"]["tokens"] > 100
    again = write(writer, path, body, params)
    assert again.status_code == 400 and "was used before" in again.text
    forged = write(writer, path, body, {"twostroke": "e30=.e30="})
    assert forged.status_code == 400 and "its signature is another" in forged.text
    assert write(alone, path, body, params).status_code == 400
    if path == "/v1/responses":
        assert writer.get(f"{path}/{answer['id']}").status_code == 200
        assert reader.get(f"{path}/{read_there['id']}").status_code == 404, "what is thrown away is not kept"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"twostroke": "e30=.e30="}, "its signature is another"),
        ({"twostroke": None}, "is for the engines of a fleet, which sign it"),
    ],
)
def test_what_the_fleet_did_not_sign_is_refused(fleet: Fleet, change: dict[str, Any], sentence: str) -> None:
    reader, writer, alone = fleet
    body = prompt_of(2)
    params = read(reader, "/v1/completions", body)
    refused = write(writer, "/v1/completions", body, {**params, **change})
    assert refused.status_code == 400 and sentence in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "kv_transfer_params"
    other = write(writer, "/v1/completions", prompt_of(3), params)
    assert other.status_code == 400 and "was made for another prompt" in other.text
    assert write(alone, "/v1/completions", body, params).status_code == 400
    assert write(reader, "/v1/completions", body, params).status_code == 400
    assert writer.post("/v1/completions", {**body, "kv_transfer_params": ASKS}).status_code == 400
    assert write(writer, "/v1/completions", body, params).status_code == 200
    again = write(writer, "/v1/completions", body, params)
    assert again.status_code == 400 and "was used before" in again.text


@pytest.mark.fleet
def test_a_reader_that_died_after_reading_costs_time_and_no_answer(fleet: Fleet, tmp_path: Path) -> None:
    _, writer, alone = fleet
    body = prompt_of(4)
    with servers(tmp_path, "prefill") as (reader,):
        params = read(reader, "/v1/completions", body)
        os.kill(reader.engine_pid(), signal.SIGKILL)
        answer = write(writer, "/v1/completions", body, params)
    assert told(answer) == told(alone.post("/v1/completions", body))
    assert answer.json()["timing"]["handoff"]["why_not"] and answer.json()["timing"]["handoff"]["first_token"]
    writer.wait_until_idle()


def timed_stream(server: RunningServer, body: dict[str, Any]) -> list[tuple[float, Any]]:
    """Events, and the seconds until each."""
    began_s = time.monotonic()
    with CLIENT.stream("POST", f"{server.address}/v1/completions", json={**body, "stream": True}) as answer:
        lines = ((time.monotonic() - began_s, line) for line in answer.iter_lines())
        return [(at_s, json.loads(line[6:])) for at_s, line in lines if line.startswith("data: {")]


@pytest.mark.fleet
def test_a_reader_that_stopped_is_waited_for_as_long_as_a_lease_and_no_longer(fleet: Fleet, tmp_path: Path) -> None:
    _, writer, alone = fleet
    body = prompt_of(5)
    with servers(tmp_path, "prefill") as (reader,):
        params = read(reader, "/v1/completions", body)
        engine = reader.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        try:
            events = timed_stream(writer, {**body, "kv_transfer_params": params})
        finally:
            os.kill(engine, signal.SIGCONT)
        expected = timed_stream(alone, body)
        assert [event["choices"] for _, event in events] == [event["choices"] for _, event in expected]
        assert events[1][0] - events[0][0] > 3.0 > events[0][0], "the second token waits for KV, the first does not"
        assert events[-1][1]["timing"]["handoff"]["why_not"]
        writer.wait_until_idle()
        # It goes on, and is taken from again.
        body = prompt_of(6)
        answer = write(writer, "/v1/completions", body, read(reader, "/v1/completions", body))
        assert answer.json()["timing"]["handoff"]["why_not"] is None


@pytest.mark.fleet
def test_a_server_that_stops_waits_until_its_leases_are_taken(fleet: Fleet, tmp_path: Path) -> None:
    _, writer, _ = fleet
    body = prompt_of(7)
    with servers(tmp_path, "prefill", options=("--drain", "20")) as (reader,):
        params = read(reader, "/v1/completions", body)
        reader.wait_until(lambda: reader.metric("twostroke_kv_leases") == 1)
        reader.process.send_signal(signal.SIGTERM)
        answer = write(writer, "/v1/completions", body, params)
        assert answer.json()["timing"]["handoff"]["why_not"] is None
        assert reader.process.wait(15) == 0


def test_a_server_of_a_fleet_needs_its_key(tmp_path: Path) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-c", "from twostroke.cli import main; main()", "serve", "smollm2", "--role", "prefill"]
    environment = {name: value for name, value in os.environ.items() if name != "TWOSTROKE_FLEET_KEY"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert ended.returncode != 0 and "needs the fleet's key" in ended.stderr and "openssl rand -hex 32" in ended.stderr
