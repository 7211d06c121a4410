"""Traffic that is meant to hold a server up: bodies as large as they may be, of whatever takes longest to read, and
connections by the hundred. Each kind is a function that sends some of it and returns the statuses that came back."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.server.running import CLIENT, RunningServer

MAX_BYTES = 8 * 2**20
FITS_BYTES = MAX_BYTES - 1024
LIMIT_S = 120.0
JSON = {"Content-Type": "application/json"}
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
Statuses = list[int]


TEXTS = {
    "a text": b"a",
    "emoji": "é😀".encode(),
    "escaped quotes": b'\\"',
    "backslashes": b"\\\\",
    "escaped text": b"\\u00e9",
    "half pairs": b"\\ud83d",
}


def filled(before: bytes, item: bytes, after: bytes, number: int | None = None) -> bytes:
    """As many of an item as fit, or as many as are asked for."""
    fits = (FITS_BYTES - len(before) - len(after)) // len(item)
    return before + item * (fits if number is None else min(number, fits)) + after


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Of each a name, a path and the bytes: at the limits of what a body may be made of, and far beyond them."""
    completions, chat, responses = "/v1/completions", "/v1/chat/completions", "/v1/responses"
    for name, text in TEXTS.items():
        # Of a model that is not there: what tokenising them takes is another matter.
        body = filled(b'{"model":"none","prompt":"', text, b'"}')
        yield name, completions, body
        yield (
            f"{name} in a message",
            chat,
            body.replace(b'"prompt":', b'"messages":[{"role":"user","content":')[:-1] + b"}]}",
        )
    yield "a wide text", completions, filled(b'{"model":"none","prompt":"\xf0\x9f\x98\x80', b"a", b'"}')
    for name, item, numbers in (
        ("token ids", b"49151,", (None, 262_000)),
        ("lists of ids", b"[7],", (None, 16_000)),
        ("texts", b'"ab",', (None, 130_000, 64_000)),
        ("long texts", b'"' + b"b" * 200 + b'",', (None,)),
    ):
        for number in numbers:
            yield f"{name} {number or 'at most'}", completions, filled(b'{"prompt":[', item, item[:-1] + b"]}", number)
    for name, item, numbers in (
        ("floats", b"1.7976931348623157e-300,", (None,)),
        ("short floats", b"0.12345678,", (262_000,)),
        ("long integers", b"9" * 4299 + b",", (None,)),
        ("objects", b"{},", (None, 16_000)),
        ("spaces", b" ", (None,)),
    ):
        for number in numbers:
            body = filled(b'{"model":"none","prompt":"a","x":[', item, b"7]}", number)
            yield f"{name} {number or 'at most'}", completions, body
    yield "one integer", completions, b'{"model":"none","prompt":"a","x":' + b"9" * FITS_BYTES + b"}"
    for depth in (900, 15_000, 4_000_000):
        yield f"nesting {depth}", completions, b'{"model":"none","prompt":"a","x":' + b"[" * depth + b"]" * depth + b"}"
    message, part = b'{"role":"user","content":"a"}', b'{"type":"text","text":"a"}'
    for number in (None, 16_000, 4_000):
        listed = filled(b"[", message + b",", message + b"]", number)
        yield f"messages {number or 'at most'}", chat, b'{"messages":' + listed + b"}"
        yield f"items {number or 'at most'}", responses, b'{"input":' + listed + b"}"
        yield f"messages to count {number or 'at most'}", "/tokenize", b'{"messages":' + listed + b"}"
        yield (
            f"Anthropic's messages {number or 'at most'}",
            "/v1/messages",
            b'{"max_tokens":1,"messages":' + listed + b"}",
        )
        yield f"Ollama's messages {number or 'at most'}", "/api/chat", b'{"model":"smollm2","messages":' + listed + b"}"
        parts = filled(b"[", part + b",", part + b"]", number)
        yield f"parts {number or 'at most'}", chat, b'{"messages":[{"role":"user","content":' + parts + b"}]}"
        tool = b'{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}'
        tools = filled(b"[", tool + b",", tool + b"]", None if number is None else number // 3)
        yield (
            f"tools {number or 'at most'}",
            chat,
            b'{"max_tokens":1,"messages":[' + message + b'],"tools":' + tools + b"}",
        )
        yield (
            f"tools of a response {number or 'at most'}",
            responses,
            b'{"max_output_tokens":1,"input":"a","tools":' + tools + b"}",
        )
    yield "tokens to read", "/detokenize", filled(b'{"tokens":[', b"49151,", b"7]}", 262_000)
    yield (
        "a schema",
        completions,
        b'{"max_tokens":1,"prompt":"a","guided_json":' + b'{"anyOf":[' * 400 + b"{}" + b"]}" * 400 + b"}",
    )
    for number in (1_000_000, 130_000, 64_000):
        keys = b",".join(b'"k%d":1' % key for key in range(number))[: FITS_BYTES - 100].rpartition(b",")[0]
        yield f"keys {number}", completions, b'{"model":"none","prompt":"a",' + keys + b"}"
        yield f"biases {number}", completions, b'{"model":"none","prompt":"a","logit_bias":{' + keys + b"}}"
    yield "not UTF-8", completions, filled(b'{"prompt":"', b"\xff", b'"}')
    yield "UTF-16", completions, ('{"prompt":"' + "a" * (FITS_BYTES // 2 - 20) + '"}').encode("utf-16")
    yield "zeros", completions, b"\0" * FITS_BYTES


def body_named(name: str) -> tuple[str, bytes]:
    return next((path, body) for found, path, body in bodies() if found == name)


def post(address: str, path: str, body: bytes, headers: dict[str, str] | None = None) -> Statuses:
    answer = CLIENT.post(address + path, content=body, headers={**JSON, **(headers or {})})
    return [answer.status_code]


def at_once(number: int, send: Callable[[int], Statuses]) -> Statuses:
    with ThreadPoolExecutor(number) as threads:
        return [status for statuses in threads.map(send, range(number)) for status in statuses]


def connect(address: str) -> socket.socket:
    host, _, port = address.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT_S)


def statuses_of(received: bytes) -> Statuses:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", received)]


def talk(address: str, said: bytes) -> Statuses:
    """Until the server closes the connection."""
    received = b""
    with connect(address) as connection, contextlib.suppress(OSError):
        connection.sendall(said)
        while piece := connection.recv(1 << 16):
            received += piece
    return statuses_of(received)


def bomb(address: str) -> Statuses:
    """100 MB of zeros, as 100 kB."""
    headers = {"Content-Encoding": "gzip"}
    return post(address, "/v1/completions", gzip.compress(b'{"prompt":"' + b"a" * 100_000_000 + b'"}'), headers)


def tiny_chunks(address: str) -> Statuses:
    """A body a byte a chunk: each is an event to the parser."""
    head = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    return talk(address, head + b"1\r\na\r\n" * 45_000 + b"0\r\n\r\n")


def many_headers(address: str) -> Statuses:
    head = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return talk(address, head + b"a:b\r\n" * 50_000 + b"\r\n")


def large_headers(address: str) -> Statuses:
    head = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return [s for size in (30_000, 60_000, 250_000) for s in talk(address, head + b"A: " + b"b" * size + b"\r\n\r\n")]


def pipelined(address: str) -> Statuses:
    one = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    return at_once(8, lambda _: talk(address, one * 200 + last))


def tiny_requests(address: str) -> Statuses:
    """Many connections that all ask at the same moment."""
    said = POST.replace(b"/v1/completions", b"/tokenize") + b'Content-Length: 15\r\n\r\n{"prompt": "a"}'
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(address)) for _ in range(300)]
        for connection in connections:
            connection.sendall(said)
        return [status for connection in connections for status in statuses_of(connection.recv(1 << 16))]


