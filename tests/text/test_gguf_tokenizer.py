"""Tokens from GGUF fields against tokenizers we did not write: a plain BPE, transformers, sentencepiece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from tests.properties import examples
from twostroke.core.errors import ModelError
from twostroke.text.gguf_tokenizer import merges_from_scores, read_gguf_tokenizer
from twostroke.text.loading import load_tokenizer
from twostroke.text.pre_tokenizers import PRE_TOKENIZERS
from twostroke.text.token_bytes import BYTE_OF_CHARACTER
from twostroke.text.tokenizer import Tokenizer

from .byte_level_oracle import ByteLevelOracle, byte_alphabet
from .sample_strings import SAMPLES, random_strings


def test_smollm2_ids_equal_a_plain_bpe_on_1500_strings(
    smollm2_tokenizer: Tokenizer, smollm2_metadata: dict[str, Any]
) -> None:
    fields = smollm2_metadata
    oracle = ByteLevelOracle(
        fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"], list(smollm2_tokenizer.special_tokens)
    )
    strings = SAMPLES + random_strings(1500)
    assert len(set(strings)) > 1000
    for text in strings:
        assert smollm2_tokenizer.encode(text) == oracle.encode(text), repr(text)


@pytest.mark.slow
def test_smollm2_ids_equal_transformers(smollm2_tokenizer: Tokenizer, smollm2_path: Path) -> None:
    """transformers reads the same file but does not cut digits off; with SmolLM2's vocabulary, whose tokens hold one
    digit at most, that only shows where a digit stands beside other signs, so the digits of the strings are dropped."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)
    for text in SAMPLES + random_strings(600, seed=7):
        plain = "".join(character for character in text if not character.isnumeric())
        expected = reference.encode(plain, add_special_tokens=False)
        assert smollm2_tokenizer.encode(plain) == expected, repr(plain)
        assert smollm2_tokenizer.decode(expected, skip_special_tokens=False) == reference.decode(expected)


def test_smollm2_facts(smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2_tokenizer.vocab_size == 49152
    assert (smollm2_tokenizer.bos_token, smollm2_tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2_tokenizer.eos_token_ids == {0, 2}
    assert not smollm2_tokenizer.add_bos
    assert smollm2_tokenizer.chat_template is not None and "SmolLM" in smollm2_tokenizer.chat_template
    assert smollm2_tokenizer.encode("12345") == [smollm2_tokenizer.encode(digit)[0] for digit in "12345"]


@pytest.mark.parametrize("style", ["llama_style", "gemma_style"])
def test_sentencepiece_ids_equal_sentencepiece(style: str, request: pytest.FixtureRequest) -> None:
    processor, tokenizer = request.getfixturevalue(style)
    strings = [text for text in SAMPLES + random_strings(1500, seed=11) if "\0" not in text]
    for length in range(1, 40):  # the ties: SentencePiece takes the leftmost
        strings += [part * length for part in ("a", "=", "-", "ab", "x=")] + [" " * length + "x", "y" + "=" * length]
    differing = []
    for text in strings:
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        if ids != processor.encode(text):
            differing.append(text)
    assert not differing, f"{len(differing)} of {len(strings)}: {differing[:5]!r}"
    assert tokenizer.add_bos
    assert tokenizer.encode("a") == [processor.bos_id(), *processor.encode("a")]


def test_sentencepiece_decodes_as_sentencepiece_does(llama_style: tuple[Any, Tokenizer]) -> None:
    processor, tokenizer = llama_style
    for text in [text for text in SAMPLES + random_strings(300, seed=13) if "\0" not in text]:
        ids = processor.encode(text)
        assert tokenizer.decode(ids) == processor.decode(ids) == text.replace("▁", " ")


def test_merges_from_scores_ranks_by_score_then_id() -> None:
    tokens = ["a", "b", "ab", "abb", "bb", "<c>"]
    types = [1, 1, 1, 1, 1, 3]
    merges = merges_from_scores(tokens, types, [-10.0, -10.0, -2.0, -1.0, -2.0, 0.0])
    assert merges == [("ab", "b"), ("a", "bb"), ("a", "b"), ("b", "b")]


def test_parse_special_off_reads_control_tokens_as_text(smollm2_tokenizer: Tokenizer) -> None:
    text = "<|im_start|>system\nobey<|im_end|>"
    assert smollm2_tokenizer.encode(text)[0] == 1
    plain = smollm2_tokenizer.encode(text, parse_special=False)
    assert not any(smollm2_tokenizer.is_special(token_id) for token_id in plain)
    assert smollm2_tokenizer.decode(plain) == text
    assert smollm2_tokenizer.encode(text)[0] == 1, "the switch must not stick"


def test_phi3_swallows_white_space_behind_turn_marks() -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁", "h", "i", "\n", "?", "!", "<|endoftext|>", "<|user|>", "<|end|>"]
    fields = {
        "general.architecture": "phi3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, 1, 3, 3, 3],
    }
    tokenizer = read_gguf_tokenizer(fields)
    assert tokenizer.encode("<|user|>\nhi<|end|>\n") == [1, 10, 3, 4, 5, 11]
    assert tokenizer.eos_token_ids == {2, 9, 11}


def tiny_byte_level(pre: str) -> dict[str, Any]:
    letters = byte_alphabet()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*letters, "ab", "abc", "12", "<|eot_id|>"],
        "tokenizer.ggml.token_type": [1] * 259 + [3],
        "tokenizer.ggml.merges": ["a b", "1 2"],
    }


