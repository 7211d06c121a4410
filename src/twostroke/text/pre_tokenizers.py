"""How byte-level models cut text into words before BPE, by the names GGUF files give (`tokenizer.ggml.pre`).
Only cuts that are known for certain are here: a wrong one gives wrong tokens without a word."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from twostroke.text.deepseek_cuts import DEEPSEEK2_CUTS, DEEPSEEK3_CUTS, DEEPSEEK_CODER_CUTS

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"

# Qwen3.5 keeps marks with the letters they stand on.
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Tekken and GPT-4o cut a word where lower case turns to upper; GPT-4o keeps a contraction with its word.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LOWER_ENDING = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_UPPER_START = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_LOWER_ENDING}|{_UPPER_START}|\p{{N}}|{_REST_WITH_SLASH}"
_GPT4O = rf"{_LOWER_ENDING}{_CONTRACTIONS}?|{_UPPER_START}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"

# Kimi K2 takes Chinese apart from other letters, and cuts the rest as GPT-4o does.
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI_UPPER, _KIMI_LOWER = rf"[{_UPPER}{_NOT_HAN}", rf"[{_LOWER}{_NOT_HAN}"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST}"
)

# Seed's leaves line ends out of a run of signs.
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    cuts: tuple[str, ...]
    """Regular expressions; each cuts the pieces that the one before it left."""
    single_digits: bool = False
    """First of all, each digit is cut off by itself."""
    normalise_nfc: bool = False
    whole_words_first: bool = False
    """A word that is in the vocabulary as it stands is one token, whatever the merges say."""
    adds_bos: bool = False
    """When the file does not say."""

    def build(self) -> pre_tokenizers.PreTokenizer:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if self.single_digits else []
        cuts = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in self.cuts]
        return pre_tokenizers.Sequence(
            [*digits, *cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def build_normaliser(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.normalise_nfc else None


_LLAMA3_STYLE = PreTokenizer((_LLAMA3,), whole_words_first=True, adds_bos=True)
_GPT2_STYLE = PreTokenizer((_GPT2,))
_DIGITS_THEN_GPT2 = PreTokenizer((_GPT2,), single_digits=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    # The format's own fallback, for files that name it; a file that names nothing is refused.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_STYLE,
    "phi-2": _GPT2_STYLE,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA3_STYLE,
    "llama3": _LLAMA3_STYLE,
    "llama-v3": _LLAMA3_STYLE,
    "falcon3": _LLAMA3_STYLE,
    "pixtral": _LLAMA3_STYLE,
    "lfm2": _LLAMA3_STYLE,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,), normalise_nfc=True),
    "qwen35": PreTokenizer((_QWEN35,), normalise_nfc=True),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "tekken": PreTokenizer((_TEKKEN,), whole_words_first=True, adds_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "minimax-m2": PreTokenizer((_GPT4O,)),
    "llama4": PreTokenizer((_GPT4O,)),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "deepseek-llm": PreTokenizer(DEEPSEEK2_CUTS),
    "deepseek-coder": PreTokenizer(DEEPSEEK_CODER_CUTS),
    "deepseek-v3": PreTokenizer(DEEPSEEK3_CUTS),
    "hunyuan-dense": PreTokenizer(DEEPSEEK3_CUTS),
    "hunyuan": PreTokenizer((_QWEN2,), normalise_nfc=True),
    "seed-coder": PreTokenizer((_SEED,)),
    "glm4": PreTokenizer((_LLAMA3,)),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "exaone4": _GPT2_STYLE,
    "olmo": _GPT2_STYLE,
}
