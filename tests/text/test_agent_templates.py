"""Conversations of the families that call tools and think: what a template writes of a turn is read back to the same
thought, text and calls, and every result is told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.text import agent_templates, more_agent_templates
from twostroke.server.errors import ApiError
from twostroke.server.parsing import AnswerParser, finished_calls
from twostroke.server.told_tools import told_of_tools
from twostroke.text import harmony, reasoning
from twostroke.text.chat_template import ChatTemplate
from twostroke.text.harmony import HarmonySplitter
from twostroke.text.reasoning import MARKERS, ThinkSplitter
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tool_parsers import choose
from twostroke.text.tool_parsers.formats import ToolFormat


@dataclass(frozen=True)
class Family:
    template: str
    tool_format: str
    thoughts: str
    """The parser of its thoughts, as `auto` finds it."""
    end: str = ""
    """What ends a turn."""
    tells: str = "all"
    """Of which turns since the user spoke it is told the thoughts: `all`, `calls` or `none`."""
    vocabulary: tuple[str, ...] = ()
    """What tells its format, where the template does not."""


FAMILIES = {
    "gpt-oss": Family(agent_templates.GPT_OSS, "harmony", "harmony", "<|call|>", "calls"),
    "gemma4": Family(agent_templates.GEMMA4, "gemma4", "channel", "<turn|>", "none"),
    "gemma4-interleaved": Family(agent_templates.GEMMA4_INTERLEAVED, "gemma4", "channel", "<turn|>", "calls"),
    "glm46": Family(agent_templates.GLM46, "glm45", "think"),
    "glm47": Family(agent_templates.GLM47, "glm47", "think"),
    "kimi-k2": Family(agent_templates.KIMI_K2, "kimi-k2", "think", "<|im_end|>", "calls"),
    "lfm2.5": Family(agent_templates.LFM25, "lfm2", "think", "<|im_end|>"),
    "nemotron3": Family(agent_templates.NEMOTRON3, "qwen3-coder", "think", "<|im_end|>"),
    "nemotron2": Family(agent_templates.NEMOTRON2, "nemotron", "think", "<SPECIAL_12>", "none"),
    "granite4": Family(agent_templates.GRANITE4, "hermes", "none", "<|end_of_text|>", "none"),
    "minimax-m2": Family(agent_templates.MINIMAX_M2, "minimax", "think", "[e~["),
    "deepseek-v3.1": Family(
        more_agent_templates.DEEPSEEK_V31, "deepseek-v31", "think", "<｜end▁of▁sentence｜>", "none"
    ),
    "ministral3": Family(more_agent_templates.MINISTRAL3, "mistral-args", "mistral", "</s>", "none"),
    "qwen3.5": Family(more_agent_templates.QWEN3_5, "qwen3-coder", "think", "<|im_end|>"),
    "lfm2": Family(more_agent_templates.LFM2, "lfm2", "none", "<|im_end|>", "none", ("<|tool_call_start|>",)),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "is_exact": {"type": "boolean"},
                    "places": {"type": "array", "items": {"type": "number"}},
                    "more": {"type": "object"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
MANY = {"city": 'São "Paulo", {1}\n[2]', "days": 3, "is_exact": True, "places": [1, -2.5], "more": {"a": ["b", {}]}}


def calling(*calls: tuple[str, str, Any], thought: str | None = None, content: str | None = None) -> dict[str, Any]:
    made = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": json.dumps(arguments)}}
        for name, function, arguments in calls
    ]
    turn: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": made}
    return turn if thought is None else {**turn, "reasoning_content": thought}


def resulting(name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": text}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is it like there?"},
    calling(("a", "look_up", MANY), thought="First the city.\nThen the rest."),
    resulting("a", '{"sky": "grey", "at": 4}'),
    calling(("b", "look_up", {"city": "Oslo"}), ("c", "now", {}), thought="Two at once."),
    resulting("c", "half past one"),
    resulting("b", "rain <b>&</b> wind"),
    calling(("d", "now", {})),
    resulting("d", "two"),
    {"role": "assistant", "content": "Grey, then rain.", "reasoning_content": "That will do."},
    {"role": "user", "content": "Thank you."},
    {"role": "assistant", "content": "Not at all."},
]
TURNS = [index for index, message in enumerate(CONVERSATION) if message["role"] == "assistant"]


def tokenizer_of(family: Family) -> Tokenizer:
    def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    signs = harmony.SIGNS if family.thoughts == "harmony" else ()  # its template has not all of them
    special = dict.fromkeys((*signs, *family.vocabulary), 0)
    found = SimpleNamespace(chat_template=family.template, special_tokens=special, encode=encode)
    return cast(Tokenizer, found)


def rendered(family: Family, messages: list[dict[str, Any]], tool_format: ToolFormat, *, is_asked: bool) -> str:
    told = told_of_tools(messages, TOOLS, tokenizer_of(family), tool_format)
    template = ChatTemplate(family.template, "<s>", "</s>")
    try:
        return template.render(told, tools=TOOLS, add_generation_prompt=is_asked, enable_thinking=True)
    finally:
        template.close()


def read(family: Family, tool_format: ToolFormat, prompt: str, answer: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """As the server reads it: the thought, the text, the calls."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}  # type: ignore[index]
    thoughts: ThinkSplitter | HarmonySplitter | None = None
    if family.thoughts == "harmony":
        thoughts = HarmonySplitter(has_calls=True)
    elif (markers := MARKERS.get(family.thoughts)) is not None:
        opening = tool_format.first_marker if tool_format.ends_thought else ""
        is_open = markers.are_open_in(prompt.rstrip())
        thoughts = ThinkSplitter(markers, is_open=is_open, call_opening=opening)
    parser = AnswerParser(thoughts, tool_format.parser(schemas=schemas))  # type: ignore[arg-type]
    parts = [parser.push(character, 1, is_last=False) for character in answer]
    parts.append(parser.push("", 0, is_last=True))
    calls = [(name, json.loads(arguments)) for name, arguments in finished_calls(parts, parser.finished)]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts), calls


