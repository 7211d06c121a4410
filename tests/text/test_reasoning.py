"""Thoughts and answers come apart, wherever the text is cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.text.reasoning import CHANNEL, ThinkSplitter, choose
from twostroke.text.tokenizer import Tokenizer


def split(pieces: list[str], *, is_open: bool = False) -> tuple[str, str]:
    splitter = ThinkSplitter(is_open=is_open)
    parts = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nHm, a < b.\n</think>\n\nYes.\n", False, "Hm, a < b.", "Yes.\n"),
        ("Hm.\n </thin k>\n</think>Yes </think>", True, "Hm.\n </thin k>", "Yes </think>"),
        ("\n<think></think>\nYes", False, "", "Yes"),
        ("<think>never ends </th", False, "never ends </th", ""),
        ("No thought. <think>x</think>", False, "", "No thought. <think>x</think>"),
        ("  <thi", False, "", "  <thi"),
        (" Yes", False, "", " Yes"),
    ],
)
def test_cut_at_every_position(text: str, is_open: bool, reasoning: str, content: str) -> None:
    for cut in range(len(text) + 1):
        assert split([text[:cut], text[cut:]], is_open=is_open) == (reasoning, content)
    assert split(list(text), is_open=is_open) == (reasoning, content)


@pytest.mark.parametrize(("marked", "is_open"), [("<think>Hm.</think>Yes.", False), ("Hm.</think>Yes.", True)])
def test_an_answer_that_was_cut_shows_no_part_of_a_marker(marked: str, is_open: bool) -> None:
    for end in range(len(marked) + 1):
        splitter = ThinkSplitter(is_open=is_open)
        first, last = splitter.push(marked[:end]), splitter.finish(is_cut=True)
        reasoning, content = first[0] + last[0], first[1] + last[1]
        assert "Hm.".startswith(reasoning) and "Yes.".startswith(content)


def test_choosing(smollm2_tokenizer: Tokenizer) -> None:
    assert choose("auto", smollm2_tokenizer).parser == "none"
    assert choose("think", smollm2_tokenizer).parser == "think"
    with pytest.raises(BadRequestError, match="reasoning parser"):
        choose("other", smollm2_tokenizer)


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<|channel>thought\nHm, a <channel b.\n<channel|>Yes.", False, "Hm, a <channel b.", "Yes."),
        ("<|channel>thought\n<channel|>Yes <channel|>", False, "", "Yes <channel|>"),
        ("Hm.<channel|>\nYes.", True, "Hm.", "Yes."),
        ("<|channel>thou", False, "", "<|channel>thou"),
        ("<|channel>final", False, "", "<|channel>final"),
    ],
)
def test_gemmas_channel_cut_at_every_position(text: str, is_open: bool, reasoning: str, content: str) -> None:
    for cut in range(len(text) + 1):
        splitter = ThinkSplitter(CHANNEL, is_open=is_open)
        parts = [splitter.push(text[:cut]), splitter.push(text[cut:]), splitter.finish()]
        assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == (reasoning, content)


def test_a_template_with_gemmas_channel_is_known() -> None:
    template = "{{- '<|channel>thought\\n' + thinking_text + '\\n<channel|>' -}}"
    known = SimpleNamespace(chat_template=template, special_tokens={}, encode=lambda *_, **__: [1, 2])
    assert choose("auto", cast("Tokenizer", known)).parser == "channel"
    known = SimpleNamespace(chat_template=None, special_tokens={"<|channel>": 1, "<channel|>": 2})
    assert choose("auto", cast("Tokenizer", known)).parser == "channel"
