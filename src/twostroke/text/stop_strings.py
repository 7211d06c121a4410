"""Finds stop strings in streamed text, wherever the pieces are cut, and holds back only what may become one.
The stop string that is complete first wins; of those complete at the same character, the longest."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.core.errors import BadRequestError


class _Pattern:
    """One stop string, matched a character at a time (Knuth, Morris and Pratt): `matched` is how much of its start
    the text seen so far ends with."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # _fallback[n]: the longest proper prefix that text[:n] also ends with
        self._fallback = [0] * (len(text) + 1)
        for end in range(2, len(text) + 1):
            self._fallback[end] = self._extend(self._fallback[end - 1], text[end - 1])

    def _extend(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._fallback[matched]
        return matched + 1 if self.text[matched] == character else 0

    def push(self, character: str) -> bool:
        """Whether the text now ends with this stop string."""
        if self.matched == len(self.text):  # it was complete, and passed over
            self.matched = self._fallback[self.matched]
        self.matched = self._extend(self.matched, character)
        return self.matched == len(self.text)

    @property
    def still_possible(self) -> int:
        """The characters at the text's end that a stop string may yet begin with."""
        return self._fallback[self.matched] if self.matched == len(self.text) else self.matched


class StopStringMatcher:
    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the stop string itself is emitted too."""
        if any(not isinstance(stop, str) or not stop for stop in stops):
            raise BadRequestError("stop must hold non-empty strings")
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops)]
        self._include = include
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop string was found; nothing follows one. Without `may_stop`,
        one that this text completes is passed over; one that it only begins may be completed later."""
        if self.stopped_by is not None:
            return "", True
        if not self._patterns:
            return text, False
        held = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = [pattern.text for pattern in self._patterns if pattern.push(character)]
            if complete and may_stop:
                stop = max(complete, key=len)
                self.stopped_by, self._held = stop, ""
                return held[: end if self._include else end - len(stop)], True
        keep = max(pattern.still_possible for pattern in self._patterns)
        shown = len(held) - keep
        self._held = held[shown:]
        return held[:shown], False

    def finish(self) -> str:
        """The text held back, now that nothing will complete it."""
        held, self._held = self._held, ""
        return held
