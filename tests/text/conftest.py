from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

import twostroke
from twostroke.models.weights.gguf import open_gguf
from twostroke.text.gguf_tokenizer import read_gguf_tokenizer
from twostroke.text.tokenizer import Tokenizer

from .sample_strings import SAMPLES, random_strings

TokenTypes = {"normal": 1, "unknown": 2, "control": 3, "user_defined": 4, "unused": 5, "byte": 6}


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> dict[str, Any]:
    return dict(open_gguf(smollm2_path).metadata)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_metadata: dict[str, Any]) -> Tokenizer:
    return read_gguf_tokenizer(smollm2_metadata)


def train_sentencepiece(*, space_prefix: bool) -> sentencepiece.SentencePieceProcessor:
    """A small BPE model of the kind Llama 2 has, trained on this package's own source and the sample strings."""
    sources = sorted(Path(twostroke.__file__).parent.rglob("*.py"))[:40]
    lines = [line for path in sources for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    lines += [text.replace("\0", "") for text in SAMPLES if text.strip()]
    lines += [" ".join(text.split()) for text in random_strings(100, seed=5)]
    lines += ["=" * 3, "=" * 5, "=" * 7, "ababab", "-" * 6, "x" * 3 + "y" * 5] * 40  # pieces with more than one origin
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=1200,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=space_prefix,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=[] if space_prefix else ["<tag>", "\n\n"],
        control_symbols=["<|im_start|>", "<|im_end|>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def gguf_fields_of(processor: sentencepiece.SentencePieceProcessor, *, space_prefix: bool) -> dict[str, Any]:
    """The key-values that a GGUF file of this model has."""
    ids = range(processor.get_piece_size())

    def kind(token_id: int) -> str:
        tests = {"unknown": "is_unknown", "control": "is_control", "byte": "is_byte", "unused": "is_unused"}
        for name, method in tests.items():
            if getattr(processor, method)(token_id):
                return name
        piece = processor.id_to_piece(token_id)
        return "user_defined" if not space_prefix and piece in ("<tag>", "\n\n") else "normal"

    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [TokenTypes[kind(i)] for i in ids],
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


@pytest.fixture(scope="session")
def llama_style() -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    processor = train_sentencepiece(space_prefix=True)
    return processor, read_gguf_tokenizer(gguf_fields_of(processor, space_prefix=True))


@pytest.fixture(scope="session")
def gemma_style() -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    processor = train_sentencepiece(space_prefix=False)
    return processor, read_gguf_tokenizer(gguf_fields_of(processor, space_prefix=False))
