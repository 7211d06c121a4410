"""A copy of a tokenizer in which control tokens go by names that nobody outside knows: a text in its spelling has
control tokens where they were put, and nowhere else. Otherwise it cuts text exactly as the tokenizer does."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

NONCHARACTER = "\ufdd0"
"""A code point that Unicode reserves for a program's own use: no vocabulary has it, and no normaliser changes it."""


class GuardedTokens:
    def __init__(self, serialised: str, special_tokens: Mapping[str, int]) -> None:
        """Of a tokenizer as `tokenizer.json` has it."""
        secret = secrets.token_hex(16)
        marks = [f"{NONCHARACTER}{secret}.{number}{NONCHARACTER}" for number in range(len(special_tokens))]
        self._names = dict(zip(special_tokens, marks, strict=True))
        data = json.loads(serialised)
        added = {token["content"]: token["id"] for token in data["added_tokens"]}
        _rename(data, self._names)
        self.serialised = json.dumps(data)
        self.backend = Backend.from_str(self.serialised)
        copied = {self.backend.token_to_id(self._names.get(text, text)): token_id for text, token_id in added.items()}
        self._ids = {copy_id: token_id for copy_id, token_id in copied.items() if copy_id != token_id}
        """Of tokens whose id is another in the copy; there are none but in odd vocabularies."""

    def spell(self, text: str, marks: Sequence[Sequence[int]]) -> str:
        """The text in this copy's spelling: of what looks like a control token, only what lies at `marks` is one."""
        pieces: list[str] = []
        start = 0
        for begin, end in marks:
            pieces += text[start:begin], self._names[text[begin:end]]
            start = end
        return "".join((*pieces, text[start:]))

    def translate(self, ids: Sequence[int]) -> Sequence[int]:
        """The tokenizer's own ids of what the copy gave."""
        return [self._ids.get(token_id, token_id) for token_id in ids] if self._ids else ids


def _rename(data: dict[str, Any], names: Mapping[str, str]) -> None:
    """Added tokens and vocabulary alike: ids stay, and no piece of the vocabulary is a control token by chance. A piece
    that others are merged from, or are merged to, keeps its name."""
    data["post_processor"] = None  # frames a text with control tokens by their names; that is not done here
    for token in data["added_tokens"]:
        if token["special"]:
            token["content"] = names[token["content"]]
    model = data["model"]
    pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model.get("merges") or ()]
    merged = {piece for left, right in pairs for piece in (left, right, left + right)}

    def name(piece: str) -> str:
        return piece if piece in merged else names.get(piece, piece)

    vocabulary: Any = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {name(piece): token_id for piece, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[name(piece), score] for piece, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = name(model["unk_token"])
