"""One answer's text taken apart as it comes: what was thought, what was said, which tools were called."""

from __future__ import annotations

from dataclasses import dataclass, field

from twostroke.text.reasoning import ThinkSplitter
from twostroke.text.tool_parsers.formats import CallDelta, ToolCallParser


@dataclass(slots=True)
class Parts:
    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class AnswerParser:
    def __init__(self, thoughts: ThinkSplitter | None = None, tools: ToolCallParser | None = None) -> None:
        self._thoughts = thoughts
        self._tools = tools
        self.reasoning_tokens = 0

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.num_calls > 0

    def push(self, text: str, num_tokens: int, *, is_last: bool) -> Parts:
        parts = Parts(content=text)
        if self._thoughts is not None:
            parts.reasoning, parts.content = self._thoughts.push(text)
            if parts.reasoning or self._thoughts.is_thinking:
                self.reasoning_tokens += num_tokens
            if is_last:
                reasoning, content = self._thoughts.finish()
                parts.reasoning, parts.content = parts.reasoning + reasoning, parts.content + content
        if self._tools is not None:
            split = self._tools.push(parts.content)
            parts.content, parts.calls = split.content, split.calls
            if is_last:
                rest = self._tools.finish()
                parts.content += rest.content
                parts.calls += rest.calls
        return parts
