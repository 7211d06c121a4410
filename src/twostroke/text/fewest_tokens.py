"""The fewest tokens that a text can become, known from its length alone: no token stands for more bytes than the
vocabulary's longest. What a tokenizer may drop or join before it looks up tokens is not counted, and of a tokenizer
whose parts are not all known here nothing is claimed, so that no text is refused that would have fitted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as Backend

from twostroke.text.token_bytes import BYTE_OF_CHARACTER, SPACE_MARK

_COMPOSING = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_BEYOND_ASCII = bytes(range(0x80, 0x100))
_NOT_PRINTABLE = bytes([*range(0x21), 0x7F, *range(0x80, 0x100)])


class FewestTokens:
    def __init__(self, backend: Backend, num_framing: int, token_bytes: Callable[[int], bytes]) -> None:
        """`num_framing` tokens are put around a text, where it is framed."""
        self._num_framing = num_framing
        normalisers, cuts = _steps(backend.normalizer, "normalizers"), _steps(backend.pre_tokenizer, "pretokenizers")
        added = backend.get_added_tokens_decoder().values()
        composes = any(step["type"] in _COMPOSING for step in normalisers)
        self._may_shrink = composes or any(token.lstrip or token.rstrip for token in added)
        """Combining characters are joined to what they stand on; some added tokens swallow white space around them."""
        vocabulary = backend.get_vocab(with_added_tokens=True)
        without_tokens = _bytes_without_tokens(backend, vocabulary, [*normalisers, *cuts])
        self._is_known = (
            all(step["type"] in _COMPOSING or _grows(step) for step in normalisers)
            and all(_only_cuts(step) for step in cuts)
            and without_tokens is not None
        )
        self._uncounted = (without_tokens or b"") + (_NOT_PRINTABLE if self._may_shrink else b"")
        lengths = [len(token_bytes(token_id)) for token_id in vocabulary.values()]
        self.longest_bytes = max(1, *lengths, *(len(token.content.encode()) for token in added))

    def of(self, text: str, *, is_framed: bool) -> int:
        framing = self._num_framing if is_framed else 0
        if not self._is_known:
            return framing
        raw = text.encode("utf-8", "surrogatepass")
        num_bytes = len(raw.translate(None, self._uncounted))
        if self._may_shrink and not text.isascii():
            # A character beyond ASCII may vanish, and with it the one of ASCII that it is joined to.
            num_bytes = max(0, num_bytes - (len(text) - len(raw.translate(None, _BEYOND_ASCII))))
        return framing + -(-num_bytes // self.longest_bytes)


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """A normaliser or a pre-tokenizer, as the steps it is made of."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return list(_flat(state, name))


def _flat(state: dict[str, Any], name: str) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [step for inner in state[name] for step in _flat(inner, name)]


def _grows(normaliser: dict[str, Any]) -> bool:
    """Whether a text is never shorter for it."""
    if normaliser["type"] == "Replace":
        return bool(normaliser["pattern"] == {"String": " "} and normaliser["content"] == SPACE_MARK)
    return normaliser["type"] in ("Prepend", "ByteLevel")


def _only_cuts(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether it drops nothing of what it cuts."""
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    if pre_tokenizer["type"] == "Metaspace":
        return bool(pre_tokenizer["replacement"] == SPACE_MARK)
    return pre_tokenizer["type"] in ("ByteLevel", "Digits")


def _bytes_without_tokens(backend: Backend, vocabulary: dict[str, int], steps: list[dict[str, Any]]) -> bytes | None:
    """Those that are passed over, or share an unknown token with others; None where that is not known."""
    model = backend.model
    kind = type(model).__name__
    if kind == "BPE" and any(step["type"] == "ByteLevel" for step in steps):
        return bytes([byte for character, byte in BYTE_OF_CHARACTER.items() if character not in vocabulary])
    falls_back = kind in ("BPE", "Unigram") and bool(getattr(model, "byte_fallback", False))  # Unigram does not say
    return b"" if falls_back and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)) else None
