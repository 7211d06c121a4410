"""Reads the tokenizer fields of GGUF metadata, which come from a file nobody vouches for: each has its type and its
range checked, and an error names it. Knows no tokenizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum
from itertools import chain
from typing import Any

from twostroke.core.errors import ModelError


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class TokenizerFields:
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens = self._strings("tokenizer.ggml.tokens")
        if not self.tokens:
            raise ModelError("tokenizer.ggml.tokens is empty: the file has no vocabulary")

    def text(self, key: str) -> str | None:
        value = self._metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise _wrong(key, "text", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(key, default)
        if not isinstance(value, bool):
            raise _wrong(key, "true or false", value)
        return value

    def token_id(self, key: str, default: int | None = None) -> int | None:
        value = self._metadata.get(key, default)
        if value is None or (value == default and key not in self._metadata and value >= len(self.tokens)):
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong(key, "a token id", value)
        if not 0 <= value < len(self.tokens):
            raise ModelError(f"{key} is {value}, but the vocabulary has {len(self.tokens)} tokens")
        return value

    def needed_id(self, *names: str) -> int:
        """The id that the first of these keys gives; an encoder's, whose texts cannot be framed without it."""
        for name in names:
            token_id = self.token_id(f"tokenizer.ggml.{name}_token_id")
            if token_id is not None:
                return token_id
        raise ModelError(f"tokenizer.ggml.{names[0]}_token_id is missing, and an encoder's tokenizer needs it")

    def byte_string(self, key: str) -> bytes:
        """Empty where nothing is said. Some files hold them with a sign."""
        value = self._metadata.get(key)
        if value is None:
            return b""
        if not isinstance(value, (list, tuple)) or not all(type(one) is int and -128 <= one < 256 for one in value):
            raise _wrong(key, "a list of bytes", value)
        return bytes(one % 256 for one in value)

    def merges(self) -> list[tuple[str, str]]:
        key = "tokenizer.ggml.merges"
        known = set(self.tokens) - {""}
        lines = self._strings(key)
        # All at once, since a vocabulary has 10^5 merges; one that is wrong is looked for only when there is one.
        split = [tuple(line.split(" ")) for line in lines]
        if (
            set(map(len, split)) <= {2}
            and known.issuperset(chain.from_iterable(split))
            and known.issuperset(map("".join, split))
        ):
            return split  # type: ignore[return-value]
        pairs: list[tuple[str, str]] = []
        for index, line in enumerate(lines):
            left, space, right = line.partition(" ")
            if not (left and space and right) or " " in right:
                raise ModelError(f"{key}[{index}] is {line[:60]!r}, not two tokens with a space between them")
            if left not in known or right not in known or left + right not in known:
                raise ModelError(f"{key}[{index}] is {line[:60]!r}, whose tokens are not all in the vocabulary")
            pairs.append((left, right))
        return pairs

    def token_types(self) -> list[int]:
        key = "tokenizer.ggml.token_type"
        if self._metadata.get(key) is None:
            return [TokenType.NORMAL] * len(self.tokens)
        types = self._of_vocabulary_length(key)
        if set(map(type, types)) == {int}:
            return types
        for index, value in enumerate(types):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ModelError(f"{key}[{index}] must be an integer, not {value!r:.60}")
        return types

    def scores(self) -> list[float]:
        key = "tokenizer.ggml.scores"
        scores = self._of_vocabulary_length(key)
        for index, value in enumerate(scores):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ModelError(f"{key}[{index}] must be a finite number, not {value!r:.60}")
        return scores

    def _of_vocabulary_length(self, key: str) -> list[Any]:
        values = self._list(key)
        if len(values) != len(self.tokens):
            raise ModelError(f"{key} has {len(values)} entries, but the vocabulary has {len(self.tokens)} tokens")
        return values

    def _strings(self, key: str) -> list[str]:
        values = self._list(key)
        if set(map(type, values)) <= {str}:
            return values
        for index, value in enumerate(values):
            if not isinstance(value, str):
                raise ModelError(f"{key}[{index}] must be text, not {value!r:.60}")
        return values

    def _list(self, key: str) -> list[Any]:
        value = self._metadata.get(key)
        if value is None:
            raise ModelError(f"the file has no {key}, which its tokenizer needs")
        if not isinstance(value, (list, tuple)):
            raise _wrong(key, "a list", value)
        return list(value)


def _wrong(key: str, wanted: str, value: object) -> ModelError:
    return ModelError(f"{key} must be {wanted}, not {value!r:.60}")