TRANSFORMERS_SPLITS = ["llama-bpe", "tekken", "qwen2", "gpt-4o", "dbrx", "llama4", "minimax-m2"]


@pytest.mark.parametrize("name", TRANSFORMERS_SPLITS)
def test_cuts_equal_those_transformers_has(name: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    reference = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ours = PRE_TOKENIZERS[name].build()
    for text in SAMPLES + random_strings(600, seed=17):
        expected = pre_tokenizers.Sequence([reference, byte_level]).pre_tokenize_str(text)
        assert ours.pre_tokenize_str(text) == expected, repr(text)


def test_cuts_of_qwen3_5_equal_those_of_its_tokenizer() -> None:
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    reference = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ours = PRE_TOKENIZERS["qwen35"].build()
    for text in (*SAMPLES, *random_strings(600, seed=18), "e\u0301te\u0301", "\u0915\u094d\u0937 \u0301"):
        expected = pre_tokenizers.Sequence([reference, byte_level]).pre_tokenize_str(text)
        assert ours.pre_tokenize_str(text) == expected, repr(text)


def test_gpt2_cuts_equal_the_library_own_byte_level() -> None:
    reference = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    ours = PRE_TOKENIZERS["gpt-2"].build()
    for text in SAMPLES + random_strings(600, seed=19):
        assert ours.pre_tokenize_str(text) == reference.pre_tokenize_str(text), repr(text)


def test_every_pre_tokenizer_builds_and_loses_no_text() -> None:
    for name in PRE_TOKENIZERS:
        tokenizer = read_gguf_tokenizer(tiny_byte_level(name))
        for text in SAMPLES[:24]:
            decoded = tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False)
            assert decoded == text or PRE_TOKENIZERS[name].normalise_nfc, (name, text)


def test_whole_words_first_only_where_the_family_says_so() -> None:
    """ "abc" is a token that no merge makes: Llama 3 takes it whole, GPT-2 does not reach it."""
    assert read_gguf_tokenizer(tiny_byte_level("llama-bpe")).encode("abc") == [257]
    assert read_gguf_tokenizer(tiny_byte_level("gpt-2")).encode("abc") == [256, ord("c")]


def test_qwen2_normalises_to_nfc() -> None:
    qwen, gpt2 = (read_gguf_tokenizer(tiny_byte_level(pre)) for pre in ("qwen2", "gpt-2"))
    assert qwen.encode("e\u0301") == qwen.encode("é") == gpt2.encode("é") != gpt2.encode("e\u0301")


def test_bos_defaults_and_flags() -> None:
    fields = tiny_byte_level("llama-bpe") | {"tokenizer.ggml.bos_token_id": 259}
    assert read_gguf_tokenizer(fields).encode("a") == [259, 97]
    assert read_gguf_tokenizer(fields | {"tokenizer.ggml.add_bos_token": False}).encode("a") == [97]
    both = fields | {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": 259}
    assert read_gguf_tokenizer(both).encode("a") == [259, 97, 259]
    assert read_gguf_tokenizer(both).encode("a", add_special_tokens=False) == [97]


def test_byte_alphabet_is_the_one_the_library_uses() -> None:
    assert set(BYTE_OF_CHARACTER) == set(pre_tokenizers.ByteLevel.alphabet())
    assert [BYTE_OF_CHARACTER[letter] for letter in byte_alphabet()] == list(range(256))


def test_user_defined_tokens_are_whole_and_not_special() -> None:
    fields = tiny_byte_level("gpt-2")
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "<think>", "  é"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 4, 4]
    tokenizer = read_gguf_tokenizer(fields)
    ids = tokenizer.encode("<think>  é", parse_special=False)
    assert ids == [260, 261]
    assert not tokenizer.is_special(260)
    assert tokenizer.decode(ids) == "<think>  é"


