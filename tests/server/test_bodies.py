"""Bodies are refused by what they are made of before a parser is kept busy with them, and each way not to be JSON has a
sentence of its own."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from itertools import pairwise
from typing import Any

import pytest

from tests.server.running import CLIENT, RunningServer
from twostroke.server import bodies
from twostroke.server.bodies import LARGE_BYTES, MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES, PIECE_BYTES, check_large
from twostroke.server.errors import ApiError
from twostroke.server.schemas import MAX_ENTRIES, ChatBody, CompletionBody
from twostroke.server.turns import Turns, Turnstile

MAX_BYTES = 8 * 2**20
TURN_S = 0.05
REFUSED = {
    "token ids": '{"prompt": [' + "7," * (MAX_VALUES + 1) + "7]}",
    "lists": '{"prompt": [' + "[7]," * MAX_CONTAINERS + "[7]]}",
    "objects": '{"prompt": "", "x": [' + "{}, " * MAX_CONTAINERS + "{}]}",
    "nesting": '{"prompt": "", "x": ' + "[" * (LARGE_BYTES + 1),
    "texts": '{"prompt": [' + '"",' * MAX_STRINGS + '""]}',
    "a trick": '{"prompt": "' + "\\\\" * LARGE_BYTES + '", "x": [' + "[]," * MAX_CONTAINERS + "[]]}",
    "escapes": '{"prompt": "' + '\\"' * (MAX_BYTES // 2 - 50) + '"}',
}
TAKEN = {
    "text": '{"prompt": "' + "a" * (MAX_BYTES - 50) + '"}',
    "code in a text": json.dumps({"prompt": 'if (a[0] == "\\") { f(a, b, "{[,"); }\n' * 190_000}),
    "token ids": '{"prompt": [' + "49151," * (MAX_VALUES - 1) + "7]}",
    "lists": '{"prompt": [' + "[7]," * (MAX_CONTAINERS - 3) + "[7]]}",
    "texts": '{"prompt": [' + '"ab",' * (MAX_STRINGS - 4) + '"ab"]}',
    "keys": '{"prompt": "a", ' + ",".join(f'"{key}": 1' for key in range(MAX_STRINGS - 4)) + "}",
    "floats": '{"prompt": "a", "x": [' + "1.7976931348623157e-300," * (MAX_VALUES - 1) + "7]}",
    "integers": '{"prompt": "a", "x": [' + ("9" * 1000 + ",") * 8300 + "7]}",
    "messages": '{"messages": [' + '{"role": "user", "content": "a"},' * MAX_ENTRIES,
}
TAKEN["messages"] = TAKEN["messages"].rstrip(",") + "]}"


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_take_long_to_parse_is_refused(name: str) -> None:
    assert len(REFUSED[name]) < MAX_BYTES
    with pytest.raises(ApiError) as refused:
        check_large(REFUSED[name].encode())
    assert refused.value.status_code == 413 and "this server takes" in refused.value.message


def worked_s(work: Any) -> float:
    """The best of many: what another program does to this one's caches is not its own fault."""
    times_s: list[float] = []
    while len(times_s) < 3 or (min(times_s) >= TURN_S and len(times_s) < 20):
        began_s = time.thread_time()
        work()
        times_s.append(time.thread_time() - began_s)
    return min(times_s)


def looked_at_s(body: bytes) -> list[float]:
    """What each piece of the first look takes."""
    pieces, times_s, began_s = bodies._looked_at(body), [], time.thread_time()
    for _ in pieces:
        times_s.append(time.thread_time() - began_s)
        began_s = time.thread_time()
    return times_s


@pytest.mark.parametrize("name", TAKEN)
def test_no_turn_of_what_is_taken_is_long(name: str) -> None:
    """A piece of the first look, parsing, checking the fields: between any two the streams are looked after."""
    body = TAKEN[name].encode()
    assert LARGE_BYTES < len(body) < MAX_BYTES
    looks_s = [looked_at_s(body) for _ in range(3)]
    assert max(min(times_s) for times_s in zip(*looks_s, strict=True)) < TURN_S
    assert worked_s(lambda: bodies.parse_large(body)) < TURN_S
    value, kind = bodies.parse_large(body), ChatBody if name == "messages" else CompletionBody
    assert value == json.loads(body)
    assert worked_s(lambda: kind.model_validate(value)) < TURN_S


