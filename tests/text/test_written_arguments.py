"""Formats whose arguments are no JSON: Gemma's, those in tags, those in Python. Calls as their makers' templates write
them, cut at every position, come out as JSON; what their grammars take is what the parser reads back."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from twostroke.core.grammar import GrammarSpec
from twostroke.text.grammar import GrammarCompiler, Vocabulary
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tool_parsers.call_grammar import answer_grammar, calls_grammar, either_grammar
from twostroke.text.tool_parsers.formats import ToolFormat
from twostroke.text.tool_parsers.known_formats import FORMATS as ALL_FORMATS
from twostroke.text.tool_parsers.known_formats import GEMMA4, GLM45, LFM2, MINIMAX, PYTHONIC, QWEN3_CODER

from .test_tool_parsers import takes_tokens

Takes = Callable[[GrammarSpec, str], bool]
FORMATS = {name: one for name, one in ALL_FORMATS.items() if one.arguments != "json"}
PARAMETERS = "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n"
TAGGED = {
    "minimax": (
        *("<minimax:tool_call>\n", '<invoke name="%s">\n', '<parameter name="%s">%s</parameter>\n'),
        *("</invoke>", "\n", "\n</minimax:tool_call>"),
    ),
    "qwen3-coder": (
        *("", "<tool_call>\n<function=%s>\n", "<parameter=%s>\n%s\n</parameter>\n"),
        *("</function>\n</tool_call>", "\n", ""),
    ),
    "seed-oss": (
        *("", "<seed:tool_call>\n<function=%s>\n", "<parameter=%s>%s</parameter>\n"),
        *("</function>\n</seed:tool_call>", "\n", ""),
    ),
    "glm45": ("", "<tool_call>%s\n", PARAMETERS, "</tool_call>", "\n", ""),
    "glm47": ("", "<tool_call>%s", PARAMETERS.replace("\n", ""), "</tool_call>", "", ""),
    "hunyuan3": (
        *("<tool_calls>\n", "<tool_call>%s<tool_sep>\n", PARAMETERS),
        *("</tool_call>", "\n", "\n</tool_calls>"),
    ),
}
"""What stands before all calls, a call's beginning, an argument, a call's end, what is between two and behind all."""
IN_PYTHON = {
    "lfm2": ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "pythonic": ("[", ", ", "]"),
    "olmo3": ("<function_calls>\n", "\n", "\n</function_calls>"),
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"type": "integer"}},
        "exact": {"type": "boolean"},
        "limits": {"type": "object", "properties": {"low": {"type": "number"}, "note": {"type": "string"}}},
        "unit": {"enum": ["celsius", "kelvin"]},
    },
    "required": ["city"],
}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Paris"}),
    (
        "get_weather",
        {
            "city": 'New "York"\n\\ {x: [1, 2]}, <b>\u00e9</b> a:b',
            "days": [1, -2],
            "exact": False,
            "limits": {"low": 1.5e3, "note": "a,b}"},
            "unit": "kelvin",
        },
    ),
    ("ping", {}),
    ("get_weather", {"city": "", "days": [], "limits": {}}),
]
SCHEMAS = {"get_weather": SCHEMA}


def gemma_value(value: Any, quote: str) -> str:
    """As the template's `format_argument` has it."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{gemma_value(value[key], quote)}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma_value(one, quote) for one in value) + "]"
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def python_value(value: Any) -> str:
    """As Python reads it, with the quotes that most write."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {python_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(python_value, value)) + "]"
    return repr(value)


def written(tool_format: ToolFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    name = tool_format.name
    if tool_format.arguments == "gemma":
        end = {"gemma4": "<tool_call|>", "function-gemma": "<end_function_call>"}[name]
        beginning = {"gemma4": "<|tool_call>call:", "function-gemma": "<start_function_call>call:"}[name]
        return "".join(f"{beginning}{call}{gemma_value(said, tool_format.quote)}{end}" for call, said in calls)
    if tool_format.arguments == "python":
        before, between, behind = IN_PYTHON[name]
        texts = [f"{call}({', '.join(f'{key}={python_value(said[key])}' for key in said)})" for call, said in calls]
        return before + between.join(texts) + behind
    before, head, argument, end, between, behind = TAGGED[name]
    texts = []
    for call, said in calls:
        shown = {key: one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for key, one in said.items()}
        texts.append(head % call + "".join(argument % (key, shown[key]) for key in shown) + end)
    return before + between.join(texts) + behind


def raw_call(tool_format: ToolFormat, text: str) -> str:
    """The input as it stands, and no escapes in it."""
    call = written(tool_format, [("calculate", {"input": text})])
    return call.replace(json.dumps(text), f'"{text}"') if tool_format.arguments == "python" else call


def read(tool_format: ToolFormat, pieces: list[str], **options: Any) -> tuple[str, list[tuple[str, str]], int]:
    parser = tool_format.parser(**{"schemas": SCHEMAS, **options})
    content, calls = "", []
    for split in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        content += split.content
        for number, name, text in split.calls:
            if name is not None:
                assert number == len(calls)
                calls.append((name, ""))
            calls[number] = (calls[number][0], calls[number][1] + text)
    return content, calls, len(parser.finished)


def parsed(tool_format: ToolFormat, pieces: list[str], **options: Any) -> tuple[str, list[tuple[str, Any]]]:
    content, calls, num_finished = read(tool_format, pieces, **options)
    assert num_finished == len(calls)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_cut_at_every_position(tool_format: ToolFormat, call: tuple[str, dict[str, Any]]) -> None:
    said = "" if tool_format.begins_bare else "Let me look."
    text = f"{said}\n{written(tool_format, [call])}"
    for cut in range(len(text) + 1):
        assert parsed(tool_format, [text[:cut], text[cut:]]) == (said, [call])
    assert parsed(tool_format, list(text)) == (said, [call])


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)
def test_several_calls_in_random_pieces(tool_format: ToolFormat) -> None:
    text, drawn = written(tool_format, CALLS), random.Random(1)
    for _ in range(50):
        cuts = sorted(drawn.sample(range(len(text)), 9))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(tool_format, pieces) == ("", CALLS)


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)
def test_an_answer_that_was_cut_shows_nothing_of_a_call(tool_format: ToolFormat) -> None:
    said = "" if tool_format.begins_bare else "Well."
    text = f"{said}\n{written(tool_format, CALLS)}"
    for cut in range(len(text) + 1):
        parser = tool_format.parser(schemas=SCHEMAS)
        begun, content = [], ""
        for split in [*map(parser.push, text[:cut]), parser.finish(is_cut=True)]:
            content += split.content
            for number, name, piece in split.calls:
                begun += [""] if name is not None else []
                begun[number] += piece
        assert content.strip() == text[: min(cut, len(said))]
        whole = begun[: len(parser.finished)]
        assert list(map(json.loads, whole)) == [arguments for _, arguments in CALLS[: len(whole)]]
        for unfinished in begun[len(parser.finished) :]:
            with pytest.raises(ValueError, match=r"."):
                json.loads(unfinished)


def test_the_example_of_minimax_guide() -> None:
    """As its makers publish it: lists are JSON, and quotes in them are escaped."""
    lists = {"type": "array", "items": {"type": "string"}}
    schemas = {"search_web": {"type": "object", "properties": {"query_tag": lists, "query_list": lists}}}
    text = (
        '<minimax:tool_call>\n<invoke name="search_web">\n'
        '<parameter name="query_tag">["technology", "events"]</parameter>\n'
        '<parameter name="query_list">["\\"OpenAI\\" \\"latest\\" \\"release\\""]</parameter>\n</invoke>\n'
        '<invoke name="search_web">\n<parameter name="query_tag">["technology", "events"]</parameter>\n'
        '<parameter name="query_list">["\\"Gemini\\" \\"latest\\" \\"release\\""]</parameter>\n'
        "</invoke>\n</minimax:tool_call>"
    )
    tags = ["technology", "events"]
    expected = [
        ("search_web", {"query_tag": tags, "query_list": [f'"{maker}" "latest" "release"']})
        for maker in ("OpenAI", "Gemini")
    ]
    assert parsed(MINIMAX, list(text), schemas=schemas) == ("", expected)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "007", "007"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "  kept\n", "  kept\n"),
        ({"type": "integer"}, " 7 ", 7),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "7", 7),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "{}", "{}"),
        ({"enum": [1, 2]}, "2", 2),
        ({}, "[1]", [1]),
        ({}, "word", "word"),
    ],
)
def test_what_a_value_is_follows_from_the_schema(schema: dict[str, Any], text: str, value: object) -> None:
    call = f'<minimax:tool_call><invoke name="f"><parameter name="x">{text}</parameter></invoke></minimax:tool_call>'
    schemas = {"f": {"type": "object", "properties": {"x": schema}}}
    assert parsed(MINIMAX, [call], schemas=schemas) == ("", [("f", {"x": value})])
    assert parsed(MINIMAX, [call], schemas={}) == ("", [("f", {"x": text})])  # nobody said what it is


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'Val d\\'Is\u00e8re'", "Val d'Is\u00e8re"),
        ("'Val d'Is\u00e8re, 'here' and there'", "Val d'Is\u00e8re, 'here' and there"),  # nobody escaped it
        ("""'She said "no", twice'""", 'She said "no", twice'),
        (r'"a\tb\nc\\ \x41\u00e9\ud83d\ude00\/\q"', "a\tb\nc\\ A\u00e9\U0001f600/\\q"),
        (r"'\xg1'", "\\xg1"),
        ('"""x = \'a\'\ny = "b"\n"""', "x = 'a'\ny = \"b\"\n"),
        ("''", ""),
        ("[1, -2.5, 1_000, 0x10, +3, 1e3,]", [1, -2.5, 1000, 16, 3, 1000.0]),
        ("(True, False, None, true, null)", [True, False, None, True, None]),
        ("{'a': {}, \"b\" : [[]], 'c':{'d': 'e'}}", {"a": {}, "b": [[]], "c": {"d": "e"}}),
        ("celsius", "celsius"),
        ("nan", "nan"),
        (repr({"a": [True, None, "x'y\n"], "b": ("c", 1)}), {"a": [True, None, "x'y\n"], "b": ["c", 1]}),
    ],
)
def test_values_in_python(text: str, value: object) -> None:
    call = f"<|tool_call_start|>[f(x={text}, y=1), g()]<|tool_call_end|>"
    for cut in range(len(call) + 1):
        assert parsed(LFM2, [call[:cut], call[cut:]]) == ("", [("f", {"x": value, "y": 1}), ("g", {})])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "object"}, "{'a': [True, None]}", {"a": [True, None]}),
        ({"type": "array"}, "('a', 1)", ["a", 1]),
        ({"type": "array"}, "[broken", "[broken"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": "string"}, "None", "None"),
        ({"type": "string"}, "\n two\nlines \n", "\n two\nlines \n"),
        ({"type": "string"}, "</param><parameter=y>", "</param><parameter=y>"),
        ({"type": "number"}, "\n3\n", 3),
    ],
)
def test_values_on_lines_of_their_own(schema: dict[str, Any], text: str, value: object) -> None:
    call = written(QWEN3_CODER, [("f", {"x": text})])
    schemas = {"f": {"type": "object", "properties": {"x": schema}}}
    for cut in range(len(call) + 1):
        assert parsed(QWEN3_CODER, [call[:cut], call[cut:]], schemas=schemas) == ("", [("f", {"x": value})])


