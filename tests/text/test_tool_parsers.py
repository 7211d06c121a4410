"""Tool calls of every format, cut at every position, come out the same; what is no call stays text."""

from __future__ import annotations

import json
import random
import re
from types import SimpleNamespace
from typing import cast

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.core.grammar import TokenMatcher
from twostroke.core.setting import settings_of
from twostroke.server.settings import ServerSettings
from twostroke.text import reasoning
from twostroke.text.grammar import GrammarCompiler, Vocabulary
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tool_parsers import FORMATS, choose
from twostroke.text.tool_parsers.formats import ToolFormat
from twostroke.text.tool_parsers.known_formats import GEMMA4, HERMES, LLAMA3, MINIMAX, MISTRAL, MISTRAL_ARGS

JSON_FORMATS = {name: one for name, one in FORMATS.items() if one.arguments == "json"}
"""The others are in `test_written_arguments.py`."""
ARGUMENTS = [
    '{"city": "Paris", "days": [1, 2, {"a": null}]}',
    '{"text": "a \\"quoted\\" {brace} </tool_call> [TOOL_CALLS] \\\\"}',
    "{}",
    '{ "deep" : {"er": {"est": -1.5e3}} }',
]


def takes_tokens(matcher: TokenMatcher, token_ids: list[int]) -> bool:
    for token_id in token_ids:
        if not matcher.allowed()[token_id // 8] >> token_id % 8 & 1:
            return False
        matcher.advance(token_id)
    return True


OBJECT = '{"name": "%s", "arguments": %s}'
LLAMA_OBJECT = '{"name": "%s", "parameters": %s}'
WRITTEN = {
    "hermes": ("", f"<tool_call>\n{OBJECT}\n</tool_call>", "\n", ""),
    "llama3": ("", LLAMA_OBJECT, "; ", ""),
    "llama4": ("", LLAMA_OBJECT, "; ", ""),
    "harmony": ("", "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s", "", ""),
    "mistral-args": ("", "[TOOL_CALLS]%s[ARGS]%s", "", ""),
    "mistral": ("[TOOL_CALLS] [", OBJECT, ", ", "]"),
    "nemotron": ("<TOOLCALL>[", OBJECT, ", ", "]</TOOLCALL>"),
    "granite": ("<|tool_call|>[", OBJECT, ", ", "]"),
    "phi4": ("<|tool_call|>[", OBJECT, ", ", "]<|/tool_call|>"),
    "hunyuan-list": ("<tool_calls>[", OBJECT, ", ", "]</tool_calls>"),
    "hunyuan": ("<tool_calls>", "<tool_call>%s\n```json\n%s\n```</tool_call>", "", "</tool_calls>"),
    "deepseek-v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek-v31": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi-k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>%s<|tool_call_end|>",
        "",
        "<|tool_calls_section_end|>",
    ),
}
"""What stands before calls, a call, what stands between two and what behind them, as each format's makers write it."""
BARE = ("llama3", "llama4")
"""Their calls are whole answers."""


def written(tool_format: ToolFormat, calls: list[tuple[str, str]]) -> str:
    """Calls as a model of this format writes them."""
    before, call, between, behind = WRITTEN[tool_format.name]
    return before + between.join(call % (name, arguments) for name, arguments in calls) + behind


