"""Prompts behind smg go where their beginning is cached: two workers find nearly as much of 50 conversations cached as
one server that has them all."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cluster.endings import metric
from tests.cluster.fleets import WORDS
from tests.cluster.test_fleet_up import Running, fleet
from tests.cluster.test_pools import workers
from tests.server.running import CLIENT, running_server

pytest.importorskip("smg")
NUM_CONVERSATIONS, NUM_AT_ONCE = 50, 4
KV = ("--kv-memory", "400MB")
"""Of each engine: nothing that is asked for again was given up."""
LEAST_SHARE = 0.8
LEAST_OF_A_WORKER = 0.2

Conversation = list[list[dict[str, str]]]
"""The messages of each turn: what was said before and one more question."""


def conversations() -> list[Conversation]:
    """As people hold them: of five kinds, which begin alike; three to five turns; answers are as they are written
    here, so that everybody is asked the same."""
    drawn = random.Random(11)

    def said(least: int, most: int) -> str:
        return " ".join(drawn.choices(WORDS, k=drawn.randint(least, most)))

    kinds = [said(60, 110) for _ in range(5)]
    found = []
    for _ in range(NUM_CONVERSATIONS):
        messages = [{"role": "system", "content": drawn.choice(kinds)}]
        turns = []
        for _ in range(drawn.randint(3, 5)):
            messages.append({"role": "user", "content": said(10, 40)})
            turns.append(list(messages))
            messages.append({"role": "assistant", "content": said(10, 40)})
        found.append(turns)
    return found


def hold(url: str, model: str) -> tuple[int, int]:
    """All of them, some at once; the tokens of their prompts, and how many of these were cached."""

    def one(turns: Conversation) -> list[dict[str, Any]]:
        usages = []
        for messages in turns:
            body = {"model": model, "messages": messages, "max_tokens": 2, "temperature": 0.0}
            answer = CLIENT.post(f"{url}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            usages.append(answer.json()["usage"])
        return usages

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        usages = [usage for told in pool.map(one, conversations()) for usage in told]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return sum(usage["prompt_tokens"] for usage in usages), cached


def shares(running: Running) -> list[float]:
    """Of the prompts, by worker."""
    counts = [metric(url, "vllm:prompt_tokens_total") for url, _ in workers(running, "both")]
    return [count / sum(counts) for count in counts]


class Found(NamedTuple):
    asked: int
    """Tokens of prompts."""
    of_one: int
    """Of these, that one server found cached."""
    of_two: int
    """The same of two workers behind smg."""
    by_worker: list[float]
    """Shares of the prompts."""


def found_cached(folder: Path, model: Path) -> Found:
    options = ("--backend", "cpu", "--threads", "1", "--max-context", "1024", *KV)
    with running_server(folder / "alone", str(model), *options) as alone:
        asked, of_one = hold(alone.address, alone.get("/v1/models").json()["data"][0]["id"])
    with fleet(folder, model, "--workers", "2", "--threads", "1", *KV) as running:
        asked_of_two, of_two = hold(running.url, running.client().models.list().data[0].id)
        by_worker = shares(running)
    assert asked == asked_of_two
    return Found(asked, of_one, of_two, by_worker)


@pytest.mark.fleet
@pytest.mark.timeout(900)
def test_two_workers_find_nearly_as_much_cached_as_one(smollm2_path: Path, tmp_path: Path) -> None:
    found = found_cached(tmp_path, smollm2_path)
    assert found.of_one > found.asked / 2, "there is something to find"
    assert found.of_two >= LEAST_SHARE * found.of_one
    assert min(found.by_worker) >= LEAST_OF_A_WORKER, "one that gets everything finds everything"
