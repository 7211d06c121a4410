"""Splits what a model thinks, between `<think>` and `</think>`, from what it answers, wherever the pieces are cut.
Parsers by name, as for tools; the other format is `harmony.py`'s."""

from __future__ import annotations

from twostroke.core.errors import BadRequestError
from twostroke.text import harmony
from twostroke.text.tokenizer import Tokenizer

OPENING, CLOSING = "<think>", "</think>"
PARSERS = ("think", "harmony", "none")


def choose(name: str, tokenizer: Tokenizer) -> str:
    """`auto`: a model whose chat template or vocabulary knows a format's markers thinks in it."""
    if name not in ("auto", *PARSERS):
        raise BadRequestError(f"the reasoning parser must be auto, {', '.join(PARSERS)}, not {name!r:.40}")
    if name != "auto":
        return name
    template, special = tokenizer.chat_template or "", tokenizer.special_tokens.keys()
    if all(sign in template for sign in harmony.SIGNS) or special >= set(harmony.SIGNS):
        return "harmony"
    knows = CLOSING in (tokenizer.chat_template or "") or len(tokenizer.encode(CLOSING, add_special_tokens=False)) == 1
    return "think" if knows else "none"


class ThinkSplitter:
    def __init__(self, *, is_open: bool = False) -> None:
        """`is_open`: the prompt already ends with the opening marker, so the answer begins with a thought."""
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
            if OPENING.startswith(stripped[: len(OPENING)]) and len(stripped) < len(OPENING):
                return "", ""  # it may yet be the marker
            if stripped.startswith(OPENING):
                self._state, self._held = "thinking", stripped[len(OPENING) :]
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
        thought, marker, rest = self._held.partition(CLOSING)
        if marker:
            shown = self._begin(thought.rstrip())
            self._state, self._held, self._spaces_due = "content", rest, True
            return shown
        end = len(thought.rstrip())  # before the marker it would be dropped
        for length in range(1, len(CLOSING)):
            if thought.endswith(CLOSING[:length]):
                end = min(end, len(thought[:-length].rstrip()))
        self._held = thought[end:]
        return self._begin(thought[:end])

    def _begin(self, text: str) -> str:
        """Without the white space at the text's beginning."""
        if self._spaces_due:
            text = text.lstrip()
            self._spaces_due = not text
        return text
