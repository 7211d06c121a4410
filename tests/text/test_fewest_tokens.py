"""The bound on a text's tokens is never above the number that the tokenizer gives, whatever the text and the tokenizer;
and it is high enough to refuse what is far too long."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.properties import examples
from twostroke.text.fewest_tokens import FewestTokens
from twostroke.text.token_bytes import BYTE_OF_CHARACTER, Spelling
from twostroke.text.tokenizer import Tokenizer

WORDS = ["the", "Ġthe", "ĠĠĠĠ", "====", "Ã©", "Ìģ"]


def byte_level(normaliser: Any = None, cut: Any = None, without: str = "", **added: bool) -> Tokenizer:
    """A small byte-level BPE whose longest token is known, with a control token that may swallow white space."""
    vocabulary = {character: byte for character, byte in BYTE_OF_CHARACTER.items() if character not in without}
    merges = []
    for word in WORDS:
        if any(letter not in vocabulary for letter in word):
            continue
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = 300 + len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    if normaliser is not None:
        backend.normalizer = normaliser
    byte_cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = byte_cut if cut is None else pre_tokenizers.Sequence([cut, byte_cut])
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False, **added)])
    size = max(backend.get_vocab().values()) + 1
    return Tokenizer(
        backend, Spelling.BYTE_LEVEL, vocab_size=size, bos_token_id=None, eos_token_id=None, eos_token_ids=frozenset()
    )


TOKENIZERS = {
    "plain": byte_level(),
    "composes": byte_level(normalizers.NFC()),
    "composes more": byte_level(normalizers.Sequence([normalizers.NFKC()])),
    "decomposes": byte_level(normalizers.NFD()),
    "swallows": byte_level(lstrip=True, rstrip=True),
    "lacks bytes": byte_level(without="tĠÃ"),
    "strips": byte_level(normalizers.Strip()),
    "replaces": byte_level(normalizers.Replace(Regex("e+"), "e")),
    "removes": byte_level(cut=pre_tokenizers.Split(" ", behavior="removed")),
    "drops": byte_level(cut=pre_tokenizers.WhitespaceSplit()),
}
PIECES = [
    "the",
    " the",
    "    ",
    "====",
    "<|end|>",
    "e\u0301",
    "\u0301",
    "\u212b",
    "한",
    "\u1112\u1161\u11ab",
    "Ａ",
    "\u2f81a",
]
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=30).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@examples(30)
@given(text=texts, times=st.sampled_from([1, 1, 50]))
def test_no_text_has_fewer(name: str, text: str, times: int) -> None:
    tokenizer = TOKENIZERS[name]
    for spelt in (text * times, unicodedata.normalize("NFD", text) * times):
        assert tokenizer.fewest.of(spelt, is_framed=False) <= len(tokenizer.encode(spelt, add_special_tokens=False))


def test_of_a_tokenizer_that_may_drop_anything_nothing_is_claimed() -> None:
    for name in ("strips", "replaces", "removes", "drops"):
        assert TOKENIZERS[name].fewest.of("the " * 10_000, is_framed=False) == 0


@pytest.mark.parametrize("name", ["plain", "composes", "composes more", "decomposes", "swallows", "lacks bytes"])
def test_a_long_text_is_known_for_one(name: str) -> None:
    fewest = TOKENIZERS[name].fewest
    assert fewest.longest_bytes == len("<|end|>")
    assert fewest.of("=the=" * 10_000, is_framed=False) > 4_000


@examples(60)
@given(text=texts)
def test_real_vocabularies(smollm2_tokenizer: Tokenizer, llama_style: Any, gemma_style: Any, text: str) -> None:
    for tokenizer in (smollm2_tokenizer, llama_style[1], gemma_style[1]):
        assert tokenizer.fewest.of(text * 20, is_framed=True) <= len(tokenizer.encode(text * 20))
        assert tokenizer.fewest.of("a word and " * 1000, is_framed=True) > 100


def test_framing_is_counted(llama_style: Any) -> None:
    tokenizer: Tokenizer = llama_style[1]
    fewest: FewestTokens = tokenizer.fewest
    assert fewest.of("", is_framed=True) == len(tokenizer.encode("")) == 1
