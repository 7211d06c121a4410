"""Splits answers in OpenAI's Harmony format (gpt-oss) into what was thought, what was said and which tools were called,
wherever the pieces are cut. An answer is a row of messages, `<|channel|>NAME<|message|>TEXT<|end|>`, each after the
first with `<|start|>assistant` before it; the last ends with `<|return|>`, a call with `<|call|>`. What is no such
message comes out as text: nothing that a model writes is an error.

Calls are handed on as content, written as `HARMONY` (`tool_parsers`) has them, for the parser behind this one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

START, CHANNEL, MESSAGE, END, RETURN, CALL = (
    f"<|{name}|>" for name in ("start", "channel", "message", "end", "return", "call")
)
CONSTRAIN = "<|constrain|>"
CALL_OPENING = f"{CHANNEL}commentary to=functions."
CALL_AFTER_NAME = f" {CONSTRAIN}json{MESSAGE}"
THOUGHT = (f"{CHANNEL}analysis{MESSAGE}", f"{END}{START}assistant")
"""What opens a thought, and what stands between it and the next message's channel."""
ANSWER_OPENING = f"{CHANNEL}final{MESSAGE}"
HELD_ANSWER = rf"""start: thought* {CHANNEL} "final" {MESSAGE} @answer
thought: {CHANNEL} "analysis" {MESSAGE} TEXT {END} {START} "assistant"
TEXT: /(.|\n)*/"""
"""Lark of a whole answer whose final text is held to the grammar `answer`. No control token is part of a TEXT."""
HELD_BY = frozenset({START, CHANNEL, MESSAGE, END})
"""The control tokens that it needs."""
SIGNS = (CHANNEL, MESSAGE, CONSTRAIN)
"""That tell a model which writes so."""
MAX_HEADER_CHARS = 512
"""Of what stands before `<|message|>`: a name and a recipient. More is no header."""

_ENDS = (END, RETURN, CALL, START, CHANNEL)
"""What ends a message's text. The last two should not stand there, and begin the next message all the same."""
_FUNCTION = re.compile(r"(?:^|\s)to=functions\.([A-Za-z0-9_.-]{1,256})")
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")


@dataclass(frozen=True, slots=True)
class _Header:
    """What a message is, read from all that stands before its text."""

    is_thought: bool
    function: str | None = None

    @staticmethod
    def read(text: str, *, has_calls: bool) -> _Header:
        role, _, rest = text.removeprefix(START).partition(CHANNEL)
        plain = f"{role} {rest}".replace(CONSTRAIN, " ")
        channel = rest.split()[0] if rest.split() else ""
        called = _FUNCTION.search(plain)
        if called is not None and has_calls:
            return _Header(is_thought=False, function=called[1])
        # What is sent to somebody else (a browser, an interpreter) is no more for readers than a thought is.
        is_sent = called is None and _RECIPIENT.search(plain) is not None
        return _Header(is_thought=is_sent or channel.startswith("analysis"))


class Run(NamedTuple):
    """New text of one message."""

    reasoning: str = ""
    content: str = ""
    ends_message: bool = False
    """What was called in it and is not whole never will be."""


NOTHING = Run()