def connect_storm(address: str) -> Statuses:
    """A thousand connections at once that say nothing and leave."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connection.connect((host, int(port)))
        time.sleep(0.3)
    return []


def slow_bodies(address: str) -> Statuses:
    """Many that never end, and leave."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(address)) for _ in range(200)]
        for connection in connections:
            connection.sendall(POST + b'Content-Length: 1000\r\n\r\n{"prompt')
        for _ in range(5):
            for connection in connections:
                connection.sendall(b"a")
    return []


def together(address: str) -> Statuses:
    """Some of the worst bodies at the same moment."""
    worst = [body_named(name) for name in ("token ids 262000", "emoji", "messages 4000", "floats at most")]
    return at_once(2 * len(worst), lambda number: post(address, *worst[number % len(worst)]))


def logprobs(address: str) -> Statuses:
    """Answers that take longer to word than to ask for: the most likely tokens at every position of a prompt, and of
    many answers."""
    prompt, most = list(range(100, 1300)), {"logprobs": 64, "ignore_eos": True}
    asked: list[dict[str, object]] = [
        {"prompt": [prompt], "echo": True, "max_tokens": 0, **most},
        {"prompt": [prompt], "echo": True, "max_tokens": 1, "stream": True, **most},
        {"prompt": "Count:", "n": 16, "max_tokens": 100, **most},
    ]
    return [status for body in asked for status in post(address, "/v1/completions", json.dumps(body).encode())]


