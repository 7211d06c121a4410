"""Fill-in-the-middle prompts, as each family was taught them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from twostroke.text.gguf_tokenizer import read_gguf_tokenizer
from twostroke.text.infill import infill_of
from twostroke.text.token_bytes import Spelling
from twostroke.text.tokenizer import Tokenizer


def tokenizer_with(*words: str, are_special: bool = True) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    (backend.add_special_tokens if are_special else backend.add_tokens)(list(words))
    size = backend.get_vocab_size()
    return Tokenizer(
        backend, Spelling.BYTE_LEVEL, vocab_size=size, bos_token_id=None, eos_token_id=None, eos_token_ids=frozenset()
    )


@pytest.mark.parametrize("are_special", [True, False])  # Qwen's are not
@pytest.mark.parametrize(
    ("words", "order"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "0 before 1 behind 2"),
        (("<fim_prefix>", "<fim_middle>", "<fim_suffix>"), "0 before 2 behind 1"),
        (("<fim-prefix>", "<fim-middle>", "<fim-suffix>"), "0 before 2 behind 1"),
        (("\u2581<PRE>", "\u2581<MID>", "\u2581<SUF>"), "0 before 2 behind 1"),
        (
            ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
            "0 before 1 behind 2",
        ),
        (("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"), "0 before 2 behind 1"),
        (("[PREFIX]", "[MIDDLE]", "[SUFFIX]"), "2 behind 0 before"),
    ],
)
def test_each_family_in_its_order(words: tuple[str, ...], order: str, are_special: bool) -> None:
    tokenizer = tokenizer_with(*words, are_special=are_special)
    infill = infill_of(tokenizer)
    assert infill is not None
    before, behind = (-1, -2), (-3,)
    expected: list[int] = [-9]
    for word in order.split():
        ids: Any = {"before": before, "behind": behind}.get(word)
        expected += ids or [tokenizer.id_of(words[int(word)])]
    assert infill.prompt((-9,), before, behind) == tuple(expected)


def test_what_ends_a_filled_hole_alone_is_known() -> None:
    words = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|endoftext|>")
    tokenizer = tokenizer_with(*words)
    infill = infill_of(tokenizer)
    assert infill is not None and set(infill.end_ids) == {tokenizer.id_of(words[3]), tokenizer.id_of(words[4])}


def test_a_file_says_which_they_are(smollm2_metadata: dict[str, Any]) -> None:
    assert infill_of(read_gguf_tokenizer(smollm2_metadata)) is None
    for names in (("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")):
        ids = {f"tokenizer.ggml.{name}_token_id": 5 + index for index, name in enumerate(names)}
        infill = infill_of(read_gguf_tokenizer({**smollm2_metadata, **ids}))
        assert infill is not None and infill.prompt((), (1,), (2,)) == (5, 1, 6, 2, 7)
