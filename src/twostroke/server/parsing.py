"""One answer's text taken apart as it comes: what was thought, what was said, which tools were called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from twostroke.core.step import TokenLogprobs
from twostroke.text.harmony import HarmonySplitter
from twostroke.text.reasoning import ThinkSplitter
from twostroke.text.tool_parsers.call_parser import CallDelta, ToolCallParser


@dataclass(slots=True)
class Parts:
    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    num_finished_calls: int = 0
    """Of the whole answer so far."""
    logprobs: Sequence[TokenLogprobs] = ()
    """Of the tokens that these came from."""


class AnswerParser:
    def __init__(
        self,
        thoughts: ThinkSplitter | HarmonySplitter | None = None,
        tools: ToolCallParser | None = None,
        *,
        is_held_to_calls: bool = False,
    ) -> None:
        """`is_held_to_calls`: the model can say nothing else, so what is no whole call is part of one."""
        self._is_held_to_calls = is_held_to_calls
        self._thoughts = thoughts
        self._tools = tools
        self.reasoning_tokens = 0

    @property
    def num_finished_calls(self) -> int:
        """A call that was cut is not one of them: nobody should run it."""
        return 0 if self._tools is None else self._tools.num_finished

    def push(self, text: str, num_tokens: int, *, is_last: bool, is_cut: bool = False) -> Parts:
        """`is_cut`: the last text did not end where the model would have ended it."""
        is_cut = is_cut or self._is_held_to_calls
        parts = Parts(content=text)
        if self._thoughts is not None:
            parts.reasoning, parts.content = self._thoughts.push(text)
            if parts.reasoning or self._thoughts.is_thinking:
                self.reasoning_tokens += num_tokens
            if is_last:
                reasoning, content = self._thoughts.finish(is_cut=is_cut)
                parts.reasoning, parts.content = parts.reasoning + reasoning, parts.content + content
        if self._tools is not None:
            split = self._tools.push(parts.content)
            parts.content, parts.calls = split.content, split.calls
            if is_last:
                rest = self._tools.finish(is_cut=is_cut)
                parts.content += rest.content
                parts.calls += rest.calls
        parts.num_finished_calls = self.num_finished_calls
        return parts


def finished_calls(parts: Iterable[Parts], num_finished: int) -> list[tuple[str, str]]:
    """Of a whole answer: name and arguments of each call that came to its end."""
    names: list[str] = []
    arguments: list[list[str]] = []
    for number, name, text in (delta for part in parts for delta in part.calls):
        if name is not None:
            names.append(name)
            arguments.append([])
        arguments[number].append(text)
    calls = [(name, "".join(texts)) for name, texts in zip(names, arguments, strict=True)]
    return calls[:num_finished]