@pytest.mark.parametrize("name", FAMILIES)
def test_formats_are_known_by_the_template(name: str) -> None:
    family = FAMILIES[name]
    assert choose("auto", tokenizer_of(family)).tool_format.name == family.tool_format
    assert reasoning.choose("auto", tokenizer_of(family)).parser == family.thoughts


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("place", TURNS)
def test_a_turn_is_read_back_as_it_was(name: str, place: int) -> None:
    family, turn = FAMILIES[name], CONVERSATION[place]
    tool_format = choose("auto", tokenizer_of(family)).tool_format
    prompt = rendered(family, CONVERSATION[:place], tool_format, is_asked=True)
    whole = rendered(family, CONVERSATION[: place + 1], tool_format, is_asked=False)
    thought = turn.get("reasoning_content", "")
    is_told = family.tells == "all" or (family.tells == "calls" and "tool_calls" in turn)
    answer = whole.removeprefix(prompt)
    if answer == whole:  # of what came before, thoughts are told no more; or one was opened, and none is told
        opening = prompt.removeprefix(rendered(family, CONVERSATION[:place], tool_format, is_asked=False))
        prompt, _, answer = whole.rpartition(opening.rstrip().removesuffix("<think>"))
        assert opening and not (thought and is_told)
    if name == "gemma4":  # behind a result its template opens the model's turn once more
        answer = answer.removeprefix("<|turn>model\n")
    answer = answer.rstrip()
    ends = (family.end, "<|end|>") if name == "gpt-oss" else (family.end,)
    for end in ends:
        answer = answer.removesuffix(end)
    is_closed = answer.startswith("</think>")
    found = read(family, tool_format, prompt, ("<think>" if is_closed else "") + answer)
    wanted = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in turn.get("tool_calls", [])
    ]
    assert found[0].strip() == (thought if is_told else "")
    assert found[1].strip() == (turn["content"] or "")
    assert found[2] == wanted


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("wrong", [{}, {"a": 1}, ["a"], 7, False], ids=json.dumps)
def test_ids_that_are_no_texts_are_refused(name: str, wrong: Any) -> None:
    family = FAMILIES[name]
    tool_format = choose("auto", tokenizer_of(family)).tool_format
    turns = [CONVERSATION[1], calling(("a", "now", {})), resulting("a", "two")]
    call = turns[1]["tool_calls"][0]
    wrong_call = {**turns[1], "tool_calls": [{**call, "id": wrong}]}
    wrong_result = {**turns[2], "tool_call_id": wrong}
    for messages, field in (
        ([turns[0], wrong_call, turns[2]], "messages[1].tool_calls[0].id"),
        ([turns[0], turns[1], wrong_result], "messages[2].tool_call_id"),
    ):
        with pytest.raises(ApiError) as raised:
            told_of_tools(messages, TOOLS, tokenizer_of(family), tool_format)
        assert (raised.value.status_code, raised.value.param) == (400, field)
        assert raised.value.message == f"{field} must be a string"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_result_is_told_behind_its_call(name: str) -> None:
    family = FAMILIES[name]
    tool_format = choose("auto", tokenizer_of(family)).tool_format
    text = rendered(family, CONVERSATION, tool_format, is_asked=True)
    places = []
    for message in CONVERSATION:
        if message["role"] == "tool":
            own = message["content"] if name != "gpt-oss" else json.dumps(message["content"])
            assert text.count(own) == 1
            places.append(text.index(own))
    if name == "gpt-oss":  # a call at a time: the results of two that came together are in the order of their calls
        places[1], places[2] = places[2], places[1]
    assert places == sorted(places) and places[0] > text.index("Paulo")
