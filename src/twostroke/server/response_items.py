"""The output of a Responses call: an answer's thoughts, texts and tool calls as the items of a list, in their order, as
they come. Says what was opened, what was added and what is whole; sends nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

from twostroke.core.step import TokenLogprobs
from twostroke.server.logprobs import chat_logprobs
from twostroke.server.parsing import Parts
from twostroke.server.replies import ChatLogprob
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tool_parsers.call_parser import CallDelta
from twostroke.text.tool_parsers.formats import ToolFormat

_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}
CALLS = ("function_call", "custom_tool_call")


@dataclass(slots=True)
class Item:
    kind: str
    """`reasoning`, `message`, `function_call` or `custom_tool_call`."""
    index: int
    name: str = ""
    number: int | None = None
    """Of a call, among the answer's."""
    call_id: str = ""
    id: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)
    """Of a message's tokens, where they were asked for."""
    status: str = "in_progress"

    def __post_init__(self) -> None:
        self.id = f"{_PREFIXES[self.kind]}_{uuid4().hex}"

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self, text: str, logprobs: Sequence[ChatLogprob] = ()) -> dict[str, Any]:
        """The one part that a text's item has."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}

    def reply(self, *, is_opening: bool = False, with_logprobs: bool = True) -> dict[str, Any]:
        """`is_opening`: as it was before anything was written, whatever has come since."""
        shown: dict[str, Any] = {"type": self.kind, "id": self.id, "status": self.status}
        if is_opening:
            shown["status"] = "in_progress"
        if self.kind in CALLS:
            text = "" if is_opening else self.text
            said = {"arguments": text} if self.kind == "function_call" else {"input": text}
            return shown | {"call_id": self.call_id, "name": self.name, **said}
        content = [] if is_opening else [self.part(self.text, self.logprobs if with_logprobs else ())]
        if self.kind == "reasoning":
            return shown | {"summary": [], "content": content}
        return shown | {"role": "assistant", "content": content}


class Change(NamedTuple):
    kind: str
    """`opened`, `added` or `closed`."""
    item: Item
    text: str = ""
    logprobs: Sequence[ChatLogprob] = ()


class OutputItems:
    """The output items of one answer."""

    def __init__(
        self, tool_format: ToolFormat, tokenizer: Tokenizer | None = None, custom: Collection[str] = ()
    ) -> None:
        """The tokenizer spells logprobs, where there are any; `custom` are the tools that take a text."""
        self.items: list[Item] = []
        self._tool_format = tool_format
        self._tokenizer = tokenizer
        self._custom = custom
        self._finished: Collection[int] = ()  # the numbers of the calls that are whole
        self._heard: list[TokenLogprobs] = []  # of tokens whose text may still be held back
        self._is_open = False  # the last of them

    def push(self, parts: Parts) -> list[Change]:
        changes: list[Change] = []
        self._heard.extend(parts.logprobs)
        self._finished = parts.finished
        for piece in parts.in_order or [parts]:
            self._push_piece(piece, changes)
        if parts.reasoning or parts.calls:
            self._heard.clear()  # whatever was held back is part of these
        return changes

    def _push_piece(self, parts: Parts, changes: list[Change]) -> None:
        calls = list(parts.calls)
        if parts.reasoning:
            self._add("reasoning", parts.reasoning, changes)
        while calls and calls[0].name is None:  # the rest of a call that was begun, and what is said comes after it
            self._add(self.items[-1].kind, calls.pop(0).arguments, changes)
        if content := self._said(parts.content):
            self._add("message", content, changes)
        for call in calls:
            if call.name is not None:
                self._open("custom_tool_call" if call.name in self._custom else "function_call", changes, call)
            if call.arguments:
                self._add(self.items[-1].kind, call.arguments, changes)

    def finish(self, *, is_cut: bool) -> list[Change]:
        """A call that was begun and never came to its end is closed as incomplete, and no longer one of the items:
        nobody should run it."""
        changes: list[Change] = []
        if not self.items and not is_cut:
            self._open("message", changes)
        self._close(changes, "incomplete" if is_cut else "completed")
        self.items = [item for item in self.items if item.kind not in CALLS or item.number in self._finished]
        return changes

    def _said(self, content: str) -> str:
        """White space that sets a text off from a thought or a call is no part of it."""
        goes_on = not self.items or (self._is_open and self.items[-1].kind == "message")
        return content if goes_on else content.lstrip()

    def _add(self, kind: str, text: str, changes: list[Change]) -> None:
        if not self._is_open or self.items[-1].kind != kind:
            self._open(kind, changes)
        item = self.items[-1]
        item.pieces.append(text)
        logprobs = self._take_logprobs(text) if kind == "message" else []
        item.logprobs.extend(logprobs)
        changes.append(Change("added", item, text, logprobs))

    def _take_logprobs(self, text: str) -> list[ChatLogprob]:
        """Of the latest tokens, as many as the text is made of: a marker or blanks before it are no part of it, nor is
        an end of text behind it."""
        if self._tokenizer is None or not self._heard:
            return []
        heard = [entry for entry in self._heard if not self._tokenizer.is_special(entry.token_id)]
        self._heard.clear()
        start, missing = len(heard), len(text.encode())
        while start and missing > 0:
            start -= 1
            missing -= len(self._tokenizer.token_bytes(heard[start].token_id))
        return chat_logprobs(self._tokenizer, heard[start:]).content

    def _open(self, kind: str, changes: list[Change], call: CallDelta | None = None) -> None:
        self._close(changes, "completed")
        item = Item(kind, len(self.items))
        if call is not None:
            item.name, item.call_id = call.name or "", self._tool_format.new_call_id()
            item.number = call.number
        self.items.append(item)
        self._is_open = True
        changes.append(Change("opened", item))

    def _close(self, changes: list[Change], status: str) -> None:
        if not self._is_open:
            return
        item = self.items[-1]
        if item.kind in CALLS:
            status = "completed" if item.number in self._finished else "incomplete"
        item.status, self._is_open = status, False
        changes.append(Change("closed", item))