def parsed(tool_format: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = tool_format.parser()
    content, names, arguments = "", [], []
    for split in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        content += split.content
        for index, name, text in split.calls:
            if name is not None:
                assert index == len(names)
                names.append(name)
                arguments.append("")
            arguments[index] += text
    return content, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize("tool_format", JSON_FORMATS.values(), ids=JSON_FORMATS)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_call_cut_at_every_position(tool_format: ToolFormat, arguments: str) -> None:
    text = written(tool_format, [("get_weather", arguments)])
    for cut in range(len(text) + 1):
        assert parsed(tool_format, [text[:cut], text[cut:]]) == ("", [("get_weather", arguments)])
    assert parsed(tool_format, list(text)) == ("", [("get_weather", arguments)])


@pytest.mark.parametrize("tool_format", JSON_FORMATS.values(), ids=JSON_FORMATS)
def test_several_calls_in_random_pieces(tool_format: ToolFormat) -> None:
    calls = [(f"tool_{index}", arguments) for index, arguments in enumerate(ARGUMENTS)]
    text, drawn = written(tool_format, calls), random.Random(1)
    for _ in range(50):
        cuts = sorted(drawn.sample(range(len(text)), 9))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(tool_format, pieces) == ("", calls)


@pytest.mark.parametrize("tool_format", [HERMES, MISTRAL, MISTRAL_ARGS])
def test_text_before_a_call_is_content(tool_format: ToolFormat) -> None:
    text = "Let me look.\n\n" + written(tool_format, [("look", "{}")])
    assert parsed(tool_format, list(text)) == ("Let me look.", [("look", "{}")])
    assert parsed(tool_format, [text]) == ("Let me look.", [("look", "{}")])


def test_llama3_after_its_tag_and_other_spellings_of_arguments() -> None:
    assert parsed(LLAMA3, list('<|python_tag|>{"name": "a", "parameters": {"x": 1}}')) == ("", [("a", '{"x": 1}')])
    assert parsed(HERMES, list('<tool_call>{"arguments": {"x": 1}, "name": "a"}</tool_call>')) == (
        "",
        [("a", '{"x": 1}')],
    )
    assert parsed(HERMES, ['<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>']) == (
        "",
        [("a", '{"x": 1}')],
    )


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "Plain words, a < b, [TOOL and <tool_ca too.\n",
        '{"answer": 42}',
        "<tool_call>\nnot JSON",
        '<tool_call>{"name": 7}</tool_call>',
        '[TOOL_CALLS] [{"no": "name"}]',
        "[TOOL_CALLS][ARGS]{}",
        "[TOOL_CALLS]no arguments",
        '<tool_call>{"na',
        "",
        " \n",
    ],
)
def test_what_is_no_call_stays_as_it_is(tool_format: ToolFormat, text: str) -> None:
    for pieces in ([text], list(text)):
        assert parsed(tool_format, pieces) == (text, [])


def test_mistrals_own_call_ids_are_no_part_of_a_name() -> None:
    text = '[TOOL_CALLS]a[CALL_ID]AbC123xyz[ARGS]{"x": 1}[TOOL_CALLS]b[ARGS] {"y": [{}]} And more.'
    assert parsed(MISTRAL_ARGS, list(text)) == (" And more.", [("a", '{"x": 1}'), ("b", '{"y": [{}]}')])
    assert parsed(MISTRAL_ARGS, [text[:40], text[40:]]) == parsed(MISTRAL_ARGS, [text])


@pytest.mark.parametrize("tool_format", JSON_FORMATS.values(), ids=JSON_FORMATS)
@pytest.mark.parametrize("said", ["", "Let me look.\n"])
def test_an_answer_that_was_cut_shows_nothing_of_a_call(tool_format: ToolFormat, said: str) -> None:
    """At every position, however it came: a call is whole or none, and no marker is content."""
    if said and tool_format.name in BARE:
        said, opening = "Let me look.\n", tool_format.first_marker
    else:
        opening = ""
    calls = [(f"tool_{index}", arguments) for index, arguments in enumerate(ARGUMENTS)]
    text = said + opening + written(tool_format, calls)
    ends, start = [], len(said)
    for name, arguments in calls:
        start = text.index(arguments, text.index(name, start)) + len(arguments)
        ends.append(start)
    for cut in range(len(text) + 1):
        num_finished = sum(end <= cut for end in ends)
        for pieces in ([text[:cut]], list(text[:cut])):
            parser = tool_format.parser()
            content, names, arguments = "", [], []
            for split in [*(parser.push(piece) for piece in pieces), parser.finish(is_cut=True)]:
                content += split.content
                for index, name, piece in split.calls:
                    if name is not None:
                        names.append(name)
                        arguments.append("")
                    arguments[index] += piece
            assert content.strip() == text[: min(cut, len(said))].strip()
            assert len(parser.finished) == num_finished
            assert list(zip(names, arguments, strict=True))[:num_finished] == calls[:num_finished]
            for unfinished in arguments[num_finished:]:  # in a stream it was begun, and nobody can take it for a whole
                assert calls[num_finished][1].startswith(unfinished) and unfinished.startswith("{")
                with pytest.raises(ValueError, match=r"."):
                    json.loads(unfinished)


