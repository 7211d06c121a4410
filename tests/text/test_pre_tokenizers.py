"""Where text is cut before BPE, beside other engines that read the regular expressions as they were published:
`tiktoken` for Kimi's, and Python's `regex` for those that are one expression or several in turn."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import regex
import tiktoken
from tokenizers import pre_tokenizers

from twostroke.text.gguf_tokenizer import read_gguf_tokenizer
from twostroke.text.pre_tokenizers import PRE_TOKENIZERS

from .byte_level_oracle import byte_alphabet
from .sample_strings import SAMPLES, random_strings

REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = rf"{GPT4O_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{REST}"
QWEN2 = rf"{GPT4O_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{REST}"
SEED = rf"{GPT4O_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{REST}"
DEEPSEEK3 = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    + REST,
]
DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK2 = [
    r"[\r\n]",
    rf"\s?[{DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
]
DEEPSEEK_CODER = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK2[4], r"\p{N}"]
PUBLISHED = {
    "glm4": [LLAMA3],
    "chatglm-bpe": [LLAMA3],
    "lfm2": [LLAMA3],
    "hunyuan": [QWEN2],
    "seed-coder": [SEED],
    "deepseek-v3": DEEPSEEK3,
    "hunyuan-dense": DEEPSEEK3,
    "deepseek-llm": DEEPSEEK2,
    "deepseek-coder": DEEPSEEK_CODER,
}
KIMI = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        + f"{GPT4O_CONTRACTION}?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        + f"{GPT4O_CONTRACTION}?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
LETTERS = "aB\u00df\u01bb\u03a9\u0416\u05d0\u0915\u094d\u4e2d\u6587\u3042\u30a2\uac00\uff21\u0301\u0e01"
OTHERS = "19\u0967\u00bd.,'!_-$\u00ab\u2019\u201c\uff0c\u3002 \u3000\t\n\r"


def strings() -> list[str]:
    """Words, signs, digits and line ends of many scripts, in any order."""
    draw = random.Random(29)
    mixed = ["".join(draw.choices(LETTERS + OTHERS, k=draw.randint(1, 24))) for _ in range(1500)]
    return [*SAMPLES, *random_strings(600, seed=31), *mixed]


def cut(text: str, expressions: list[str]) -> list[str]:
    """Each expression takes its matches out of the pieces that are left, and leaves what is between them."""
    pieces = [text]
    for expression in expressions:
        compiled, found = regex.compile(expression, regex.V1), []
        for piece in pieces:
            start = 0
            for match in compiled.finditer(piece):
                found += [piece[start : match.start()], match[0]]
                start = match.end()
            found.append(piece[start:])
        pieces = [piece for piece in found if piece]
    return pieces


def spelled(piece: str) -> str:
    ((spelling, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(piece)
    return spelling


@pytest.mark.parametrize("name", PUBLISHED)
def test_cuts_equal_those_of_the_published_expressions(name: str) -> None:
    ours = PRE_TOKENIZERS[name].build()
    longest = 0
    for text in strings():
        expected = [spelled(piece) for piece in cut(text, PUBLISHED[name])]
        assert [piece for piece, _ in ours.pre_tokenize_str(text)] == expected, repr(text)
        longest = max(longest, len(expected))
    assert longest > 10


@pytest.mark.parametrize("name", ["exaone4", "olmo"])
def test_others_cut_as_gpt2_does(name: str) -> None:
    assert PRE_TOKENIZERS[name] == PRE_TOKENIZERS["gpt-2"]


def test_kimi_tokens_equal_tiktokens() -> None:
    """A vocabulary of bytes and of pairs that the samples have, in tiktoken's manner and in a file's."""
    alphabet, ranks = byte_alphabet(), {bytes([byte]): byte for byte in range(256)}
    for text in strings():
        coded = text.encode()
        for first, second in pairwise(coded):
            if len(ranks) < 900:
                ranks.setdefault(bytes((first, second)), len(ranks))
    oracle = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens={})
    tokens = ["".join(alphabet[byte] for byte in coded) for coded in ranks]
    ours = read_gguf_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "kimi-k2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * len(tokens),
            "tokenizer.ggml.merges": [" ".join(token) for token in tokens[256:]],
        }
    )
    for text in strings():
        assert ours.encode(text) == oracle.encode_ordinary(text), repr(text)
