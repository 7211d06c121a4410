"""The pieces of a stream join to the whole, for every sequence of tokens and every way to cut it."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.properties import examples
from twostroke.text.detokenizer import IncrementalDetokenizer
from twostroke.text.tokenizer import Tokenizer

from .sample_strings import SAMPLES, random_strings

PROPERTY = examples(150, allowed=(HealthCheck.function_scoped_fixture,))
CUTS = st.lists(st.integers(1, 4), min_size=1, max_size=8)


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip_special_tokens: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    pieces, position = [], 0
    while position < len(ids):
        width = cuts[len(pieces) % len(cuts)]
        pieces.append(detokenizer.push(ids[position : position + width]))
        position += width
    return [*pieces, detokenizer.finish()]


@PROPERTY
@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=30), cuts=CUTS, skip=st.booleans())
def test_any_smollm2_ids(smollm2_tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    whole = smollm2_tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(smollm2_tokenizer, ids, cuts, skip)) == whole


@PROPERTY
@given(ids=st.lists(st.integers(0, 1199) | st.integers(0, 262), max_size=30), cuts=CUTS, skip=st.booleans())
def test_any_sentencepiece_ids(
    llama_style: tuple[Any, Tokenizer], gemma_style: tuple[Any, Tokenizer], ids: list[int], cuts: list[int], skip: bool
) -> None:
    for _, tokenizer in (llama_style, gemma_style):
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(stream(tokenizer, ids, cuts, skip)) == whole


@PROPERTY
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="▁<"), max_size=20), cuts=CUTS)
def test_any_text_comes_back_in_whole_characters(
    smollm2_tokenizer: Tokenizer, llama_style: tuple[Any, Tokenizer], text: str, cuts: list[int]
) -> None:
    # Without "<" no text names a special token, which would be skipped.
    # SmolLM2 lacks the bytes F1 and F2, so planes 4 to 11 (all unassigned) are left to SentencePiece's byte tokens
    tokenizers = (
        [llama_style[1]] if any(0x40000 <= ord(c) < 0xC0000 for c in text) else [smollm2_tokenizer, llama_style[1]]
    )
    for tokenizer in tokenizers:
        pieces = stream(tokenizer, tokenizer.encode(text), cuts, skip_special_tokens=True)
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_samples_one_token_at_a_time(smollm2_tokenizer: Tokenizer, llama_style: tuple[Any, Tokenizer]) -> None:
    for tokenizer in (smollm2_tokenizer, llama_style[1]):
        for text in SAMPLES + random_strings(200, seed=3):
            ids = tokenizer.encode(text)
            assert "".join(stream(tokenizer, ids, [1], False)) == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_character_is_held_back_until_it_is_whole(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("🦩")
    assert len(ids) > 1
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer)
    assert [detokenizer.push([token_id]) for token_id in ids] == [""] * (len(ids) - 1) + ["🦩"]
    assert detokenizer.finish() == ""


def test_a_character_that_never_completes_becomes_a_replacement(smollm2_tokenizer: Tokenizer) -> None:
    first, *_ = smollm2_tokenizer.encode("🦩")
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer)
    assert detokenizer.push([first]) == ""
    assert detokenizer.push(smollm2_tokenizer.encode("a")) == "\ufffda"
    assert detokenizer.push([first]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_the_leading_space_of_sentencepiece_goes_only_once(llama_style: tuple[Any, Tokenizer]) -> None:
    _, tokenizer = llama_style
    ids = tokenizer.encode("  a b")
    assert "".join(stream(tokenizer, ids, [1], True)) == "  a b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>   a b"


def test_special_tokens_are_skipped_or_shown(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("hi<|im_end|>")
    assert "".join(stream(smollm2_tokenizer, ids, [1], True)) == "hi"
    assert "".join(stream(smollm2_tokenizer, ids, [1], False)) == "hi<|im_end|>"


def test_a_token_costs_the_same_late_as_early(smollm2_tokenizer: Tokenizer) -> None:
    """50,000 tokens one at a time: a detokenizer that decodes from the start each time would need hours."""
    ids = smollm2_tokenizer.encode("The sky is blue. 空は青い。") * 4000
    started_s = time.process_time()
    pieces = stream(smollm2_tokenizer, ids, [1], True)
    assert time.process_time() - started_s < 5.0
    assert "".join(pieces) == smollm2_tokenizer.decode(ids)
