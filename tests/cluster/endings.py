"""How streams of clients end while a fleet is in trouble, and what each client may have been told by then."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from tests.cluster.fleets import WORDS, told
from tests.server.running import CLIENT, RunningServer

WHOLE, REFUSED, ERROR, CUT = "whole", "refused", "ended with an error", "cut off"
"""How a stream ends: refused before its first event; cut off: the connection broke, which only a dead router does."""
AGAIN_S = 5.0
"""Within which a fleet serves again, from the moment that one of its processes was killed or stopped."""
PATH = "/v1/completions"


def drawn_body(number: int, num_words: int, max_tokens: int) -> dict[str, Any]:
    """A prompt that nobody has read yet."""
    prompt = " ".join(random.Random(number).choices(WORDS, k=num_words))
    kept = {"temperature": 0.0, "stream": True, "ignore_eos": True, "repetition_penalty": 1.3}
    return {"prompt": f"{number}: {prompt}", "max_tokens": max_tokens, **kept}


def expected_text(alone: RunningServer, body: dict[str, Any]) -> str:
    return text_of(told(alone.post(PATH, {**body, "model": "smollm2"})))


def text_of(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events for choice in event.get("choices", []))


def ending(url: str, body: dict[str, Any], expected: str, heard: list[Any] | None = None) -> str:
    """How a stream ended, of which no token was wrong. One that just ends is a failure: its client cannot tell.
    `heard`: gets its lines as they come."""
    lines: list[Any] = [] if heard is None else heard
    how = ""
    try:
        with CLIENT.stream("POST", f"{url}{PATH}", json=body) as answer:
            for line in answer.iter_lines():
                lines += [line.removeprefix("data: ")] if line and not line.startswith(":") else []
        if answer.status_code >= 400:
            said = "".join(lines)  # smg cuts what a worker says short, so it need not be JSON
            assert '"error"' in said and '"message"' in said, lines
            return REFUSED
    except httpx.HTTPError:
        how = CUT
    events = [json.loads(line) for line in lines if line.startswith("{")]
    text = text_of(events)
    assert expected.startswith(text), (text, expected)
    if events and "error" in events[-1]:
        assert events[-1]["error"]["message"], events[-1]
        return ERROR
    assert how or (lines[-1:] == ["[DONE]"] and text == expected), lines
    return how or WHOLE


@contextmanager
def asking(stream: Callable[[], str], number: int) -> Iterator[list[str]]:
    """So many clients who ask again and again, and how each of their streams ended."""
    stopped = threading.Event()
    endings: list[str] = []

    def keep_asking() -> None:
        while not stopped.is_set():
            endings.append(stream())
            time.sleep(0.05)

    with ThreadPoolExecutor(number) as pool:
        askers = [pool.submit(keep_asking) for _ in range(number)]
        try:
            yield endings
        finally:
            stopped.set()
        for asker in askers:
            asker.result()


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of its samples that carry these labels."""
    total = 0.0
    for line in CLIENT.get(f"{url}/metrics").text.splitlines():
        found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
            total += float(found[2])
    return total


def num_running(url: str) -> int:
    running: int = CLIENT.get(f"{url}/v1/loads").json()["loads"][0]["num_running_reqs"]
    return running


def is_idle(url: str) -> bool:
    try:
        return all(
            metric(url, f"twostroke_{name}") == 0 for name in ("running", "waiting", "kv_occupancy", "kv_leases")
        )
    except httpx.HTTPError:
        return False  # it is being started again