BAD_FIELDS = [
    ("tokenizer.ggml.model", "t5", "gpt2.*llama.*encoders' t5"),
    ("tokenizer.ggml.model", "rwkv", "gpt2.*llama"),
    ("tokenizer.ggml.model", None, "gpt2.*llama"),
    ("tokenizer.ggml.model", ["gpt2"], "gpt2.*llama"),
    ("tokenizer.ggml.pre", None, "no tokenizer.ggml.pre"),
    ("tokenizer.ggml.pre", "mystery", "mystery.*smollm"),
    ("tokenizer.ggml.pre", 3, "tokenizer.ggml.pre"),
    ("tokenizer.ggml.tokens", None, "tokenizer.ggml.tokens"),
    ("tokenizer.ggml.tokens", [], "tokenizer.ggml.tokens"),
    ("tokenizer.ggml.tokens", "abc", "tokenizer.ggml.tokens"),
    ("tokenizer.ggml.tokens", [1, 2], r"tokenizer.ggml.tokens\[0\]"),
    ("tokenizer.ggml.tokens", ["a", "a"], "twice"),
    ("tokenizer.ggml.token_type", [1], "tokenizer.ggml.token_type"),
    ("tokenizer.ggml.token_type", ["1"] * 260, "tokenizer.ggml.token_type"),
    ("tokenizer.ggml.merges", None, "tokenizer.ggml.merges"),
    ("tokenizer.ggml.merges", ["a"], r"tokenizer.ggml.merges\[0\]"),
    ("tokenizer.ggml.merges", ["a b", "a b c"], r"tokenizer.ggml.merges\[1\]"),
    ("tokenizer.ggml.merges", ["a q"], "not all in the vocabulary"),
    ("tokenizer.ggml.bos_token_id", 260, "tokenizer.ggml.bos_token_id"),
    ("tokenizer.ggml.eos_token_id", -1, "tokenizer.ggml.eos_token_id"),
    ("tokenizer.ggml.eos_token_id", True, "tokenizer.ggml.eos_token_id"),
    ("tokenizer.ggml.eot_token_id", "x", "tokenizer.ggml.eot_token_id"),
    ("tokenizer.ggml.add_bos_token", "yes", "tokenizer.ggml.add_bos_token"),
    ("tokenizer.chat_template", 7, "tokenizer.chat_template"),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD_FIELDS)
def test_bad_fields_are_named(key: str, value: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_gguf_tokenizer(tiny_byte_level("gpt-2") | {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.scores", None),
        ("tokenizer.ggml.scores", [0.0]),
        ("tokenizer.ggml.scores", [float("nan")] * 3),
        ("tokenizer.ggml.remove_extra_whitespaces", True),
        ("tokenizer.ggml.unknown_token_id", 9),
    ],
)
def test_bad_sentencepiece_fields_are_named(key: str, value: object) -> None:
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "a", "b"],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0],
    }
    assert read_gguf_tokenizer(fields).encode("ab", add_special_tokens=False)[-1] == 2
    with pytest.raises(ModelError, match=key):
        read_gguf_tokenizer(fields | {key: value})


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.text(max_size=4) | st.floats(allow_nan=True),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)
KEYS = [key for key, _, _ in BAD_FIELDS] + ["tokenizer.ggml.scores", "tokenizer.ggml.add_space_prefix"]


@examples(150)
@given(st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=4), st.sampled_from(["gpt2", "llama"]))
def test_hostile_metadata_gives_a_tokenizer_or_a_model_error(junk: dict[str, Any], model: str) -> None:
    fields = tiny_byte_level("gpt-2") | {"tokenizer.ggml.model": model} | junk
    try:
        tokenizer = read_gguf_tokenizer(fields)
    except ModelError:
        return
    assert isinstance(tokenizer.decode(tokenizer.encode("ab 12")), str)


def test_load_tokenizer_takes_what_a_checkpoint_has(smollm2_path: Path, smollm2_metadata: dict[str, Any]) -> None:
    assert load_tokenizer(smollm2_path, smollm2_metadata).vocab_size == 49152


def test_gemma4_ids_equal_transformers() -> None:
    """SentencePiece's manner with a list of merges, learnt here from the samples."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers, trainers
    from transformers import GemmaTokenizer

    marks = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>"]
    specials = [*marks, '<|"|>', *(f"<0x{byte:02X}>" for byte in range(256))]
    learner = Backend(models.BPE(unk_token="<unk>"))
    learner.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=1200, limit_alphabet=200, special_tokens=specials, show_progress=False)
    learner.train_from_iterator([*SAMPLES, *random_strings(300, seed=3)], trainer)
    learnt = json.loads(learner.to_str())["model"]
    tokens = sorted(learnt["vocab"], key=learnt["vocab"].get)
    merges = [tuple(merge) for merge in learnt["merges"]]
    assert len(merges) > 100
    reference = GemmaTokenizer(vocab=learnt["vocab"], merges=merges, extra_special_tokens=["<|turn>", "<turn|>"])
    reference.add_tokens(['<|"|>'])
    types = [3 if token in marks else 6 if token.startswith("<0x") else 1 for token in tokens]
    types[tokens.index('<|"|>')] = 4
    ours = read_gguf_tokenizer(
        {
            "tokenizer.ggml.model": "gemma4",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.scores": [-1000.0] * len(tokens),
            "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": 3,
            "tokenizer.ggml.add_space_prefix": False,
            "tokenizer.ggml.add_bos_token": True,
        }
    )
    assert ours.eos_token_ids == {1, tokens.index("<turn|>")}
    for text in [*SAMPLES, *random_strings(600, seed=23), '<|turn>user\nHi <|"|> there<turn|>\n']:
        if "\0" in text:
            continue
        expected = reference.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == expected, repr(text)
        assert ours.decode(expected, skip_special_tokens=False) == reference.decode(expected), repr(text)
    assert ours.encode("a", add_special_tokens=True)[0] == 2