class HarmonySplitter:
    """Of one answer; used in place of a ThinkSplitter."""

    def __init__(self, *, has_calls: bool) -> None:
        """`has_calls`: calls of functions are to be handed on as such; else they are text."""
        self._has_calls = has_calls
        self._state = "start"
        self._held = ""
        self._message = _Header(is_thought=False)
        self._has_text = False  # in this message
        self._blank = ""  # before a call's arguments
        self._has_shown = {"reasoning": False, "content": False}
        self._shown = {"reasoning": "", "content": ""}
        self._has_ended = False  # a message, since something was taken

    @property
    def is_thinking(self) -> bool:
        return self._state == "text" and self._message.is_thought

    def push(self, text: str) -> list[Run]:
        """What is new, in the order of the messages that it is of: a thought may come behind a text or a call."""
        self._held += text
        runs = []
        while self._step():
            runs.append(self._taken())
        runs.append(self._taken())
        return [run for run in runs if run != NOTHING] or [NOTHING]

    def finish(self, *, is_cut: bool = False) -> Run:
        """What was held back. Where an answer was cut, what may be the beginning of a marker or of a message is left
        out, and a call whose arguments did not begin is none."""
        held, self._held = self._held, ""
        if is_cut:
            return self._taken()
        if self._state == "text":
            self._show(held)
            self._end_message()
        elif held.strip():
            self._begin(_Header(is_thought=False))
            self._show(held)
        return self._taken()

    def _taken(self) -> Run:
        shown = Run(self._shown["reasoning"], self._shown["content"], self._has_ended)
        self._shown, self._has_ended = {"reasoning": "", "content": ""}, False
        return shown

    def _step(self) -> bool:
        """Go on as far as what is held decides; whether it did."""
        return {"start": self._in_start, "header": self._in_header, "text": self._in_text}[self._state]()

    def _in_start(self) -> bool:
        """Between messages, or before the first."""
        stripped = self._held.lstrip()
        if not stripped:
            return False
        begins = (START, CHANNEL, "to=")
        if stripped.startswith(begins):
            self._state, self._held = "header", stripped
            return True
        if stripped.startswith((END, RETURN, CALL)):  # an end without a message
            self._held = stripped[stripped.index("|>") + 2 :]
            return True
        if any(marker.startswith(stripped) for marker in (*begins, END, RETURN, CALL)):
            return False
        self._begin(_Header(is_thought=False))
        return True

    def _in_header(self) -> bool:
        head, marker, rest = self._held.partition(MESSAGE)
        is_broken = len(head) > MAX_HEADER_CHARS or any(wrong in head[1:] for wrong in (START, END, RETURN, CALL))
        if is_broken:
            held = self._held
            self._begin(_Header(is_thought=False))
            # Its own marker would begin it again.
            marker_end = held.index("|>") + 2 if held.startswith("<|") else len("to=")
            self._show(held[:marker_end])
            self._held = held[marker_end:]
            return True
        if not marker:
            return False
        self._held = rest
        self._begin(_Header.read(head, has_calls=self._has_calls))
        return True

    def _in_text(self) -> bool:
        places = [(self._held.index(marker), marker) for marker in _ENDS if marker in self._held]
        if not places:
            end = len(self._held) - _marker_begun(self._held)
            self._show(self._held[:end])
            self._held = self._held[end:]
            return False
        place, marker = min(places)
        self._show(self._held[:place])
        self._held = self._held[place:] if marker in (START, CHANNEL) else self._held[place + len(marker) :]
        self._end_message()
        return True

    def _begin(self, message: _Header) -> None:
        self._state, self._message, self._has_text = "text", message, False

    def _end_message(self) -> None:
        if self._message.function is not None and not self._has_text:
            self._show("{}")  # it was called without arguments
        self._blank, self._has_ended = "", True
        self._state, self._message = "start", _Header(is_thought=False)

    def _show(self, text: str) -> None:
        if not text:
            return
        if self._message.function is not None and not self._has_text:
            text = self._blank = self._blank + text
            if not text.strip():
                return
            if not text.lstrip().startswith("{"):
                self._message = _Header(is_thought=False)  # arguments are an object: this is none, and no call
            else:
                text = f"{CALL_OPENING}{self._message.function}{CALL_AFTER_NAME}{text}"
        kind = "reasoning" if self._message.is_thought else "content"
        if not self._has_text and self._has_shown[kind] and self._message.function is None:
            text = f"\n\n{text}"  # another message than what came before
        self._has_text = True
        self._has_shown[kind] |= self._message.function is None  # of a call nothing is read
        self._shown[kind] += text


def _marker_begun(text: str) -> int:
    """How many of the last characters may be the beginning of a marker."""
    longest = max(map(len, _ENDS)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in _ENDS):
            return length
    return 0
