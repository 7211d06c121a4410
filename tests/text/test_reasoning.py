"""Thoughts and answers come apart, wherever the text is cut."""

from __future__ import annotations

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.text.reasoning import ThinkSplitter, choose
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


def test_choosing(smollm2_tokenizer: Tokenizer) -> None:
    assert choose("auto", smollm2_tokenizer) == "none"
    assert choose("think", smollm2_tokenizer) == "think"
    with pytest.raises(BadRequestError, match="reasoning parser"):
        choose("other", smollm2_tokenizer)