def test_tags_without_white_space_between_them() -> None:
    for tight in (QWEN3_CODER, GLM45, MINIMAX):
        call = ("get_weather", {"city": "New York", "exact": True})
        text = written(tight, [call, call]).replace("\n", "")
        if tight is GLM45:
            text = text.replace("get_weather<", "get_weather\n<", 1)
        assert parsed(tight, list(text)) == ("", [call, call])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{a:None, b : True,c:-1.5,d:<|"|>x<|"|>}', {"a": None, "b": True, "c": -1.5, "d": "x"}),
        ('{a:"json \\"too\\"",b:[ [1] , {} ]}', {"a": 'json "too"', "b": [[1], {}]}),
        ('{<|"|>a:b<|"|>:word}', {"a:b": "word"}),
    ],
)
def test_gemmas_other_spellings(text: str, arguments: dict[str, Any]) -> None:
    call = f"<|tool_call>call:f{text}<tool_call|>"
    for cut in range(len(call) + 1):
        assert parsed(GEMMA4, [call[:cut], call[cut:]]) == ("", [("f", arguments)])


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (MINIMAX, '<invoke name="f">\n</invoke>'),  # outside of any block
        (MINIMAX, "<minimax:tool_call>\nnothing of the kind"),
        (MINIMAX, "<minimax:tool_call>\n</minimax:tool_call>"),
        (QWEN3_CODER, "<tool_call>\n<function=f>\nno parameter\n</function>\n</tool_call>"),
        (QWEN3_CODER, "<tool_call>\n</tool_call>"),
        (GLM45, "<tool_call>\n"),
        (GLM45, "<tool_call>{not a name}"),
        (GLM45, "<tool_call>name\nand no tag"),
        (LFM2, "<|tool_call_start|>[]<|tool_call_end|>"),
        (LFM2, '<|tool_call_start|>["a", 1]<|tool_call_end|>'),
        (LFM2, "<|tool_call_start|>[f('no name')]<|tool_call_end|>"),
        (PYTHONIC, "[1, 2, 3]"),
        (PYTHONIC, "[a link](https://example.org/a=b) and more"),
        (PYTHONIC, "[f]"),
        (PYTHONIC, "Say [f(x=1)]"),
        (GEMMA4, "<|tool_call>and no call"),
        (GEMMA4, "<|tool_call>call:{}"),
    ],
)
def test_what_is_no_call_stays_as_it_is(tool_format: ToolFormat, text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(tool_format, pieces)[:2] == (text, [])


@pytest.fixture(scope="module")
def takes(smollm2_tokenizer: Tokenizer) -> Takes:
    compiler = GrammarCompiler(Vocabulary.of(smollm2_tokenizer))
    return lambda spec, text: takes_tokens(compiler.matcher(spec), [*smollm2_tokenizer.encode(text), 2])


FUNCTIONS: list[dict[str, Any]] = [
    {"name": "get_weather", "parameters": SCHEMA, "strict": True},
    {"name": "ping", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}, "strict": True},
    {"name": "any"},
]


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)
def test_a_grammar_takes_what_its_parser_reads(tool_format: ToolFormat, takes: Takes) -> None:
    one = calls_grammar(tool_format, FUNCTIONS, {}, only_one=True)
    several = calls_grammar(tool_format, FUNCTIONS, {}, only_one=False)
    free = answer_grammar(tool_format, FUNCTIONS, {}, only_one=False)
    anything = ("any", {"x": "y z", "w": "v"})
    for call in (*CALLS, anything):
        text = written(tool_format, [call])
        assert takes(one, text) and takes(several, text) and takes(free, text)
        assert takes(free, "Hm.\n" + text)  # bare calls are text behind a text
    assert takes(several, written(tool_format, [*CALLS, anything]))
    assert not takes(one, written(tool_format, CALLS))
    assert takes(free, "Just a text, a < b.") and not takes(several, "Just a text.")
    for wrong in (
        ("third", {}),
        ("get_weather", {}),  # one is missing
        ("get_weather", {"city": "x", "days": ["one"]}),
        ("get_weather", {"city": "x", "unit": "miles"}),
        ("get_weather", {"city": "x", "zip": 1}),
        ("ping", {"x": 1}),
    ):
        assert not takes(one, written(tool_format, [wrong]))
    if tool_format.begins_bare:
        return
    either = either_grammar(tool_format, FUNCTIONS, {}, '{"type": "integer"}', only_one=False)
    assert takes(either, "7") and takes(either, written(tool_format, CALLS)) and not takes(either, "seven")


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)
def test_an_input_follows_its_grammar_and_is_read_as_it_stands(tool_format: ToolFormat, takes: Takes) -> None:
    lark = 'start: expr\nexpr: NUMBER (OPERATOR NUMBER)*\nOPERATOR: "+" | "}}" | "\\""\nNUMBER: /[0-9]{1,3}/'
    calculator = {"name": "calculate", "lark": lark}
    text = '1+20}}3"4'
    call = raw_call(tool_format, text)
    for spec in (
        calls_grammar(tool_format, [*FUNCTIONS, calculator], {}, only_one=False),
        answer_grammar(tool_format, [calculator], {}, only_one=True),
    ):
        assert takes(spec, call)
        assert not takes(spec, raw_call(tool_format, "1+"))
    for cut in range(len(call) + 1):
        found = read(tool_format, [call[:cut], call[cut:]], custom={"calculate": True})
        assert found == ("", [("calculate", text)], 1)


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    ("schema", "fits", "fails"),
    [
        ({"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2}, [["a"], ["b", "a"]], [[]]),
        ({"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2}, [["a"] * 5], [["a"], ["c", "c"]]),
        ({"type": ["integer", "null"]}, [1], ["one", 1.5]),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, [1, True], [[1]]),
        ({"const": 7}, [7], [8]),
    ],
)
def test_values_of_a_schema(
    tool_format: ToolFormat, schema: dict[str, Any], fits: list[Any], fails: list[Any], takes: Takes
) -> None:
    whole = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    grammar = calls_grammar(tool_format, [{"name": "f", "parameters": whole}], {}, only_one=True)
    for value in (*fits, *fails):
        assert takes(grammar, written(tool_format, [("f", {"x": value})])) == (value in fits)


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    ("pattern", "fits", "fails"),
    [
        (r'^(?:[0-9]{3}-"[0-9]{4}")$', ['555-"1234"'], ["555", 'x555-"1234"']),
        (r"^a/b[/|]$", ["a/b/", "a/b|"], ["a/b"]),
        (r"^(yes|no)$", ["yes", "no"], ["maybe"]),
        (r"^a|b$", ["a", "xb", "c"], []),  # its ends hold for one side each: it is not held to
        (r"[0-9]", ["any"], []),
    ],
)
def test_strings_of_a_pattern(
    tool_format: ToolFormat, pattern: str, fits: list[str], fails: list[str], takes: Takes
) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}, "required": ["x"]}
    if not fails and tool_format.arguments == "python":
        return  # its strings are JSON's, and held to any pattern
    grammar = calls_grammar(tool_format, [{"name": "f", "parameters": schema}], {}, only_one=True)
    for text in (*fits, *fails):
        assert takes(grammar, written(tool_format, [("f", {"x": text})])) == (text in fits)


def test_markers_that_are_control_tokens_are_named_by_their_ids() -> None:
    special = {"<|tool_call>": 7, "<tool_call|>": 8, '<|"|>': 9}
    grammar = calls_grammar(GEMMA4, FUNCTIONS, special, only_one=True).text
    assert all(f"<[{token_id}]>" in grammar for token_id in (7, 8, 9)) and '"call:"' in grammar
