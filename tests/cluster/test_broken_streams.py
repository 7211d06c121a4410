"""A worker is killed while it writes answers: what each client has got by then is the beginning of what one server
alone would have told it, token by token, and the stream says that it broke. Nobody else notices."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.endings import metric, num_running
from tests.cluster.fleets import OPTIONS as ALONE_OPTIONS
from tests.cluster.fleets import WORDS
from tests.cluster.routing import is_alive, until
from tests.cluster.test_fleet_up import Running, fleet
from tests.cluster.test_pools import POOLS, named, workers
from tests.server.running import CLIENT, running_server

pytest.importorskip("smg")
pytestmark = pytest.mark.fleet
PLAIN = ("--workers", "2", "--threads", "1")
NUM_STREAMS, NUM_WHOLE_ANSWERS = 6, 2
"""Clients who read token by token, and such who want their answer at once."""
MAX_TOKENS = 200
FEWEST = 5
"""Tokens that each stream has brought before anybody is killed: it is in its midst then."""


def body(number: int) -> dict[str, Any]:
    """Every second is drawn; answers have no rhythm that drafts would find, and so take their time."""
    drawn = random.Random(number)
    return {
        "prompt": " ".join(drawn.choices(WORDS, k=60)),
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "logprobs": 1,
        "temperature": 1.0 if number % 2 else 0.0,
        "seed": number,
        "repetition_penalty": 1.3,
        "stream": number < NUM_STREAMS,
    }


@dataclass
class Told:
    """What a client was told, as far as it came."""

    status: int = 0
    tokens: list[str] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: Any = None
    is_done: bool = False
    cut: str = ""
    """The connection broke."""

    def hear(self, event: Any) -> None:
        assert self.finish_reason is None and self.error is None and not self.is_done, "nothing follows an end"
        if "error" in event:
            self.error = event["error"]
        for choice in event.get("choices", []):
            self.tokens += choice["logprobs"]["tokens"]
            self.numbers += choice["logprobs"]["token_logprobs"]
            self.finish_reason = choice["finish_reason"]


def ask(url: str, asked: dict[str, Any], told: Told) -> Told:
    try:
        with CLIENT.stream("POST", f"{url}/v1/completions", json=asked) as answer:
            told.status = answer.status_code
            if not asked["stream"] or told.status != 200:
                text = answer.read()
                if told.status == 200:
                    told.hear(json.loads(text))
                return told
            for line in filter(None, answer.iter_lines()):
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    told.is_done = True
                else:
                    told.hear(json.loads(data))
    except httpx.HTTPError as problem:
        told.cut = repr(problem)
    return told


@pytest.fixture(scope="module")
def expected(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Told]]:
    """By one server alone."""
    log = tmp_path_factory.mktemp("alone") / "log"
    with running_server(log, *ALONE_OPTIONS) as alone, ThreadPoolExecutor(NUM_STREAMS) as pool:
        asked = [{**body(number), "model": "smollm2"} for number in range(NUM_STREAMS + NUM_WHOLE_ANSWERS)]
        told = list(pool.map(lambda one: ask(alone.address, one, Told()), asked))
        assert all(len(one.tokens) == MAX_TOKENS for one in told)
        yield told


def same(told: Told, expected: Told) -> bool:
    """As far as it came."""
    number = len(told.tokens)
    near = pytest.approx(expected.numbers[:number], abs=1e-6)
    return told.tokens == expected.tokens[:number] and told.numbers == near


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("router", "role", "options"),
    [("smg", "decode", POOLS), ("smg", "both", PLAIN), ("vllm-router", "decode", POOLS)],
    ids=["two pools", "plain", "two pools behind vllm-router"],
)
def test_a_worker_is_killed_while_it_writes(
    smollm2_path: Path, tmp_path: Path, expected: list[Told], router: str, role: str, options: tuple[str, ...]
) -> None:
    if router == "vllm-router":
        pytest.importorskip("vllm_router")
    with fleet(tmp_path, smollm2_path, *options, "--router", router) as running:
        asked = [named(body(number), running) for number in range(len(expected))]
        told = [Told() for _ in asked]
        with ThreadPoolExecutor(len(asked)) as pool:
            asking = [pool.submit(ask, running.url, *one) for one in zip(asked, told, strict=True)]
            until(lambda: all(len(one.tokens) >= FEWEST for one in told[:NUM_STREAMS]), said=running.said)
            url, pid = max(workers(running, role), key=lambda one: num_running(one[0]))
            assert num_running(url) > 0
            os.kill(pid, signal.SIGKILL)
            until(lambda: not is_alive(pid))
            for one in asking:
                one.result()
        broken = [one for one in told[:NUM_STREAMS] if one.finish_reason is None]
        print(f"{len(broken)} of {NUM_STREAMS} streams broke, after {[len(one.tokens) for one in broken]} tokens")
        assert broken, "who was killed wrote some of them"
        for one, whole in zip(told, expected, strict=True):
            assert same(one, whole), "no token is lost, repeated or another"
        for one in told[:NUM_STREAMS]:
            assert one.status == 200 and FEWEST <= len(one.tokens) <= MAX_TOKENS
            if one in broken:
                says_so(one, router)
            else:
                assert len(one.tokens) == MAX_TOKENS and one.finish_reason == "length" and one.is_done and not one.cut
        for one in told[NUM_STREAMS:]:  # smg asks another worker
            assert len(one.tokens) == MAX_TOKENS if router == "smg" or one.status == 200 else one.status == 500
        served_again(running, asked[0], expected[0], role)


def says_so(one: Told, router: str) -> None:
    """An event with an error ends it, and nothing that could be taken for an answer's end. vllm-router has no such
    event: it ends the connection without the end that HTTP asks for, which every client tells as an error."""
    assert len(one.tokens) < MAX_TOKENS
    if router == "vllm-router":
        assert "incomplete chunked read" in one.cut and not one.is_done
    else:
        assert "Stream error" in one.error["message"] and one.error["type"] == "stream_error" and not one.cut


def served_again(running: Running, asked: dict[str, Any], expected: Told, role: str) -> None:
    """Whoever asks again gets the whole, and nobody holds anything for those who broke."""
    again = Told()

    def is_whole() -> bool:
        nonlocal again
        again = ask(running.url, asked, Told())
        return again.status == 200 and again.finish_reason is not None

    until(is_whole, 60, running.said)
    assert same(again, expected) and len(again.tokens) == MAX_TOKENS
    roles = ("prefill", "decode") if role == "decode" else (role,)
    for url, _ in (one for each in roles for one in workers(running, each)):
        until(lambda url=url: holds_nothing(url), 60, running.said)  # type: ignore[misc]


def holds_nothing(url: str) -> bool:
    try:
        return all(metric(url, f"twostroke_{name}") == 0 for name in ("running", "waiting", "kv_leases"))
    except httpx.HTTPError:
        return False  # it is being started again