def test_a_call_without_arguments_is_one_once_it_ends() -> None:
    for text in ('<tool_call>{"name": "a"}', '<tool_call>{"name": "a", "arguments": null}'):
        for cut in range(len(text)):
            parser = HERMES.parser()
            assert not parser.push(text[:cut]).calls and not parser.finish(is_cut=True).content
        assert parsed(HERMES, [text]) == ("", [("a", "{}")])


def test_other_objects_that_were_cut_are_answers() -> None:
    for text in ('{"answer": 4', "{", '{"na', '{"name": "T'):
        parser = LLAMA3.parser()
        assert not parser.push(text).content
        assert parser.finish(is_cut=True).content == (text if "answer" in text else "")


def test_choosing(smollm2_tokenizer: Tokenizer) -> None:
    assert choose("auto", smollm2_tokenizer).tool_format is HERMES
    assert choose("mistral", smollm2_tokenizer).tool_format is MISTRAL
    for template, found in (
        ("[TOOL_CALLS]", MISTRAL),
        ("[TOOL_CALLS]{{ name }}[ARGS]", MISTRAL_ARGS),
        ("{{- '<|tool_call>call:' + function['name'] + '{' -}} {{- '}<tool_call|>' -}}", GEMMA4),
        ("{% set begin = '<minimax:tool_call>' %}{% set end = '</minimax:tool_call>' %}", MINIMAX),
    ):
        known = SimpleNamespace(chat_template=template, special_tokens={})
        assert choose("auto", cast("Tokenizer", known)).tool_format is found
        known = SimpleNamespace(chat_template=None, special_tokens=dict.fromkeys(found.markers, 1))
        assert choose("auto", cast("Tokenizer", known)).tool_format is found
    with pytest.raises(BadRequestError, match="tool parser"):
        choose("other", smollm2_tokenizer)


def test_a_format_goes_by_other_names_too(smollm2_tokenizer: Tokenizer) -> None:
    for name, found in (("kimi_k2", "kimi-k2"), ("Qwen3_XML", "qwen3-coder"), ("granite4", "hermes")):
        assert choose(name, smollm2_tokenizer) == (FORMATS[found], "as asked")


def test_the_options_help_names_every_parser() -> None:
    settings = settings_of(ServerSettings)
    assert set(FORMATS) <= set(re.split(r"[\s,;]+", settings["tool_parser"].help))
    told = settings["reasoning_parser"].help
    assert all(re.search(rf"(^|[\s]){re.escape(name)}[:,;]", told) for name in reasoning.PARSERS)


@pytest.mark.parametrize("tool_format", JSON_FORMATS.values(), ids=JSON_FORMATS)
@pytest.mark.parametrize("only_one", [True, False])
def test_a_grammar_takes_what_its_parser_reads(
    tool_format: ToolFormat, only_one: bool, smollm2_tokenizer: Tokenizer
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    functions = [{"name": "first", "parameters": schema}, {"name": "second"}]
    spec = tool_format.grammar(functions, smollm2_tokenizer.special_tokens, only_one=only_one)
    compiler = GrammarCompiler(Vocabulary.of(smollm2_tokenizer))

    def takes(text: str) -> bool:
        return takes_tokens(compiler.matcher(spec), [*smollm2_tokenizer.encode(text), 2])

    calls = [("first", '{"a": 1}'), ("second", '{"x": "y"}')]
    marker = "[TOOL_CALLS]" if tool_format is MISTRAL else ""
    one = written(tool_format, calls[:1]).replace("[TOOL_CALLS] ", marker)
    two = written(tool_format, calls).replace("[TOOL_CALLS] ", marker)
    assert takes(one)
    assert takes(two) == (not only_one and tool_format.max_calls > 1)
    assert not takes(one.replace("first", "third"))
    assert not takes(one.replace("1", '"one"'))
    assert not takes("Hello.")
    assert parsed(tool_format, [two]) == ("", calls)


def test_a_marker_that_is_a_control_token_is_named_by_its_id() -> None:
    special_tokens = {"[TOOL_CALLS]": 7, "[ARGS]": 8}
    assert "<[7]>" in MISTRAL.grammar([{"name": "a"}], special_tokens, only_one=True).text
    assert "<[8]>" in MISTRAL_ARGS.grammar([{"name": "a"}], special_tokens, only_one=True).text
