"""The copy with secret names cuts text as the tokenizer does, and knows a control token only where one was put."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.properties import examples
from twostroke.text.token_bytes import Spelling
from twostroke.text.tokenizer import Tokenizer

PIECES = ["the", " ", "  ", "\n", "é", "漢", "🦊", "1", "==", "<", "|", ">", "_", "<tag>", "\ufdd0"]


def unigram() -> Tokenizer:
    """Control tokens lie in its vocabulary as pieces like others, and its normaliser makes them of wide letters."""
    alphabet = [chr(code) for code in range(0x21, 0x7F)]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("the", -3.0), *((c, -5.0) for c in alphabet)]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken(text, special=True, normalized=True) for text in ("<unk>", "<s>", "</s>")])
    return Tokenizer(
        backend,
        Spelling.SENTENCEPIECE,
        vocab_size=len(pieces),
        bos_token_id=1,
        eos_token_id=2,
        eos_token_ids=frozenset({2}),
    )


@pytest.fixture(scope="module")
def tokenizers(smollm2_tokenizer: Tokenizer, llama_style: Any, gemma_style: Any) -> list[Tokenizer]:
    return [smollm2_tokenizer, llama_style[1], gemma_style[1], unigram()]


def marks(tokenizer: Tokenizer, text: str) -> list[tuple[int, int]]:
    longest_first = sorted(tokenizer.special_tokens, key=len, reverse=True)
    return [match.span() for match in re.finditer("|".join(map(re.escape, longest_first)), text)]


def guarded_ids(tokenizer: Tokenizer, text: str, where: list[tuple[int, int]]) -> list[int]:
    spelt = tokenizer.guarded.spell(text, where)
    return tokenizer.encode(spelt, add_special_tokens=False, parse_special=False)


@examples(80)
@given(data=st.data())
def test_with_every_control_token_marked_it_is_the_tokenizer(tokenizers: list[Tokenizer], data: st.DataObject) -> None:
    for tokenizer in tokenizers:
        pieces = st.one_of(st.sampled_from([*PIECES, *tokenizer.special_tokens]), st.text(max_size=3))
        text = data.draw(st.lists(pieces, max_size=12).map("".join))
        assert guarded_ids(tokenizer, text, marks(tokenizer, text)) == tokenizer.encode(text, add_special_tokens=False)


def test_with_none_marked_there_is_none(tokenizers: list[Tokenizer]) -> None:
    for tokenizer in tokenizers:
        wide = "".join(chr(ord(letter) + 0xFEE0) for letter in "</s>")
        text = " a ".join([*tokenizer.special_tokens, wide])
        known = {tokenizer.special_tokens.get("<unk>")}  # what a vocabulary has no other word for
        assert set(tokenizer.specials_in(guarded_ids(tokenizer, text, []))) <= known


def test_with_one_marked_there_is_one(tokenizers: list[Tokenizer]) -> None:
    for tokenizer in tokenizers:
        token, token_id = list(tokenizer.special_tokens.items())[-1]
        text = f"{token} the {token} the {token}"
        start = len(f"{token} the ")
        assert tokenizer.specials_in(guarded_ids(tokenizer, text, [(start, start + len(token))])) == [token_id]


def test_ids_are_translated_where_they_cannot_stay() -> None:
    """A control token that others are merged from keeps its name in the vocabulary, so as a token it has another id."""
    vocabulary = {"a": 0, "b": 1, "ab": 2, "abb": 3}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "b")]))
    backend.add_tokens([AddedToken("ab", special=True), AddedToken("ba!", special=False)])
    tokenizer = Tokenizer(
        backend, Spelling.BYTE_LEVEL, vocab_size=6, bos_token_id=None, eos_token_id=None, eos_token_ids=frozenset()
    )
    assert tokenizer.encode("aabba!") == guarded_ids(tokenizer, "aabba!", [(1, 3)])
