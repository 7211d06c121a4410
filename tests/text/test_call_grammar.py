"""Answers with tools in them: what their grammars take, in every format, is what the parser reads back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from twostroke.core.grammar import GrammarSpec
from twostroke.text.grammar import GrammarCompiler, Vocabulary
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tool_parsers.call_grammar import answer_grammar, calls_grammar, either_grammar
from twostroke.text.tool_parsers.custom_input import CustomInput
from twostroke.text.tool_parsers.formats import ToolFormat
from twostroke.text.tool_parsers.known_formats import HARMONY, HERMES, MISTRAL, MISTRAL_ARGS

from .test_tool_parsers import JSON_FORMATS, takes_tokens, written

CLOSED: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
LARK = 'start: expr\nexpr: NUMBER (OPERATOR NUMBER)*\nOPERATOR: "+" | "}}" | "\\""\nNUMBER: /[0-9]{1,3}/'
FUNCTIONS: list[dict[str, Any]] = [{"name": "first", "parameters": CLOSED, "strict": True}, {"name": "second"}]
CALCULATOR = {"name": "calculate", "lark": LARK}
Takes = Callable[[GrammarSpec, str], bool]


@pytest.fixture(scope="module")
def takes(smollm2_tokenizer: Tokenizer) -> Takes:
    compiler = GrammarCompiler(Vocabulary.of(smollm2_tokenizer))

    return lambda spec, text: takes_tokens(compiler.matcher(spec), [*smollm2_tokenizer.encode(text), 2])


def raw(tool_format: ToolFormat, text: str) -> str:
    """A call of the calculator, its input as it stands."""
    return one(tool_format, "calculate", f'{{"input": "{text}"}}')


def one(tool_format: ToolFormat, name: str, arguments: str) -> str:
    return written(tool_format, [(name, arguments)]).replace("[TOOL_CALLS] ", "[TOOL_CALLS]")


def read(tool_format: ToolFormat, pieces: list[str], **options: Any) -> tuple[str, list[list[str]], int]:
    """Content, names and texts of the calls, and how many are whole."""
    parser = tool_format.parser(**options)
    content, calls = "", []
    for split in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        content += split.content
        for number, name, text in split.calls:
            if name is not None:
                calls.append([name, ""])
            calls[number][1] += text
    return content, calls, len(parser.finished)


@pytest.mark.parametrize("tool_format", JSON_FORMATS.values(), ids=JSON_FORMATS)
def test_an_answer_may_have_calls_in_it(tool_format: ToolFormat, takes: Takes) -> None:
    call = one(tool_format, "second", '{"x": "y"}')
    behind = "" if tool_format is HARMONY or tool_format.wrapper is not None else call
    before = "" if tool_format is HARMONY or tool_format.begins_bare else "Let me see {it}.\n"
    for only_one in (True, False):
        spec = answer_grammar(tool_format, FUNCTIONS, {}, only_one=only_one)
        assert takes(spec, 'Just a text, with "quotes" and <tags>.\n') and takes(spec, "")
        assert takes(spec, before + call)
        assert takes(spec, one(tool_format, "first", '{"a": 1}'))
        assert not takes(spec, one(tool_format, "first", '{"b": 1}'))  # it is strict
        assert not takes(spec, one(tool_format, "third", "{}"))
        if behind:
            assert takes(spec, before + call + behind) == (not only_one)
            assert takes(spec, before + call + "\nDone.") == (not only_one)


@pytest.mark.parametrize("tool_format", JSON_FORMATS.values(), ids=JSON_FORMATS)
def test_an_input_follows_its_grammar_and_is_read_as_it_stands(tool_format: ToolFormat, takes: Takes) -> None:
    text = '1+20}}3"4'  # what looks like the call's end is part of it
    call, tools = raw(tool_format, text), [*FUNCTIONS, CALCULATOR]
    for spec in (
        calls_grammar(tool_format, tools, {}, only_one=False),
        calls_grammar(tool_format, [CALCULATOR], {}, only_one=True),
        answer_grammar(tool_format, tools, {}, only_one=False),
        answer_grammar(tool_format, tools, {}, only_one=True),
    ):
        assert takes(spec, call)
        assert not takes(spec, raw(tool_format, "1+")) and not takes(spec, raw(tool_format, "1234"))
    for cut in range(len(call) + 1):
        assert read(tool_format, [call[:cut], call[cut:]], custom={"calculate": True}) == ("", [["calculate", text]], 1)
        shown = read(tool_format, list(call[:cut]), custom={"calculate": True})
        if cut < len(call):
            assert shown[2] == 0 and all(text.startswith(found) for _, found in shown[1])


@pytest.mark.parametrize("tool_format", [HERMES, MISTRAL, MISTRAL_ARGS], ids=["hermes", "mistral", "mistral-args"])
def test_a_call_with_a_raw_input_is_the_last(tool_format: ToolFormat, takes: Takes) -> None:
    spec = calls_grammar(tool_format, [*FUNCTIONS, CALCULATOR], {}, only_one=False)
    plain, last = one(tool_format, "second", "{}"), raw(tool_format, "7")
    if tool_format is MISTRAL:
        joined = plain.removesuffix("]") + ", " + last.removeprefix("[TOOL_CALLS][")
    else:
        joined = plain + ("\n" if tool_format is HERMES else "") + last
    assert takes(spec, joined)
    assert read(tool_format, [joined], custom={"calculate": True})[1:] == ([["second", "{}"], ["calculate", "7"]], 2)


@pytest.mark.parametrize("tool_format", [HERMES, MISTRAL, MISTRAL_ARGS], ids=["hermes", "mistral", "mistral-args"])
def test_calls_or_json(tool_format: ToolFormat, takes: Takes) -> None:
    spec = either_grammar(tool_format, FUNCTIONS, {}, json.dumps(CLOSED), only_one=False)
    assert takes(spec, '{"a": 5}') and takes(spec, one(tool_format, "second", '{"any": "thing"}'))
    assert not takes(spec, '{"b": 5}') and not takes(spec, "Hello.") and not takes(spec, '{"a": 5} and more')


@pytest.mark.parametrize("tool_format", JSON_FORMATS.values(), ids=JSON_FORMATS)
def test_no_more_calls_are_read_than_were_wanted(tool_format: ToolFormat) -> None:
    text = written(tool_format, [("a", '{"x": 1}'), ("b", "{}")])
    for pieces in ([text], list(text)):
        assert read(tool_format, pieces, max_calls=1) == ("", [["a", '{"x": 1}']], 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "plain"}', "plain"),
        ('{ "input" : "a \\"b\\" \\\\ \\n \\u00e9 \\ud83d\\ude00 \\/"}', 'a "b" \\ \n \u00e9 \U0001f600 /'),
        ('{"input": ""}', ""),
        ('{"input": "half \\ud83d of it"}', "half ? of it"),
        ('{"code": "print(1)"}', "print(1)"),
        ('{"a": "x", "b": 1}', '{"a": "x", "b": 1}'),
        ('{"input": 5}', '{"input": 5}'),
        ("{}", "{}"),
    ],
)
def test_an_input_comes_out_of_arguments(arguments: str, text: str) -> None:
    for cut in range(len(arguments) + 1):
        reader = CustomInput()
        assert reader.push(arguments[:cut]) + reader.push(arguments[cut:]) + reader.finish() == text
    reader = CustomInput()
    pieces = [reader.push(character) for character in arguments]
    assert "".join(pieces) + reader.finish() == text


def test_gpt_oss_may_think_before_a_call_and_opens_what_it_says(takes: Takes, smollm2_tokenizer: Tokenizer) -> None:
    """Over control tokens that this vocabulary has, in the places of Harmony's: they end a text, as those do."""
    channel = message = "<|im_start|>"  # the other control token here is an end of text
    own = replace(
        HARMONY,
        opening=f"{channel}commentary to=functions.",
        after_name=f" json{message}",
        preface=(f"{channel}analysis{message}", f"{channel}assistant"),
        answer_opening=f"{channel}final{message}",
    )
    special = smollm2_tokenizer.special_tokens
    thought, answer = f"{channel}analysis{message}I see.{channel}assistant", f"{channel}final{message}"
    call = f'{own.opening}first{own.after_name}{{"a": 1}}'
    required = calls_grammar(own, FUNCTIONS, special, only_one=True)
    assert takes(required, call) and takes(required, thought + call)
    assert not takes(required, thought + answer + "No.") and not takes(required, thought)
    free = answer_grammar(own, FUNCTIONS, special, only_one=True)
    assert takes(free, thought + answer + "No.") and takes(free, thought + call) and takes(free, answer + "No.")
    either = either_grammar(own, FUNCTIONS, special, '{"type": "integer"}', only_one=True)
    assert takes(either, thought + answer + "7") and takes(either, thought + call)
    assert not takes(either, thought + answer + "seven")
