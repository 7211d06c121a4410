"""Splits what a model thinks, between markers as `<think>` and `</think>`, from what it answers, wherever the pieces
are cut. Parsers by name, as for tools; the format that is no pair of markers is `harmony.py`'s."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from twostroke.core.errors import BadRequestError
from twostroke.text import harmony
from twostroke.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Markers:
    """What a thought stands between."""

    opening: str
    closing: str

    @property
    def tokens(self) -> frozenset[str]:
        """That a vocabulary may have, and an answer must be read with."""
        return frozenset({self.opening.partition(">")[0] + ">", self.closing})


THINK = Markers("<think>", "</think>")
CHANNEL = Markers("<|channel>thought", "<channel|>")
"""Gemma 4's."""
MARKERS = {"think": THINK, "channel": CHANNEL}
PARSERS = (*MARKERS, "harmony", "none")


def markers_in(tokens: Collection[bytes]) -> Markers:
    """Those that a vocabulary has as tokens."""
    return CHANNEL if all(marker.encode() in tokens for marker in CHANNEL.tokens) else THINK


def choose(name: str, tokenizer: Tokenizer) -> str:
    """`auto`: a model whose chat template or vocabulary knows a format's markers thinks in it."""
    if name not in ("auto", *PARSERS):
        raise BadRequestError(f"the reasoning parser must be auto, {', '.join(PARSERS)}, not {name!r:.40}")
    if name != "auto":
        return name
    template, special = tokenizer.chat_template or "", tokenizer.special_tokens.keys()
    if all(sign in template for sign in harmony.SIGNS) or special >= set(harmony.SIGNS):
        return "harmony"
    if all(marker in template for marker in CHANNEL.tokens) or special >= CHANNEL.tokens:
        return "channel"
    closing = THINK.closing
    knows = closing in template or len(tokenizer.encode(closing, add_special_tokens=False)) == 1
    return "think" if knows else "none"


class ThinkSplitter:
    def __init__(self, markers: Markers = THINK, *, is_open: bool = False) -> None:
        """`is_open`: the prompt already ends with the opening marker, so the answer begins with a thought."""
        self._opening, self._closing = markers.opening, markers.closing
        self._state = "thinking" if is_open else "start"
        self._held = ""
        self._spaces_due = True  # white space around a marker is no part of either text

    @property
    def is_thinking(self) -> bool:
        return self._state == "thinking"

    def push(self, text: str) -> tuple[str, str]:
        """New reasoning and new content."""
        reasoning, content = "", ""
        self._held += text
        if self._state == "start":
            stripped = self._held.lstrip()
            if self._opening.startswith(stripped) and stripped != self._opening:
                return "", ""  # it may yet be the marker
            if stripped.startswith(self._opening):
                self._state, self._held = "thinking", stripped[len(self._opening) :]
            else:
                self._state, self._spaces_due = "content", False
        if self._state == "thinking":
            reasoning = self._think()
        if self._state == "content":
            content, self._held = self._begin(self._held), ""
        return reasoning, content

    def finish(self, *, is_cut: bool = False) -> tuple[str, str]:
        """What was held back. Where an answer was cut, what may be the beginning of a marker is left out."""
        held, self._held = ("" if is_cut and self._held.strip() else self._held), ""
        return (self._begin(held), "") if self._state == "thinking" else ("", held)

    def _think(self) -> str:
        thought, marker, rest = self._held.partition(self._closing)
        if marker:
            shown = self._begin(thought.rstrip())
            self._state, self._held, self._spaces_due = "content", rest, True
            return shown
        end = len(thought.rstrip())  # before the marker it would be dropped
        for length in range(1, len(self._closing)):
            if thought.endswith(self._closing[:length]):
                end = min(end, len(thought[:-length].rstrip()))
        self._held = thought[end:]
        return self._begin(thought[:end])

    def _begin(self, text: str) -> str:
        """Without the white space at the text's beginning."""
        if self._spaces_due:
            text = text.lstrip()
            self._spaces_due = not text
        return text