TRAFFIC: dict[str, Callable[[str], Statuses]] = {
    "a gzip bomb": bomb,
    "tiny chunks": tiny_chunks,
    "many headers": many_headers,
    "large headers": large_headers,
    "pipelined requests": pipelined,
    "tiny requests": tiny_requests,
    "a storm of connects": connect_storm,
    "slow bodies": slow_bodies,
    "the worst bodies at once": together,
    "logprobs": logprobs,
}


def long_prompts(address: str) -> Statuses:
    """What has to be refused, or turned into tokens, without the streams."""
    statuses: Statuses = []
    for text in (b"a", b"word ", "é😀".encode()):
        for path, before, after in (
            ("/v1/completions", b'{"prompt":"', b'"}'),
            ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"', b'"}]}'),
            ("/tokenize", b'{"prompt":"', b'"}'),
        ):
            statuses += post(address, path, filled(before, text, after))
    return statuses


def everything() -> Iterator[tuple[str, Callable[[str], Statuses]]]:
    for name, path, body in bodies():
        assert len(body) <= MAX_BYTES, name
        yield name, lambda address, path=path, body=body: post(address, path, body)  # type: ignore[misc]
    yield from TRAFFIC.items()


def shown(statuses: Statuses) -> str:
    return ", ".join(f"{status}: {statuses.count(status)}" for status in sorted(set(statuses)))


# What it does to the server


def buckets(server: RunningServer, name: str) -> dict[float, float]:
    """How many beats of the event loop came no later than each bound."""
    found: dict[float, float] = {}
    for line in server.get("/metrics").text.splitlines():
        if line.startswith(f"twostroke_loop_{name}_seconds_bucket"):
            found[float(line.split('le="')[1].split('"')[0])] = float(line.split()[-1])
    return found


def longest_s(before: dict[float, float], after: dict[float, float]) -> float:
    """The bound that all beats between the two kept."""
    new = {bound_s: number - before.get(bound_s, 0.0) for bound_s, number in after.items()}
    return min(bound_s for bound_s, number in new.items() if number == max(new.values()))


@dataclass
class Stall:
    work_s: float
    """What the loop's own thread worked in one go."""
    lag_s: float
    """How late the loop was, whoever kept it: a thread with Python's lock, or another program."""


def stall(server: RunningServer, send: Callable[[str], Statuses]) -> Stall:
    work, lag = buckets(server, "work"), buckets(server, "lag")
    statuses = send(server.address)
    assert all(status < 500 for status in statuses), shown(statuses)
    time.sleep(0.1)
    return Stall(longest_s(work, buckets(server, "work")), longest_s(lag, buckets(server, "lag")))
