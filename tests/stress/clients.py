"""Clients of a real server, each with its own manners: some read to the end, some leave, some send nonsense. Each holds
what it gets against what the quiet server said. Statuses that a busy server may give are right; others are not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.server.sound_bodies import GOOD
from tests.server.test_malformed import NEVER_VALID, broken_bytes
from tests.stress.checker import BrokenRuleError

LIMIT_S = 120.0
"""Within which the slowest answer comes, on the busiest machine: who waits longer starves."""
PATH = "/v1/completions"

_SHARED = "The old harbour lies between two hills, and its lighthouse was built of grey stone. " * 3
_SUBJECTS = ("the sea", "winter", "bridges", "bread", "an old clock", "rain", "the number seven", "a fox")
QUESTIONS: tuple[dict[str, Any], ...] = tuple(
    {
        "prompt": f"{_SHARED if number % 2 else ''}Here is a short text about {subject}.",
        "max_tokens": (3, 12, 24)[number % 3],
        "temperature": 0.0 if number % 4 else 1.0,
        "seed": number,
        "ignore_eos": True,
        "n": 2 if number == 2 else 1,
        "cache_salt": "other" if number == 5 else "",
        "logprobs": 0,
    }
    for number, subject in enumerate(_SUBJECTS)
)

Answer = tuple[tuple[str, tuple[str, ...]], ...]
"""Of each sample: its text and its tokens."""


@dataclass
class Day:
    """What one round of clients shares."""

    address: str
    expected: dict[int, Answer]
    """By the question's number: what the quiet server answered."""
    may_fail: bool
    """The engine is killed in it: whoever is in flight then gets an error."""
    counts: Counter[str] = field(default_factory=Counter)

    async def expect(self, response: httpx.Response, body: bytes) -> None:
        """Of an answer that is none: whether it may be. Whoever is turned away waits a little."""
        status = response.status_code
        self.counts[str(status)] += 1
        if status in (429, 503):
            if not response.headers.get("retry-after", "").isdecimal():
                raise BrokenRuleError(f"{status} without Retry-After: {body[:200]!r}")
            if status == 503 and not self.may_fail:
                raise BrokenRuleError(f"503 from a server that nobody harmed: {body[:200]!r}")
            await asyncio.sleep(0.2)
        else:
            raise BrokenRuleError(f"status {status} for a sound request: {body[:300]!r}")

    def compare(self, number: int, answer: Answer) -> None:
        self.counts["answers"] += 1
        if answer != self.expected[number]:
            raise BrokenRuleError(f"question {number} was answered {answer}, and quietly {self.expected[number]}")


def answer_in(choices: list[dict[str, Any]]) -> Answer:
    """From whole choices, or from all pieces of a stream, in order."""
    texts: dict[int, str] = {}
    tokens: dict[int, tuple[str, ...]] = {}
    for choice in choices:
        index = choice["index"]
        texts[index] = texts.get(index, "") + choice["text"]
        tokens[index] = tokens.get(index, ()) + tuple((choice["logprobs"] or {}).get("tokens", ()))
    return tuple((texts[index], tokens[index]) for index in sorted(texts))


async def ask(client: httpx.AsyncClient, number: int) -> httpx.Response:
    return await client.post(PATH, json=QUESTIONS[number])


async def whole(day: Day, client: httpx.AsyncClient, source: random.Random) -> None:
    number = source.randrange(len(QUESTIONS))
    response = await ask(client, number)
    if response.status_code != 200:
        await day.expect(response, response.content)
    else:
        day.compare(number, answer_in(response.json()["choices"]))


async def streamed(day: Day, client: httpx.AsyncClient, source: random.Random, leaves_after: int | None = None) -> None:
    """`leaves_after`: so many lines, however many more would come."""
    number, choices, is_done = source.randrange(len(QUESTIONS)), [], False
    async with client.stream("POST", PATH, json={**QUESTIONS[number], "stream": True}) as response:
        if response.status_code != 200:
            await day.expect(response, await response.aread())
            return
        num_lines = 0
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if num_lines == leaves_after:
                day.counts["left"] += 1
                return
            num_lines += 1
            if line == "data: [DONE]":
                is_done = True
            elif (event := json.loads(line[6:])).get("error") is not None:
                if not day.may_fail:
                    raise BrokenRuleError(f"a stream broke off: {line}")
                day.counts["broken off"] += 1
                return
            else:
                choices += event["choices"]
    if not is_done:
        raise BrokenRuleError(f"a stream of question {number} ended without its end")
    day.compare(number, answer_in(choices))


async def leaving(day: Day, client: httpx.AsyncClient, source: random.Random) -> None:
    await streamed(day, client, source, source.choice([0, 0, 1, 2, 8]))


async def hasty(day: Day, client: httpx.AsyncClient, source: random.Random) -> None:
    """Asks, and hangs up at once, or in the middle of asking."""
    host, _, port = day.address.removeprefix("http://").rpartition(":")
    payload = json.dumps({**source.choice(QUESTIONS), "stream": source.random() < 0.5}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    said = f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload
    with contextlib.suppress(ConnectionError):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(said[: source.choice([len(said), len(said), source.randrange(len(said))])])
        await writer.drain()
        await asyncio.sleep(source.choice([0.0, 0.01, 0.1]))
        writer.close()
        day.counts["hung up"] += 1


async def malformed(day: Day, client: httpx.AsyncClient, source: random.Random) -> None:
    """Only the client's fault (4xx), or none after all; the engine has nothing to do with it."""
    path = source.choice(list(GOOD))
    if source.random() < 0.5:
        content = broken_bytes(source, json.dumps(GOOD[path]).encode())
    else:
        body = {**GOOD[path], source.choice(list(GOOD[path])): source.choice(NEVER_VALID)}
        content = json.dumps(body, ensure_ascii=True).encode()
    response = await client.post(path, content=content, headers={"Content-Type": "application/json"})
    day.counts["malformed"] += 1
    if response.status_code in (503, 429):
        await day.expect(response, response.content)
    elif response.status_code >= 500:
        raise BrokenRuleError(f"status {response.status_code} for {path} with {content[:300]!r}: {response.text[:300]}")


Manner = Callable[[Day, httpx.AsyncClient, random.Random], Awaitable[None]]
MANNERS: tuple[Manner, ...] = (whole, streamed, streamed, leaving, hasty, malformed)


async def crowd(day: Day, is_over: Callable[[], bool], number: int, seed: str, pause_s: float = 0.0) -> None:
    """So many clients at once, each asking again and again. `pause_s`: the longest that one thinks meanwhile."""

    async def one(place: int) -> None:
        source = random.Random(f"{seed}:{place}")
        while not is_over():
            manner = source.choice(MANNERS)
            try:
                await manner(day, client, source)
            except httpx.TimeoutException as error:
                raise BrokenRuleError(f"no answer within {LIMIT_S:.0f} s: it starves, or is lost") from error
            except httpx.TransportError as error:
                raise BrokenRuleError(f"the server hung up on a {manner.__name__} client: {error!r}") from error
            await asyncio.sleep(source.random() * pause_s)

    limits = httpx.Limits(max_connections=number)
    client = httpx.AsyncClient(base_url=day.address, timeout=LIMIT_S, limits=limits)
    async with client, asyncio.TaskGroup() as group:
        for place in range(number):
            group.create_task(one(place))