def test_pieces_are_cut_nowhere_between_a_backslash_and_what_it_escapes() -> None:
    """Texts that end or go on at the edge of a piece, and hold what would be too much outside of them."""
    inside = "[" * (MAX_CONTAINERS + 1)
    for shift in range(6):
        for edge in ('\\"', "\\\\", '\\\\\\"', '"'):
            start = '{"a": "' + "x" * (PIECE_BYTES - 10 + shift)
            check_large((start + (edge * 4 if edge != '"' else "") + inside + '"}').encode())
            with pytest.raises(ApiError, match="lists and objects"):
                check_large((start + '", "b": ' + inside + '"').encode())


@pytest.mark.parametrize("parse", [bodies.parse, bodies.parse_large])
@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (gzip.compress(b'{"prompt": "a"}', mtime=0), 415, "compressed, as gzip by its first bytes"),
        (b'{"prompt": "a\xffb"}', 400, "not valid UTF-8: the byte 0xff at position 13"),
        (b'{"prompt": "\xed\xa0\x80"}', 400, "not valid UTF-8: the byte 0xed at position 12"),
        ('{"prompt": "a"}'.encode("utf-16"), 400, "must be UTF-8, and holds a zero byte"),
        (b'{"a": ' * 5000 + b"1" + b"}" * 5000, 400, "nested too deeply"),
        (b"[" * 100_000, 400, "nested too deeply"),
        (b'{"a": 1,\n "b" 2}', 400, "not valid JSON"),
        (b'{"a": 1,\n "b" 2}', 400, "line 2 column"),
        (b'{"a": ', 400, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", 400, "number"),
    ],
)
def test_each_way_not_to_be_json_has_its_own_sentence(parse: Any, body: bytes, status: int, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse(body)
    assert refused.value.status_code == status and words in refused.value.message


def test_a_byte_order_mark_is_passed_over() -> None:
    assert bodies.parse(b'\xef\xbb\xbf{"a": 1}') == bodies.parse_large(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


@pytest.mark.parametrize("size", [10, 2 * LARGE_BYTES])
def test_sentences_at_a_real_server(server: RunningServer, size: int) -> None:
    text = b"a" * size

    def error(body: bytes, **headers: str) -> tuple[int, str]:
        named = {
            "Content-Type": "application/json",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        answer = CLIENT.post(f"{server.base_url}/completions", content=body, headers=named)
        return answer.status_code, answer.json()["error"]["message"]

    packed = gzip.compress(b'{"prompt": "' + text + b'"}')
    assert error(packed, Content_Encoding="gzip") == (
        415,
        "the body is compressed, as its Content-Encoding says: 'gzip'; this server takes plain JSON only",
    )
    assert error(b'{"prompt": "' + text + b'\xff"}') == (
        400,
        f"the body is not valid UTF-8: the byte 0xff at position {12 + size} cannot stand there",
    )
    deep = b'{"prompt": "' + text + b'", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    assert error(deep) == (400, "the body is nested too deeply: too many lists or objects lie in one another")
    assert error(b'{"model": "none", "prompt": "' + text + b'"}', Content_Encoding="identity")[0] == 404


def test_one_passes_each_time_the_loop_comes_round() -> None:
    """Whatever is there in the same moment; and what fails keeps nobody from its turn."""

    async def scenario() -> list[object]:
        turnstile, seen = Turnstile(), list[object]()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: seen.append(type(context["exception"])))

        def fails() -> None:
            raise ValueError

        for number in range(3):
            turnstile.enter(lambda number=number: seen.append(number))  # type: ignore[misc]
        turnstile.enter(fails)
        turnstile.enter(lambda: seen.append("after"))
        for number in range(8):
            seen.append(f"round {number}")
            await asyncio.sleep(0)
        return seen

    seen = asyncio.run(scenario())
    assert seen[0] == 0 and [entry for entry in seen if not str(entry).startswith("round")] == [
        0,
        1,
        2,
        ValueError,
        "after",
    ]
    positions = [seen.index(entry) for entry in (0, 1, 2, "after")]
    assert all(later - earlier >= 2 for earlier, later in pairwise(positions))  # a round between


def test_long_pieces_take_turns_and_leave_half_of_the_time() -> None:
    async def scenario() -> list[tuple[float, float, int]]:
        turns, rounds, worked = Turns(), 0, list[tuple[float, float, int]]()

        async def work() -> None:
            async with turns:
                began_s = time.perf_counter()
                time.sleep(0.03)
                worked.append((began_s, time.perf_counter(), rounds))

        tasks = [asyncio.create_task(work()) for _ in range(4)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            rounds += 1
        return worked

    for (began_s, ended_s, round_before), (next_s, _, round_after) in pairwise(asyncio.run(scenario())):
        assert next_s - ended_s > 0.99 * (ended_s - began_s) and round_after > round_before
