"""A grammar that begins after a thought. Until the closing marker came every token may come, but for an end of text: it
would leave the answer without what was asked for. Markers are matched as bytes, so a vocabulary may have them as one
token or cut them anyhow."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Protocol

from twostroke.core.grammar import ForeseeingMatcher, GrammarStuckError
from twostroke.text.reasoning import THINK, Markers

MAX_SPACE_TOKENS = 2
"""Between the closing marker and the grammar's first token: models are used to blank lines there."""
MAX_SPACE_BYTES = 4
"""The longest token that may stand there."""


class ThoughtMasks:
    """What may come around a thought, in one vocabulary: a bit a token id."""

    def __init__(self, tokens: Sequence[bytes], eos_ids: Sequence[int], markers: Markers = THINK) -> None:
        self.tokens = tokens
        opening, closing = markers.opening.encode(), markers.closing.encode()
        self.opening_bytes, self.closing_bytes = opening, closing
        ends = frozenset(eos_ids)
        free = [token_id for token_id in range(len(tokens)) if token_id not in ends]
        first = (markers.first_token or markers.opening).encode()
        last = {first[-1:], closing[-1:]}  # one pass over a large vocabulary
        near = [i for i in free if tokens[i] in opening or any(byte in tokens[i] for byte in last)]
        anything = int.from_bytes(bits(free, len(tokens)), "little")
        self.thinking: list[bytes] = []
        """What may come inside a thought, by how many bytes of the closing marker have come."""
        self.opening: list[bytes] = []
        """Tokens that go on with the opening marker, by how many bytes of it have come."""
        for matched in range(len(closing)):
            # A token that ends the marker and goes on with text would begin an answer that nobody watched.
            unwatched = bits([i for i in near if _goes_on(closing[:matched] + tokens[i], closing)], len(tokens))
            mask = anything & ~int.from_bytes(unwatched, "little")
            self.thinking.append(mask.to_bytes(len(unwatched), "little"))
        # Where the marker is a token of its own, no model writes it in letters.
        least = len(first) if any(tokens[i] == first for i in near) else 1
        for matched in range(len(opening)):
            able = [i for i in near if len(tokens[i]) >= least and _opens(tokens[i], opening[matched:], closing)]
            least = 1 if matched + 1 >= len(first) else least
            self.opening.append(bits(able, len(tokens)))
        self.spaces = bits([i for i in free if is_space(tokens[i])], len(tokens))


class RestartableMatcher(ForeseeingMatcher, Protocol):
    def copy(self) -> RestartableMatcher:
        """One that goes its own way from here."""

    def try_advance(self, token_id: int) -> bool:
        """Whether the grammar takes this token; where it does not, nothing has changed."""

    def reset(self) -> None:
        """Back to the beginning of the answer."""


class AfterThought:
    """A matcher whose state, like every matcher's, follows from the tokens that came."""

    def __init__(self, grammar: RestartableMatcher, masks: ThoughtMasks, *, is_open: bool) -> None:
        """`is_open`: the prompt has opened the thought. Else the answer may begin with one, or with the grammar."""
        self._grammar = grammar
        self._masks = masks
        self._state = "thinking" if is_open else "start"
        self._matched = 0  # bytes of the marker that the state waits for
        self._follows_grammar = True  # at the start, as long as a text may be either
        self._spaces_left = MAX_SPACE_TOKENS

    def allowed(self) -> bytes:
        masks = self._masks
        if self._state == "thinking":
            return masks.thinking[self._matched]
        if self._state == "start":
            opening = masks.opening[self._matched]
            return _either(opening, self._grammar.allowed()) if self._follows_grammar else opening
        if self._state == "spaces":
            return _either(masks.spaces, self._grammar.allowed())
        return self._grammar.allowed()

    def advance(self, token_id: int) -> None:
        token = self._masks.tokens[token_id] if token_id < len(self._masks.tokens) else b""
        if self._state == "thinking":
            self._think(token)
        elif self._state == "start":
            self._begin(token_id, token)
        elif self._state == "spaces" and is_space(token):
            if self._grammar.try_advance(token_id):
                self._state = "grammar"
            else:
                self._spaces_left -= 1
                self._state = "spaces" if self._spaces_left else "grammar"
        else:
            self._state = "grammar"
            self._grammar.advance(token_id)

    def forced(self) -> Sequence[int]:
        return self._grammar.forced() if self._state == "grammar" else ()

    def num_taken(self, token_ids: Sequence[int]) -> int:
        if self._state == "grammar":
            return self._grammar.num_taken(token_ids)
        trial = self.copy()
        for count, token_id in enumerate(token_ids):
            if trial._state == "grammar":
                return count + trial._grammar.num_taken(token_ids[count:])
            try:
                if not is_set(trial.allowed(), token_id):
                    return count
            except GrammarStuckError:  # told when the answer gets there
                return count
            trial.advance(token_id)
        return len(token_ids)

    def copy(self) -> AfterThought:
        other = copy(self)
        other._grammar = self._grammar.copy()
        return other

    def _begin(self, token_id: int, token: bytes) -> None:
        missing = self._masks.opening_bytes[self._matched :]
        if not _opens(token, missing, self._masks.closing_bytes):
            self._state = "grammar"
            self._grammar.advance(token_id)
        elif len(token) < len(missing):
            self._matched += len(token)
            self._follows_grammar = self._follows_grammar and self._grammar.try_advance(token_id)
        else:
            self._grammar.reset()  # it may have taken the marker's beginning for its own
            self._state, self._matched = "thinking", 0
            self._think(token[len(missing) :])

    def _think(self, token: bytes) -> None:
        closing = self._masks.closing_bytes
        text = closing[: self._matched] + token
        if closing in text:
            self._state = "spaces"
            return
        lengths = range(min(len(text), len(closing) - 1), 0, -1)
        self._matched = next((length for length in lengths if text.endswith(closing[:length])), 0)


def is_space(token: bytes) -> bool:
    return 0 < len(token) <= MAX_SPACE_BYTES and not token.strip(b" \n")


def bits(token_ids: Sequence[int], vocab_size: int) -> bytes:
    packed = bytearray((vocab_size + 7) // 8)
    for token_id in token_ids:
        packed[token_id // 8] |= 1 << token_id % 8
    return bytes(packed)


def is_set(mask: bytes, token_id: int) -> bool:
    return token_id < 8 * len(mask) and bool(mask[token_id // 8] >> token_id % 8 & 1)


def _goes_on(text: bytes, closing: bytes) -> bool:
    _, marker, rest = text.partition(closing)
    return bool(marker and rest.strip(b" \n"))


def _opens(token: bytes, missing: bytes, closing: bytes) -> bool:
    """Whether a token writes the next of an opening marker, or all of it and more."""
    return bool(token) and (missing.startswith(token) or (token.startswith(missing) and closing not in token))


def _either(first: bytes, second: bytes) -> bytes:
    length = max(len(first), len(second))
    joined = int.from_bytes(first, "little") | int.from_bytes(second, "little")
    return joined.to_bytes(length, "little")
