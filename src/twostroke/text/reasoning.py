"""Splits what a model thinks, between markers as `<think>` and `</think>`, from what it answers, wherever the pieces
are cut. Parsers by name, as for tools; the format that is no pair of markers is `harmony.py`'s."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from twostroke.core.errors import BadRequestError
from twostroke.text import harmony
from twostroke.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Markers:
    """What a thought stands between."""

    opening: str
    closing: str
    first_token: str = ""
    """Of the opening marker, where a vocabulary may have that alone."""
    answer: tuple[str, str] | None = None
    """What the answer may stand between, behind a thought."""
    other_openings: tuple[str, ...] = ()
    """What else a prompt may end with that leaves a thought open."""

    @property
    def tokens(self) -> frozenset[str]:
        """That a vocabulary may have, and an answer must be read with."""
        return frozenset({self.first_token or self.opening, self.closing})

    def are_open_in(self, ending: str) -> bool:
        """Of a prompt, without white space behind it."""
        return ending.endswith((self.opening, *self.other_openings))


THINK = Markers("<think>", "</think>")
CHANNEL = Markers("<|channel>thought", "<channel|>", first_token="<|channel>")
"""Gemma 4's."""
MISTRAL = Markers("[THINK]", "[/THINK]")
"""Magistral's and Ministral 3's."""
SEED = Markers("<seed:think>", "</seed:think>", other_openings=("<seed:think><seed:cot_budget_reflect>",))
"""Seed-OSS'; a budget of nothing is spent by the template."""
GRANITE = Markers("Here is my thought process:", "Here is my response:")
"""Granite 3.2's: words, no tokens."""
MARKERS = {
    "think": THINK,
    "think-answer": Markers("<think>", "</think>", answer=("<answer>", "</answer>")),
    "think-response": Markers("<think>", "</think>", answer=("<response>", "</response>")),
    "channel": CHANNEL,
    "mistral": MISTRAL,
    "seed": SEED,
    "granite": GRANITE,
}
PARSERS = (*MARKERS, "harmony", "none")
FAMILIES = {
    "hunyuan_v1_dense": "think-answer",
    "hunyuan_v1_moe": "think-answer",
    "ernie4_5": "think-response",
    "ernie4_5_moe": "think-response",
}
"""Whose answers have tags of their own behind a thought."""


_RESPONSE = re.compile(r"</think>.{0,200}?<response>", re.DOTALL)
"""Elsewhere in a template `<response>` is the tag of a tool's result, as MiniMax has it."""


class Choice(NamedTuple):
    parser: str
    reason: str


def markers_in(tokens: Collection[bytes]) -> Markers:
    """Those that a vocabulary has as tokens."""
    rare = (CHANNEL, MISTRAL, SEED)
    return next((one for one in rare if all(marker.encode() in tokens for marker in one.tokens)), THINK)


def choose(name: str, tokenizer: Tokenizer, family: str = "") -> Choice:
    """`auto`: a model whose chat template or vocabulary knows a format's markers thinks in it."""
    name = name.lower().replace("_", "-")
    if name not in ("auto", *PARSERS):
        raise BadRequestError(f"the reasoning parser must be auto, {', '.join(PARSERS)}, not {name!r:.40}")
    if name != "auto":
        return Choice(name, "as asked")
    template, special = tokenizer.chat_template or "", tokenizer.special_tokens.keys()
    signs = {"harmony": frozenset(harmony.SIGNS)}
    signs |= {parser: MARKERS[parser].tokens for parser in ("channel", "mistral", "seed", "granite")}
    for parser, markers in signs.items():
        if all(marker in template for marker in markers):
            return Choice(parser, "by the chat template")
        if special >= markers:
            return Choice(parser, "by the vocabulary")
    is_in_template = THINK.closing in template
    if not is_in_template and len(tokenizer.encode(THINK.closing, add_special_tokens=False)) != 1:
        return Choice("none", "as nothing tells that it thinks")
    reason = "by the chat template" if is_in_template else "by the vocabulary"
    if "<answer>" in template:
        return Choice("think-answer", reason)
    if _RESPONSE.search(template):
        return Choice("think-response", reason)
    return Choice(FAMILIES[family], f"by the family {family}") if family in FAMILIES else Choice("think", reason)


class ThinkSplitter:
    def __init__(self, markers: Markers = THINK, *, is_open: bool = False, call_opening: str = "") -> None:
        """`is_open`: the prompt already ends with the opening marker, so the answer begins with a thought. A thought
        ends before `call_opening`, too, where there is one."""
        self._opening = markers.opening
        self._ends = tuple(filter(None, (markers.closing, call_opening)))
        self._answer = None if markers.answer is None else ThinkSplitter(Markers(*markers.answer))
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
        return reasoning, content if self._answer is None else "".join(self._answer.push(content))

    def finish(self, *, is_cut: bool = False) -> tuple[str, str]:
        """What was held back. Where an answer was cut, what may be the beginning of a marker is left out."""
        held, self._held = ("" if is_cut and self._held.strip() else self._held), ""
        reasoning, content = (self._begin(held), "") if self._state == "thinking" else ("", held)
        if self._answer is not None:
            content = "".join(self._answer.push(content)) + "".join(self._answer.finish(is_cut=is_cut))
        return reasoning, content

    def _think(self) -> str:
        places = [(self._held.index(end), end) for end in self._ends if end in self._held]
        if places:
            place, marker = min(places)
            shown = self._begin(self._held[:place].rstrip())
            behind = place + len(marker) if marker == self._ends[0] else place  # a call is for others to read
            self._state, self._held, self._spaces_due = "content", self._held[behind:], True
            return shown
        thought = self._held
        end = len(thought.rstrip())  # before the marker it would be dropped
        for marker in self._ends:
            for length in range(1, len(marker)):
                if thought.endswith(marker[:length]):
                    end = min(end, len(thought[:-length].rstrip()))
        self._held = thought[end:]
        return self._begin(thought[:end])

    def _begin(self, text: str) -> str:
        """Without the white space at the text's beginning."""
        if self._spaces_due:
            text = text.lstrip()
            self._spaces_due = not text
        return text
