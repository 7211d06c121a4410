"""Fill-in-the-middle: which tokens a model marks a hole in a text with, and the prompt that asks to fill it. Found by
what a GGUF file says of them, or by the names that families have given them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.text.tokenizer import Tokenizer

_NAMES = (  # before the hole, behind it, the hole itself
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
_MISTRAL = ("[PREFIX]", "[SUFFIX]")
"""Codestral has the text behind the hole first, and no mark for the hole."""
_ENDS = ("▁<EOT>", "<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>", "<|endoftext|>")
"""What a model writes when the hole is filled; some end no other answer."""


@dataclass(frozen=True, slots=True)
class Infill:
    prefix_id: int
    suffix_id: int
    middle_id: int | None
    """None: the text behind the hole comes first, then the one before it."""
    end_ids: tuple[int, ...]

    def prompt(self, start: Sequence[int], before: Sequence[int], behind: Sequence[int]) -> tuple[int, ...]:
        """`start` is what every prompt begins with, a BOS mostly."""
        if self.middle_id is None:
            return (*start, self.suffix_id, *behind, self.prefix_id, *before)
        return (*start, self.prefix_id, *before, self.suffix_id, *behind, self.middle_id)


def infill_of(tokenizer: Tokenizer) -> Infill | None:
    """None where the model has no such tokens."""
    ends = (tokenizer.id_of(text) for text in _ENDS)
    end_ids = tuple(token_id for token_id in ends if token_id is not None and token_id not in tokenizer.eos_token_ids)
    if tokenizer.infill_ids is not None:
        return Infill(*tokenizer.infill_ids, end_ids)
    for names in _NAMES:
        prefix_id, suffix_id, middle_id = (tokenizer.id_of(name) for name in names)
        if prefix_id is not None and suffix_id is not None and middle_id is not None:
            return Infill(prefix_id, suffix_id, middle_id, end_ids)
    prefix_id, suffix_id = (tokenizer.id_of(name) for name in _MISTRAL)
    if prefix_id is None or suffix_id is None:
        return None
    return Infill(prefix_id, suffix_id, None, end_ids)
