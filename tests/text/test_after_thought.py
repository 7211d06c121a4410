"""A grammar behind a thought: random answers that keep to the masks are thoughts and then what was asked for, however a
vocabulary cuts the markers."""

from __future__ import annotations

import random
import re

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.core.grammar import GrammarSpec, TokenMatcher
from twostroke.text.grammar import GrammarCompiler, Vocabulary
from twostroke.text.tokenizer import Tokenizer

PIECES = [
    "<",
    "</",
    "/",
    "<t",
    "think",
    "th",
    "ink",
    ">",
    ">x",
    ">\n",
    "<think>",
    "</think>",
    "</think> a",
    "</think>\n",
]
PIECES += [
    "a",
    "b",
    "ab",
    "x",
    "tool",
    "<tool>",
    "\n",
    "\n\n",
    " " * 40,
    "<think>x",
    "",
    "k>",
    "k></think>b",
    "é",
    *"tol",
]
END, CONTROL = len(PIECES), len(PIECES) + 1
VOCABULARY = Vocabulary([*(piece.encode() for piece in PIECES), b"<|end|>", b"<|control|>"], [END, CONTROL], [END])
ANSWERS = r"(ab|<tool>|b)"
GRAMMAR = '["ab", "<tool>", "b"]'


def allowed(matcher: TokenMatcher, num_tokens: int) -> list[int]:
    mask = matcher.allowed()
    return [i for i in range(num_tokens) if i // 8 < len(mask) and mask[i // 8] >> i % 8 & 1]


def walk(compiler: GrammarCompiler, spec: GrammarSpec, drawn: random.Random) -> tuple[str, bool]:
    """A random answer, and whether it ended by itself. A matcher rebuilt from its tokens always agrees."""
    matcher, written = compiler.matcher(spec), []
    for _ in range(60):
        able = allowed(matcher, CONTROL + 1)
        assert able
        if drawn.random() < 0.1:
            matcher = compiler.matcher(spec)
            for token_id in written:
                matcher.advance(token_id)
            assert allowed(matcher, CONTROL + 1) == able
        chosen = drawn.choice(able)
        if chosen == END:
            return b"".join(VOCABULARY.tokens[i] for i in written).decode(), True
        matcher.advance(chosen)
        written.append(chosen)
    return b"".join(VOCABULARY.tokens[i] for i in written).decode(), False


@pytest.mark.parametrize(
    ("thought", "whole", "cut"),
    [
        ("open", rf"(?s).*?</think>\s*{ANSWERS}", r"(?s)((?!</think>).)*(</think>\s*[abtol<>]*)?"),
        ("possible", rf"(?s)(<think>.*?</think>\s*)?{ANSWERS}", r"(?s)<think>((?!</think>).)*(</think>\s*[abtol<>]*)?"),
        ("none", ANSWERS, "(?!)"),
    ],
)
def test_random_answers(thought: str, whole: str, cut: str) -> None:
    compiler = GrammarCompiler(VOCABULARY)
    drawn, ended = random.Random(3), []
    for _ in range(300):
        text, has_ended = walk(compiler, GrammarSpec("choice", GRAMMAR, thought), drawn)
        assert re.fullmatch(whole if has_ended else cut, text), text
        ended += [text] if has_ended else []
    assert {re.sub(r"(?s).*</think>\s*", "", text) for text in ended} == {"ab", "<tool>", "b"}
    thoughts = [text for text in ended if "</think>" in text]
    assert len(thoughts) > 20 or thought == "none"
    assert any(text not in thoughts for text in ended) == (thought != "open")
    assert any("<|control|>" in text for text in thoughts) == (thought != "none")  # a thought is free


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """With the markers, and what is white between them, cut off from what is around them."""
    return [token_id for word in re.split("(</?think>)([ \n]*)", text) for token_id in tokenizer.encode(word)]


def takes(matcher: TokenMatcher, token_ids: list[int]) -> bool:
    for token_id in token_ids:
        if token_id not in allowed(matcher, token_id + 1):
            return False
        matcher.advance(token_id)
    return True


@pytest.mark.parametrize("thought", ["open", "possible"])
def test_markers_of_several_tokens(smollm2_tokenizer: Tokenizer, thought: str) -> None:
    compiler = GrammarCompiler(Vocabulary.of(smollm2_tokenizer))
    spec = GrammarSpec("json_schema", '{"const": {"a": 1}}', thought)
    opening = "" if thought == "open" else "<think>"
    assert len(smollm2_tokenizer.encode("</think>")) > 1

    for text in ("\nHm, a < b, </thin and {.\n</think>\n\n", "</think>", "</think> ", "<think>x</think>\n"):
        assert takes(compiler.matcher(spec), [*encoded(smollm2_tokenizer, opening + text + '{"a": 1}'), 2])
        assert not takes(compiler.matcher(spec), encoded(smollm2_tokenizer, opening + text + "No."))
    unfinished = encoded(smollm2_tokenizer, opening + "Hm.")
    assert takes(compiler.matcher(spec), unfinished) and not takes(compiler.matcher(spec), [*unfinished, 2])
    assert not takes(compiler.matcher(spec), encoded(smollm2_tokenizer, opening + "</think>\n\n \n\n \n\n"))
    assert takes(compiler.matcher(spec), [*encoded(smollm2_tokenizer, '{"a": 1}'), 2]) == (thought == "possible")
    assert takes(compiler.matcher(spec), encoded(smollm2_tokenizer, "No </think>")) == (thought == "open")


def test_a_grammar_that_begins_like_the_marker(smollm2_tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(Vocabulary.of(smollm2_tokenizer))
    spec = GrammarSpec("lark", 'start: "<tool_call>" | "<"', "possible")
    for text in ("<tool_call>", "<", "<think>any</think><tool_call>", "<think>any</think>\n<"):
        assert takes(compiler.matcher(spec), [*encoded(smollm2_tokenizer, text), 2]), text
    assert not takes(compiler.matcher(spec), [*smollm2_tokenizer.encode("<thin"), 2])


def test_a_thought_of_another_kind() -> None:
    with pytest.raises(BadRequestError, match="thought"):
        GrammarSpec("regex", "a", "closed")


def test_a_vocabulary_with_gemmas_channel_thinks_in_it() -> None:
    pieces = [
        "<|channel>",
        "<channel|>",
        "thought",
        "tho",
        "ught",
        "\n",
        "ab",
        "b",
        "x",
        "<think>",
        "</think>",
        "<",
        "|>",
    ]
    end = len(pieces)
    vocabulary = Vocabulary([*(piece.encode() for piece in pieces), b"<turn|>"], [0, 1, end], [end])
    compiler = GrammarCompiler(vocabulary)
    drawn, thoughts = random.Random(5), 0
    for _ in range(200):
        matcher, text = compiler.matcher(GrammarSpec("choice", '["ab", "b"]', "possible")), ""
        for _ in range(40):
            chosen = drawn.choice(allowed(matcher, end + 1))
            if chosen == end:
                thought, marker, answer = text.rpartition("<channel|>")
                assert answer.lstrip("\n") in ("ab", "b")
                assert not marker or thought.startswith("<|channel>thought")
                thoughts += bool(marker)
                break
            matcher.advance(chosen)
            text += pieces[chosen]
    assert thoughts > 20
