"""Turns as each template reads them: thoughts under its name, results in its place, as many calls as it takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.text.agent_templates import GEMMA4, GEMMA4_INTERLEAVED, GLM46, GPT_OSS, KIMI_K2, LFM25
from twostroke.core.errors import BadRequestError
from twostroke.server.told_tools import told_of_tools
from twostroke.text.chat_template import ChatTemplate
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tool_parsers.formats import ToolFormat
from twostroke.text.tool_parsers.known_formats import GEMMA4 as GEMMA4_FORMAT
from twostroke.text.tool_parsers.known_formats import HERMES

ASK = {"role": "user", "content": "Roll."}


def call(name: str, function: str = "roll") -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": function, "arguments": "{}"}}


def calling(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def result(name: str | None, content: Any = "4") -> dict[str, Any]:
    return {"role": "tool", "content": content} | ({} if name is None else {"tool_call_id": name})


def told(template: str, messages: list[dict[str, Any]], tool_format: ToolFormat = HERMES) -> list[dict[str, Any]]:
    return told_of_tools(messages, [], cast(Tokenizer, SimpleNamespace(chat_template=template)), tool_format)


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    made = ChatTemplate(template, "<s>", "</s>")
    try:
        return made.render(told(template, messages, GEMMA4_FORMAT))
    finally:
        made.close()


@pytest.mark.parametrize("template", [GEMMA4, GEMMA4_INTERLEAVED])
def test_results_stand_in_the_message_that_called(template: str) -> None:
    messages = [ASK, calling(call("a")), result("a")]
    text = rendered(template, messages)
    said = '<|turn>model\n<|tool_call>call:roll{}<tool_call|><|tool_response>response:roll{value:<|"|>4<|"|>}'
    assert said + "<tool_response|><|channel>thought\n<channel|>" in text and "<|turn>tool" not in text
    text = rendered(template, [*messages, {"role": "assistant", "content": "A four."}, ASK])
    assert said + "<tool_response|>A four.<turn|>\n<|turn>user\n" in text


def test_results_keep_their_text_and_their_order() -> None:
    messages = [ASK, calling(call("a"), call("b", "look"), content="Both."), result("b", '{"x": 1.50}'), result("a")]
    both = [{"name": "look", "response": '{"x": 1.50}'}, {"name": "roll", "response": "4"}]
    found = told(GEMMA4, messages)
    assert found[1] == {"role": "assistant", "content": "Both."}
    assert [entry["function"]["name"] for entry in found[2]["tool_calls"]] == ["roll", "look"]
    assert found[2]["tool_responses"] == both and found[2]["content"] == "" and len(found) == 3


def test_results_in_parts_and_results_of_no_call() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    found = told(GEMMA4, [ASK, calling(call("a")), result(None, parts), ASK, {**result("z"), "name": "other"}])
    assert found[1]["tool_responses"] == [{"name": "roll", "response": "one\ntwo"}]
    assert found[3] == {"role": "assistant", "content": "", "tool_responses": [{"name": "other", "response": "4"}]}
    with pytest.raises(BadRequestError, match=r"messages\[2\].content\[0\] must be a part of type text"):
        told(GEMMA4, [ASK, calling(call("a")), result("a", [{"type": "image_url"}])])


def test_a_second_answer_is_a_turn_of_its_own() -> None:
    answers = [{"role": "assistant", "content": text} for text in ("A four.", "Again?")]
    found = told(GEMMA4, [ASK, calling(call("a")), result("a"), *answers])
    assert [message.get("content") for message in found] == ["Roll.", "A four.", "Again?"]


def test_a_template_that_reads_results_where_they_are_gets_them_there() -> None:
    both = GEMMA4 + "{% for turn in messages if turn['role'] == 'tool' %}{{ turn.content }}{% endfor %}"
    for template in (both, GLM46):
        found = told(template, [ASK, calling(call("a")), result("a")])
        assert [message["role"] for message in found] == ["user", "assistant", "tool"]


def test_thoughts_have_the_name_that_the_template_reads() -> None:
    turn = calling(call("a"), reasoning_content="Hm.", content="Well.")
    assert told(LFM25, [ASK, turn])[1]["thinking"] == "Hm." and told(LFM25, [ASK, turn])[1]["content"] == "Well."
    assert told("{{ tools }}{{ message['reasoning'] }}", [ASK, turn])[1]["reasoning"] == "Hm."
    for template in (GLM46, KIMI_K2):
        assert "thinking" not in told(template, [ASK, turn])[1]
    assert told(GPT_OSS, [ASK, turn])[1]["thinking"] == "Hm.\n\nWell."
    assert "thinking" not in told("{% if enable_thinking %}{{ tools }}{% endif %}", [ASK, turn])[1]
    own = {**turn, "thinking": "My own."}
    assert told(LFM25, [ASK, own])[1]["thinking"] == "My own."


@pytest.mark.parametrize("template", [GLM46, KIMI_K2, LFM25, GPT_OSS, "{{ tools }}{{ message['reasoning'] }}"])
def test_a_thought_may_come_as_reasoning(template: str) -> None:
    """Other servers answer with that name, and clients send it back."""
    turn = calling(call("a"), content="Well.")

    def shown(**more: Any) -> dict[str, Any]:
        return {name: value for name, value in told(template, [ASK, turn | more])[1].items() if name != "reasoning"}

    for nothing in ({}, {"reasoning_content": None}, {"reasoning_content": ""}):
        assert shown(reasoning="Hm.", **nothing) == shown(reasoning_content="Hm.") != shown()
    assert shown(reasoning_content="Hm.", reasoning="Not this.") == shown(reasoning_content="Hm.")
    for no_text in (None, [], {"effort": "low"}):
        assert shown(reasoning=no_text) == shown()


def test_a_template_of_one_call_gets_one_in_a_message() -> None:
    results = [result("b", "2"), result("a", "1"), result(None, "3")]
    turn = calling(call("a"), call("b"), call("c", "look"), reasoning_content="Hm.")
    found = told(GPT_OSS, [ASK, turn, *results])
    shown = [
        (message["role"], message.get("thinking"), message.get("content"))
        if message["role"] != "assistant"
        else [entry["id"] for entry in message["tool_calls"]]
        for message in found
    ]
    assert shown[1:] == [["a"], ("tool", None, "1"), ["b"], ("tool", None, "2"), ["c"], ("tool", None, "3")]
    assert [message.get("thinking") for message in found if message["role"] == "assistant"] == ["Hm.", None, None]
    assert len(told(GLM46, [ASK, turn, *results])) == 5
