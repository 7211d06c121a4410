"""Unigram tokens from GGUF fields, as llama.cpp's converter writes XLM-RoBERTa's, beside SentencePiece's and those of
transformers."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from transformers import XLMRobertaTokenizer

import twostroke
from tests.properties import examples
from twostroke.core.errors import ModelError
from twostroke.text.gguf_tokenizer import read_gguf_tokenizer

from .sample_strings import SAMPLES, random_strings

STRINGS = [
    *(text for text in (*SAMPLES, *random_strings(500, seed=41)) if "\0" not in text),
    *("ﬁve ﬂights", "Ｆｕｌｌ　ｗｉｄｔｈ", "  a\t\tb \n c  ", "e\u0301 \u00e9 ½ ① ㎏", "\u200bzero\u00adsoft"),
]
ODD = re.compile(r"[\u200d\ufe0f]|(.)\1{30}")
"""Where the library that all these models are published for is not quite SentencePiece: what a joiner or a selector
stands behind, and runs of one character, which have many ways of the same likelihood."""


@pytest.fixture(scope="module")
def processor() -> sentencepiece.SentencePieceProcessor:
    """Of text as it is written, and of the same with what XLM-RoBERTa's table turns into something else."""
    sources = sorted(Path(twostroke.__file__).parent.rglob("*.py"))[:40]
    lines = [line for path in sources for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*lines, *STRINGS]),
        model_writer=model,
        model_type="unigram",
        vocab_size=900,
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def fields(processor: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(processor.serialized_model_proto())
    size = processor.get_piece_size()
    pieces = [processor.id_to_piece(index) for index in range(3, size)]
    scores = [processor.get_score(index) for index in range(3, size)]
    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        # One row more than the model has pieces: the mask's, which the converter leaves without a name.
        "tokenizer.ggml.tokens": ["<s>", "<pad>", "</s>", "<unk>", *pieces, f"[PAD{size + 1}]"],
        "tokenizer.ggml.scores": [0.0] * 4 + scores + [-10000.0],
        "tokenizer.ggml.token_type": [3, 3, 3, 2, *[1] * len(pieces), 5],
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.precompiled_charsmap": list(proto.normalizer_spec.precompiled_charsmap),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.seperator_token_id": 2,
        "tokenizer.ggml.padding_token_id": 1,
    }


def test_ids_equal_sentencepieces(processor: sentencepiece.SentencePieceProcessor, fields: dict[str, Any]) -> None:
    ours = read_gguf_tokenizer(fields)
    assert len(fields["tokenizer.ggml.precompiled_charsmap"]) > 1000
    differing, compared = [], [text for text in STRINGS if not ODD.search(text)]
    for text in compared:
        expected = [3 if index == processor.unk_id() else index + 1 for index in processor.encode(text)]
        if ours.encode(text, add_special_tokens=False, parse_special=False) != expected:
            differing.append(text)
    assert not differing, f"{len(differing)} of {len(compared)}: {differing[:5]!r}"
    assert len(compared) > 400


def test_ids_and_frames_equal_transformers(fields: dict[str, Any]) -> None:
    ours = read_gguf_tokenizer(fields)
    rows = list(zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"], strict=True))
    table = bytes(fields["tokenizer.ggml.precompiled_charsmap"])
    reference = XLMRobertaTokenizer(vocab=[*rows[:-1], ("<mask>", 0.0)], _spm_precompiled_charsmap=table)
    for text in [*STRINGS, "a</s> b", "<s>"]:
        expected = reference.encode(text)
        assert ours.encode(text) == expected, repr(text)
        assert ours.decode(expected) == reference.decode(expected, skip_special_tokens=True), repr(text)
    before, between, behind = ours.pair_frame
    first, second = (ours.encode(text, add_special_tokens=False) for text in ("two texts", "of a pair"))
    assert [*before, *first, *between, *second, *behind] == reference.encode("two texts", "of a pair")


def test_a_row_without_a_piece_says_nothing_of_what_is_unknown(fields: dict[str, Any]) -> None:
    """Its score is far below all others, and the least score decides what an unknown character costs."""
    ours = read_gguf_tokenizer(fields)
    without = {**fields}
    for key in ("tokens", "scores", "token_type"):
        without[f"tokenizer.ggml.{key}"] = fields[f"tokenizer.ggml.{key}"][:-1]
    others = read_gguf_tokenizer(without)
    assert [ours.encode(text) for text in STRINGS] == [others.encode(text) for text in STRINGS]


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("eos_token_id", None, "seperator_token_id is missing, and an encoder's tokenizer needs it"),
        ("unknown_token_id", None, "unknown_token_id is missing"),
        ("unknown_token_id", 10**6, "unknown_token_id is 1000000, but the vocabulary has"),
        ("precompiled_charsmap", [1, 2, 300], "precompiled_charsmap must be a list of bytes"),
        ("precompiled_charsmap", "text", "precompiled_charsmap must be a list of bytes"),
        ("precompiled_charsmap", [255] * 9, "do not make a tokenizer"),
        ("scores", None, "no tokenizer.ggml.scores"),
        ("scores", [0.0], "scores has 1 entries"),
        ("add_space_prefix", 3, "add_space_prefix must be true or false"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], key: str, value: object, complaint: str) -> None:
    changed = {**fields, f"tokenizer.ggml.{key}": value}
    if key == "eos_token_id":
        del changed["tokenizer.ggml.seperator_token_id"]
    with pytest.raises(ModelError, match=complaint):
        read_gguf_tokenizer(changed)


def test_vocabularies_without_pieces_are_refused(fields: dict[str, Any]) -> None:
    types = [3] * len(fields["tokenizer.ggml.tokens"])
    with pytest.raises(ModelError, match="has no piece of text in it"):
        read_gguf_tokenizer({**fields, "tokenizer.ggml.token_type": types})


@examples(60)
@given(st.binary(max_size=64))
def test_any_table_makes_a_tokenizer_or_an_error(table: bytes) -> None:
    fields = {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": ["<s>", "</s>", "<unk>", "\u2581a", "b"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0],
        "tokenizer.ggml.token_type": [3, 3, 2, 1, 1],
        "tokenizer.ggml.cls_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.precompiled_charsmap": list(table),
    }
    try:
        tokenizer = read_gguf_tokenizer(fields)
    except ModelError:
        return
    assert tokenizer.encode("a", add_special_tokens=False)
