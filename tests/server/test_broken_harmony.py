"""Whatever a model writes of Harmony's words, in whatever order: every API answers, whole and streamed alike. Nothing
of it is an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tests.server.running import RunningServer, running_server
from tests.server.scripted_turns import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START, make_scripted_turns
from twostroke.core.events import TokenEvent
from twostroke.core.sequence import FinishReason
from twostroke.server.calls import Answer
from twostroke.server.parsing import AnswerParser
from twostroke.server.response_items import CALLS, OutputItems
from twostroke.text.harmony import HarmonySplitter
from twostroke.text.tool_parsers.known_formats import HARMONY

WORDS = ["assistant", "analysis", "commentary", "final", "json", " to=functions.roll", " to=functions.", " to=python"]
TEXTS = [" ", "\n", "<|", "<|end", "|>", "Hello", '{"sides": 6}', "{", "}", '"', "ß", "\ufffd"]
PIECES = [START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN, *WORDS, *TEXTS]
MESSAGES = [
    f"{CHANNEL}analysis{MESSAGE}Hm.{END}{START}assistant",
    f'{CHANNEL}commentary to=functions.roll{CONSTRAIN}json{MESSAGE}{{"sides": 6}}{END}{START}assistant',
    f'{CHANNEL}commentary to=functions.cut{MESSAGE}{{"sides":{END}{START}assistant',
    f"{CHANNEL}final{MESSAGE}Well.{END}{START}assistant",
]
ROWS = st.lists(st.one_of(st.sampled_from(MESSAGES), st.sampled_from(PIECES)), max_size=16).map("".join)
ENDS = [FinishReason.STOP, FinishReason.LENGTH]


@examples(400)
@given(ROWS, st.data())
def test_any_row_becomes_sound_items(row: str, data: st.DataObject) -> None:
    """What the server makes of an answer's events, however the text was cut into them: a stop string that may have
    begun holds many tokens back, which then come in one."""
    has_calls, end = data.draw(st.booleans()), data.draw(st.sampled_from(ENDS))
    places = sorted(data.draw(st.lists(st.integers(0, len(row)), max_size=6)))
    answer, items = Answer(), OutputItems(HARMONY)
    answer.parser = AnswerParser(HarmonySplitter(has_calls=has_calls), HARMONY.parser() if has_calls else None)
    changes = []
    for start, stop in zip([0, *places], [*places, len(row)], strict=True):
        answer.absorb(TokenEvent("a", 0, (1,), row[start:stop], finish_reason=end if stop == len(row) else None))
        changes += items.push(answer.parts[-1])
        if stop == len(row):
            break
    changes += items.finish(is_cut=end is FinishReason.LENGTH)
    written: dict[int, str] = {}
    for change in changes:
        if change.kind == "added":
            written[change.item.index] = written.get(change.item.index, "") + change.text
    assert all(written.get(item.index, "") == item.text for item in items.items)
    texts = {kind: "".join(item.text for item in items.items if item.kind == kind) for kind in ("reasoning", "message")}
    assert texts["reasoning"] == "".join(parts.reasoning for parts in answer.parts)
    assert "".join(texts["message"].split()) == "".join("".join(parts.content for parts in answer.parts).split())
    calls = [(item.name, item.text) for item in items.items if item.kind in CALLS]
    assert calls == answer.finished_calls()


def test_a_call_that_came_to_nothing_is_not_run_for_the_next() -> None:
    broken, sound, answer = MESSAGES[2], MESSAGES[1], MESSAGES[3]
    parser, items = AnswerParser(HarmonySplitter(has_calls=True), HARMONY.parser()), OutputItems(HARMONY)
    changes = items.push(parser.push(f"{MESSAGES[0]}{broken}{answer}{sound.partition(END)[0]}{CALL}", 1, is_last=True))
    changes += items.finish(is_cut=False)
    shown = [(item.kind, item.name, item.text, item.status) for item in items.items]
    assert shown == [
        ("reasoning", "", "Hm.", "completed"),
        ("message", "", "Well.", "completed"),
        ("function_call", "roll", '{"sides": 6}', "completed"),
    ]
    closed = [(change.item.name, change.item.status) for change in changes if change.kind == "closed"]
    assert closed == [("", "completed"), ("cut", "incomplete"), ("", "completed"), ("roll", "completed")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("broken")
    model = make_scripted_turns(folder / "model")
    with running_server(folder / "log", str(model), "--backend", "reference", "--name", "scripted") as running:
        yield running


TOOL = {"name": "roll_dice", "parameters": {"type": "object"}}
QUESTION = {"role": "user", "content": "Look and roll."}


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


NUM_ROWS = {1.5: 3, 1.8: 8}
"""By temperature: how many differ, of 16 at least."""


@pytest.mark.parametrize("temperature", NUM_ROWS)
@pytest.mark.parametrize("has_tools", [True, False])
def test_chat_answers_broken_rows(server: RunningServer, temperature: float, has_tools: bool) -> None:
    body: dict[str, Any] = {"messages": [QUESTION], "temperature": temperature, "n": 16, "seed": 5, "max_tokens": 60}
    body |= {"stop": ["<|never|>", "functions.never"]}  # text that may be its beginning is held back
    if has_tools:
        body["tools"] = [{"type": "function", "function": TOOL}]
    whole = server.post("/v1/chat/completions", body)
    assert whole.status_code == 200, whole.text
    choices = whole.json()["choices"]
    wanted = [_shown(choice["message"], choice["finish_reason"]) for choice in choices]
    assert [len(calls) for _, _, calls, _ in wanted] == [len(one["message"].get("tool_calls") or []) for one in choices]
    streamed = server.post("/v1/chat/completions", body | {"stream": True})
    assert streamed.status_code == 200 and "error" not in streamed.text
    found: list[dict[str, Any]] = [{"tool_calls": []} for _ in wanted]
    ends = [""] * len(wanted)
    for choice in (choice for event in events_of(streamed.text) for choice in event["choices"]):
        message, delta = found[choice["index"]], choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] = message.get(name, "") + (delta.get(name) or "")
        for call in delta.get("tool_calls") or []:
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
    assert [_shown(message, end) for message, end in zip(found, ends, strict=True)] == wanted
    assert len({(thought, content) for thought, content, _, _ in wanted}) >= NUM_ROWS[temperature]
    assert has_tools == any(calls for _, _, calls, _ in wanted)


def _shown(message: dict[str, Any], end: str) -> tuple[str, str, list[tuple[str, str]], str]:
    calls = []
    for call in message.get("tool_calls") or []:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            assert isinstance(json.loads(arguments), dict)
        except ValueError:  # of a stream: one that came to nothing, which its client cannot run
            continue
        calls.append((name, arguments))
    return message.get("reasoning_content") or "", message.get("content") or "", calls, end


@pytest.mark.parametrize("seed", range(8))
def test_responses_and_messages_answer_broken_rows(server: RunningServer, seed: int) -> None:
    shared: dict[str, Any] = {"model": "scripted", "temperature": 1.7}
    response = {**shared, "input": [QUESTION], "max_output_tokens": 60, "seed": seed}
    response["tools"] = [{"type": "function", **TOOL}]
    whole = server.post("/v1/responses", response)
    assert whole.status_code == 200, whole.text
    events = events_of(server.post("/v1/responses", response | {"stream": True}).text)
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    for items in (whole.json()["output"], events[-1]["response"]["output"]):
        assert [_item(item) for item in items] == [_item(item) for item in whole.json()["output"]]
    message = {**shared, "messages": [QUESTION], "max_tokens": 60}
    message["tools"] = [{"name": "roll_dice", "input_schema": {"type": "object"}}]
    for is_streamed in (False, True):
        answer = server.post("/v1/messages", message | {"stream": is_streamed})
        assert answer.status_code == 200 and '"error"' not in answer.text


def _item(item: dict[str, Any]) -> tuple[str, str]:
    if item["type"] == "function_call":
        assert isinstance(json.loads(item["arguments"]), dict)
        return item["name"], item["arguments"]
    return item["type"], "".join(part["text"] for part in item["content"])
