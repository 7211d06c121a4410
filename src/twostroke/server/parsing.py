"""One answer's text taken apart as it comes: what was thought, what was said, which tools were called."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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
    finished: Collection[int] = ()
    """The numbers of the calls that are whole, of all the answer."""
    logprobs: Sequence[TokenLogprobs] = ()
    """Of the tokens that these came from."""
    in_order: list[Parts] = field(default_factory=list)
    """The same piece by piece, where a model may write them in any order."""


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
    def finished(self) -> Collection[int]:
        """A call that was cut is not one of them: nobody should run it."""
        return () if self._tools is None else self._tools.finished

    def push(self, text: str, num_tokens: int, *, is_last: bool, is_cut: bool = False) -> Parts:
        """`is_cut`: the last text did not end where the model would have ended it."""
        is_cut = is_cut or self._is_held_to_calls
        pieces = self._pieces(text)
        if self._thoughts is not None and (self._thoughts.is_thinking or any(piece.reasoning for piece in pieces)):
            self.reasoning_tokens += num_tokens
        if is_last and self._thoughts is not None:
            reasoning, content, *_ = self._thoughts.finish(is_cut=is_cut)
            pieces.append(self._called(Parts(reasoning, content)))
        if is_last and self._tools is not None:
            rest = self._tools.finish(is_cut=is_cut)
            pieces.append(Parts(content=rest.content, calls=rest.calls))
        parts = pieces[0] if len(pieces) == 1 else _joined(pieces)
        parts.finished = self.finished
        return parts

    def _pieces(self, text: str) -> list[Parts]:
        if self._thoughts is None:
            return [self._called(Parts(content=text))]
        if isinstance(self._thoughts, ThinkSplitter):
            return [self._called(Parts(*self._thoughts.push(text)))]
        pieces = []
        for run in self._thoughts.push(text):
            pieces.append(self._called(Parts(run.reasoning, run.content)))
            if run.ends_message and self._tools is not None:
                self._tools.end_message()
        return pieces

    def _called(self, piece: Parts) -> Parts:
        if self._tools is not None:
            split = self._tools.push(piece.content)
            piece.content, piece.calls = split.content, split.calls
        return piece


def _joined(pieces: list[Parts]) -> Parts:
    reasoning = "".join(piece.reasoning for piece in pieces)
    content = "".join(piece.content for piece in pieces)
    return Parts(reasoning, content, [call for piece in pieces for call in piece.calls], in_order=pieces)


def finished_calls(parts: Iterable[Parts], finished: Collection[int]) -> list[tuple[str, str]]:
    """Of a whole answer: name and arguments of each call that came to its end."""
    names: list[str] = []
    arguments: list[list[str]] = []
    for number, name, text in (delta for part in parts for delta in part.calls):
        if name is not None:
            names.append(name)
            arguments.append([])
        arguments[number].append(text)
    calls = [(name, "".join(texts)) for name, texts in zip(names, arguments, strict=True)]
    return [call for number, call in enumerate(calls) if number in finished]
