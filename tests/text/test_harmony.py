"""Answers in the Harmony format, by the rules that OpenAI's guide to it states: channels, recipients, ends. Whatever a
model writes is taken apart alike wherever it is cut, and nothing of it is an error."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from twostroke.core.grammar import ForeseeingMatcher, GrammarSpec
from twostroke.server.parsing import AnswerParser, finished_calls
from twostroke.text.grammar import GrammarCompiler, Vocabulary
from twostroke.text.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START, HarmonySplitter
from twostroke.text.tool_parsers.known_formats import HARMONY

WEATHER = '{"city": "Oslo", "days": [1, 2]}'
THOUGHT = f"{CHANNEL}analysis{MESSAGE}The user asks."
NEXT = f"{END}{START}assistant"
FINAL = f"{CHANNEL}final{MESSAGE}"


def taken_apart(
    text: str, *, has_calls: bool = True, pieces: list[str] | None = None, is_cut: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and whole calls, through the parser that the server has."""
    parser = AnswerParser(HarmonySplitter(has_calls=has_calls), HARMONY.parser() if has_calls else None)
    parts = [parser.push(piece, 1, is_last=False) for piece in (pieces if pieces is not None else [text])]
    parts.append(parser.push("", 0, is_last=True, is_cut=is_cut))
    calls = finished_calls(parts, parser.finished)
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts), calls


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"{THOUGHT}{NEXT}{FINAL}Hello.{RETURN}", "The user asks.", "Hello.", []),
        (f"{THOUGHT}{NEXT}{FINAL}Hello.", "The user asks.", "Hello.", []),  # the last token may be left out
        (f"{FINAL}2 < 3 <| x{RETURN}", "", "2 < 3 <| x", []),
        (
            f"{THOUGHT}{NEXT}{CHANNEL}commentary to=functions.weather {CONSTRAIN}json{MESSAGE}{WEATHER}{CALL}",
            "The user asks.",
            "",
            [("weather", WEATHER)],
        ),
        # A recipient beside the role, and no word of JSON: both are written so, too.
        (
            f"{THOUGHT}{NEXT} to=functions.weather{CHANNEL}commentary{MESSAGE}{WEATHER}{CALL}",
            "The user asks.",
            "",
            [("weather", WEATHER)],
        ),
        (f"{CHANNEL}analysis to=functions.now{CONSTRAIN}json{MESSAGE}{CALL}", "", "", [("now", "{}")]),
        # A word to the user before a call.
        (
            f"{CHANNEL}commentary{MESSAGE}I will look.{NEXT}{CHANNEL}commentary to=functions.a{MESSAGE}{{}}{CALL}",
            "",
            "I will look.",
            [("a", "{}")],
        ),
        # An answer behind a call begins with its own words.
        (
            f"{CHANNEL}commentary to=functions.a{MESSAGE}{{}}{NEXT}{FINAL}Hello.{NEXT}{FINAL}More.{RETURN}",
            "",
            "Hello.\n\nMore.",
            [("a", "{}")],
        ),
        (
            f"{CHANNEL}commentary{MESSAGE}Wait.{NEXT}{CHANNEL}commentary to=functions.a{MESSAGE}{{}}{NEXT}{FINAL}Yes.",
            "",
            "Wait.\n\nYes.",
            [("a", "{}")],
        ),
        (f"{CHANNEL}analysis to=python{MESSAGE}print(1){CALL}", "print(1)", "", []),
        (f"{THOUGHT}{NEXT}{CHANNEL}analysis{MESSAGE}More.{NEXT}{FINAL}Yes.", "The user asks.\n\nMore.", "Yes.", []),
        # What is no message is text.
        ("Hello.", "", "Hello.", []),
        (f"Hello.{RETURN}", "", "Hello.", []),
        (
            f"{CHANNEL}final Hello, there is no message here.",
            "",
            f"{CHANNEL}final Hello, there is no message here.",
            [],
        ),
        (f"{CHANNEL}final{END}{FINAL}Hello.", "", f"{CHANNEL}final\n\nHello.", []),
        (f"{THOUGHT}{FINAL}Hello.", "The user asks.", "Hello.", []),
        (f"{CHANNEL}other{MESSAGE}Hello.", "", "Hello.", []),
        (f"{RETURN}{END} {FINAL}Hello.{RETURN}{RETURN}", "", "Hello.", []),
    ],
)
def test_messages(text: str, reasoning: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert taken_apart(text) == (reasoning, content, calls)
    assert taken_apart(text, pieces=list(text)) == (reasoning, content, calls)


def test_arguments_that_are_no_object_come_out_as_text() -> None:
    head = f"{CHANNEL}commentary to=functions.weather{MESSAGE}"
    for body in ("Oslo", "[1]", '"Oslo"'):
        _, content, calls = taken_apart(f"{head}{body}{CALL}")
        assert calls == [] and body in content
    _, _, calls = taken_apart(f'{head}{{"city": "Os', is_cut=True)
    assert calls == [], "a call that was cut is nobody's to run"


def test_calls_that_nobody_asked_for_are_text() -> None:
    text = f"{THOUGHT}{NEXT}{CHANNEL}commentary to=functions.weather{MESSAGE}{WEATHER}{CALL}"
    assert taken_apart(text, has_calls=False) == ("The user asks.", WEATHER, [])


def test_a_header_without_end_is_held_for_a_while_only() -> None:
    endless = f"{CHANNEL}{'final ' * 200}"
    splitter = HarmonySplitter(has_calls=True)
    assert "".join(run.content for run in splitter.push(endless)) != ""


def test_what_was_cut_shows_no_marker() -> None:
    for cut in (f"{THOUGHT}<|en", f"{THOUGHT}{NEXT}{CHANNEL}fin", f"{THOUGHT}{NEXT}<|chan"):
        assert taken_apart(cut, is_cut=True) == ("The user asks.", "", [])


HEAD = f"{CHANNEL}commentary to=functions.weather {CONSTRAIN}json{MESSAGE}"
NOW = f"{CHANNEL}commentary to=functions.now {CONSTRAIN}json{MESSAGE}"


@pytest.mark.parametrize(
    ("before", "calls"),
    [
        (f"{THOUGHT}{NEXT}{HEAD}", [(WEATHER, f"{WEATHER}{CALL}")]),
        (f"{HEAD}\n ", [(WEATHER, f"{WEATHER}\n{CALL}")]),
        (f"{THOUGHT}{NEXT} to=functions.weather{CHANNEL}commentary{MESSAGE}", [(WEATHER, f"{WEATHER}{CALL}")]),
        # Without arguments, a call is one once its end is there.
        (f"{THOUGHT}{NEXT}{NOW}", [(CALL, CALL)]),
        (NOW, [(END, f"{END}{START}assistant{HEAD}"), (WEATHER, f"{WEATHER}{CALL}")]),
    ],
)
def test_an_answer_cut_anywhere_has_whole_calls_alone(before: str, calls: list[tuple[str, str]]) -> None:
    """Of each call, what it is whole with and what stands behind its header."""
    text, ends = before, []
    for whole_with, behind in calls:
        ends.append((len(text) + len(whole_with), whole_with))
        text += behind
    whole = [("weather", WEATHER) if with_ == WEATHER else ("now", "{}") for _, with_ in ends]
    for cut in range(len(text) + 1):
        num_whole = sum(end <= cut for end, _ in ends)
        for pieces in ([text[:cut]], list(text[:cut])):
            reasoning, content, found = taken_apart("", pieces=pieces, is_cut=True)
            assert found == whole[:num_whole], text[:cut]
            assert content == "" and "The user asks.".startswith(reasoning)


MARKERS = [START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN]
WORDS = ["assistant", "analysis", "commentary", "final", "json", " to=functions.weather", " to=python", "to="]
TEXTS = [" ", "\n", "<|", "<|end", "|>", "Hello", WEATHER, "{", "}", '"', "ß"]
PIECES = st.sampled_from([*MARKERS, *WORDS, *TEXTS])


@examples(400)
@given(st.lists(PIECES, max_size=24), st.data())
def test_any_row_of_markers_is_read_alike_wherever_it_is_cut(row: list[str], data: st.DataObject) -> None:
    text = "".join(row)
    has_calls, is_cut = data.draw(st.booleans()), data.draw(st.booleans())
    whole = taken_apart(text, has_calls=has_calls, is_cut=is_cut)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert taken_apart(text, has_calls=has_calls, pieces=pieces, is_cut=is_cut) == whole
    for _, arguments in whole[2]:
        json.loads(arguments)


@examples(200)
@given(st.lists(st.tuples(st.sampled_from(["analysis", "final"]), st.text(max_size=20)), max_size=6))
def test_sound_messages_lose_nothing(messages: list[tuple[str, str]]) -> None:
    kept = [(channel, text) for channel, text in messages if "<|" not in text and not text.endswith("<")]
    text = NEXT.join(f"{CHANNEL}{channel}{MESSAGE}{said}" for channel, said in kept) + RETURN
    reasoning, content, calls = taken_apart(text, has_calls=False)
    for channel, found in (("analysis", reasoning), ("final", content)):
        assert found == "\n\n".join(said for own, said in kept if own == channel and said)
    assert calls == []


WORDS_OF_MODEL = [bytes([byte]) for byte in range(256)] + [b"analysis", b"final", b"assistant"]
ID_OF = {text: len(WORDS_OF_MODEL) + index for index, text in enumerate(MARKERS)}
VOCABULARY = [*WORDS_OF_MODEL, *(marker.encode() for marker in MARKERS)]
ENDS = [ID_OF[RETURN], ID_OF[CALL]]


def tokens(text: str) -> list[int]:
    pieces = re.split("(" + "|".join(map(re.escape, MARKERS)) + ")", text)
    return [token for piece in pieces for token in ([ID_OF[piece]] if piece in ID_OF else piece.encode())]


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(Vocabulary(VOCABULARY, sorted(ID_OF.values()), ENDS))


def matcher(grammars: GrammarCompiler, kind: str, text: str) -> ForeseeingMatcher:
    found = grammars.matcher(GrammarSpec(kind, text, thought="harmony"))
    assert isinstance(found, ForeseeingMatcher)
    return found


@pytest.mark.parametrize(
    ("kind", "grammar", "answer", "wrong"),
    [
        ("json_schema", '{"type": "integer"}', "7", "seven"),
        ("json_schema", '{"type": "string"}', '"<|} \u00df"', f'"{END}"'),
        ("regex", "a/b|\n", "a/b", "c"),
        ("choice", '["}", "\\""]', '"', "{"),
        ("lark", 'start: "{" start "}" | ""', "{{}}", "{"),
    ],
)
def test_a_held_answer_is_a_row_of_messages(
    grammars: GrammarCompiler, kind: str, grammar: str, answer: str, wrong: str
) -> None:
    for thoughts in ("", THOUGHT + NEXT, THOUGHT + NEXT + THOUGHT + NEXT):
        for text, is_taken in ((answer, True), (wrong, False)):
            row = tokens(f"{thoughts}{FINAL}{text}{RETURN}")
            assert (matcher(grammars, kind, grammar).num_taken(row) == len(row)) == is_taken
    for broken in (
        answer,
        f"{CHANNEL}commentary{MESSAGE}",
        f"{THOUGHT}{RETURN}",
        f"{THOUGHT}{CHANNEL}",
        f"{THOUGHT}{END}{CHANNEL}",
    ):
        row = tokens(broken)
        assert matcher(grammars, kind, grammar).num_taken(row) < len(row)


def test_what_a_held_answer_must_write_is_foreseen(grammars: GrammarCompiler) -> None:
    found = matcher(grammars, "choice", '["yes", "yet"]')
    for written, forced in (
        ("", CHANNEL),
        (CHANNEL, ""),
        (f"analysis{MESSAGE}Hm.", ""),
        (END, f"{START}assistant{CHANNEL}"),
        (f"{START}assistant{CHANNEL}f", f"inal{MESSAGE}ye"),
    ):
        for token in tokens(written):
            found.advance(token)
        assert b"".join(VOCABULARY[token] for token in found.forced()).decode() == forced
    other = found.copy()
    assert isinstance(other, ForeseeingMatcher) and other.num_taken(tokens(f"inal{MESSAGE}yes{RETURN}")) == 9


def test_the_bare_grammar_is_another() -> None:
    """Where a thought is not watched, it is the same."""
    bare = GrammarSpec("regex", "a")
    assert GrammarSpec("regex", "a", thought="open").compiled == bare == bare.compiled
    held = GrammarSpec("regex", "a", thought="harmony")
    assert held.compiled == held != bare
