"""Byte-level BPE as its papers describe it, slow and plain: split with a regular expression, then join the pair of
lowest rank until none is left. Shares nothing with the product or the `tokenizers` library; `regex` does \\p{N}."""

from __future__ import annotations

from itertools import pairwise

import regex

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_alphabet() -> list[str]:
    visible = set(range(ord("!"), ord("~") + 1)) | set(range(ord("¡"), ord("¬") + 1)) | set(range(ord("®"), 256))
    letters, next_letter = [], 256
    for byte in range(256):
        letters.append(chr(byte if byte in visible else next_letter))
        next_letter += byte not in visible
    return letters


class ByteLevelOracle:
    def __init__(self, tokens: list[str], merges: list[str], specials: list[str]) -> None:
        self._ids = {token: index for index, token in enumerate(tokens)}
        self._ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(merges)}
        self._specials = regex.compile("|".join(regex.escape(s) for s in sorted(specials, key=len, reverse=True)))
        self._letters = byte_alphabet()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        position = 0
        for match in self._specials.finditer(text):
            ids += self._encode_plain(text[position : match.start()])
            ids.append(self._ids[match[0]])
            position = match.end()
        return ids + self._encode_plain(text[position:])

    def _encode_plain(self, text: str) -> list[int]:
        """The cut of the smollm family: each digit alone first, then GPT-2's words in what lies between."""
        pieces = [piece for piece in regex.split(r"(\p{N})", text) if piece]
        words = [word for piece in pieces for word in regex.findall(GPT2_WORDS, piece)]
        return [token_id for word in words for token_id in self._encode_word(word)]

    def _encode_word(self, word: str) -> list[int]:
        # A byte the vocabulary lacks is dropped: such bytes exist in SmolLM2's, and its own tokenizer drops them.
        parts = [letter for byte in word.encode() if (letter := self._letters[byte]) in self._ids]
        while len(parts) > 1:
            ranks = [self._ranks.get(pair, len(self._ranks)) for pair in pairwise(parts)]
            best = min(ranks)
            if best == len(self._ranks):
                break
            index = ranks.index(best)
            parts[index : index + 2] = [parts[index] + parts[index + 1]]
        return [self._ids[part] for part in parts]
