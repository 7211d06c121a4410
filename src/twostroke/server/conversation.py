"""What all chats share, whichever API they are held in: messages and tools become a prompt, what the answer is held to,
and how it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twostroke.core.grammar import GrammarSpec
from twostroke.core.sampling_params import SamplingParams
from twostroke.server.messages import Ready
from twostroke.server.parsing import AnswerParser
from twostroke.server.prompts import Room
from twostroke.server.sampling import check_served
from twostroke.server.service import Service
from twostroke.server.structured import Named
from twostroke.server.told_tools import told_of_tools
from twostroke.server.tools import ToolRequest
from twostroke.text import harmony
from twostroke.text.harmony import HarmonySplitter
from twostroke.text.reasoning import MARKERS, THINK, Markers, ThinkSplitter
from twostroke.text.tool_parsers.formats import ToolFormat

LAST_TOKENS = 16
"""Of a prompt: enough to see whether it ends with a marker."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request, ready for the engine."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    thought: str | None
    """As GrammarSpec has it; None where this model's thoughts are not told from its answers."""
    tool_format: ToolFormat | None
    """None where no calls are looked for."""
    tools: ToolRequest
    markers: Markers = THINK
    """Of its thoughts, where they are told from its answers."""
    is_harmony: bool = False
    """Answers are messages of OpenAI's Harmony format."""

    def parser(self) -> AnswerParser | None:
        """One sample's; None: its answer is nothing but text."""
        if self.thought is None and self.tool_format is None and not self.is_harmony:
            return None
        thoughts: ThinkSplitter | HarmonySplitter | None = None
        if self.is_harmony:
            thoughts = HarmonySplitter(has_calls=self.tool_format is not None)
        elif self.thought is not None:
            found = self.tool_format
            call_opening = found.first_marker if found is not None and found.ends_thought else ""
            thoughts = ThinkSplitter(self.markers, is_open=self.thought == "open", call_opening=call_opening)
        calls, max_calls = None, 1 if self.tools.only_one else None
        if self.tool_format is not None:
            calls = self.tool_format.parser(
                custom=self.tools.custom, max_calls=max_calls, schemas=schemas_of(self.tools.tools)
            )
        return AnswerParser(thoughts, calls, is_held_to_calls=self.tools.is_required)


def schemas_of(tools: list[dict[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Of the parameters of functions that say what theirs are, by name."""
    functions = [tool.get("function") or {} for tool in tools]
    found = ((function.get("name"), function.get("parameters")) for function in functions)
    return {name: schema for name, schema in found if isinstance(name, str) and isinstance(schema, Mapping)}


def fitted(sampling: SamplingParams, prompt: tuple[int, ...], facts: Ready) -> SamplingParams:
    """With an answer no longer than the context leaves room for."""
    if sampling.max_tokens is None:
        return sampling
    return replace(sampling, max_tokens=max(1, min(sampling.max_tokens, facts.max_context - len(prompt))))


async def prepare(
    service: Service,
    messages: list[dict[str, Any]],
    tools: ToolRequest,
    sampling: SamplingParams,
    grammar: Named | None,
    *,
    param: str,
    limit: str | None,
    options: Mapping[str, Any] | None = None,
) -> Conversation:
    """`param` is the field that the messages came in, `limit` the one that says how long an answer may be, or None
    where one that asks for more than the context leaves is to be as long as that; `options` are the template's."""
    held_to = tools.held_to(grammar, may_end=not sampling.ignore_eos)
    encoder, facts = service.encoder(), service.facts()
    prompt = tuple(await chat_tokens(service, messages, tools, options, Room(facts.max_context, param)))
    if limit is None:
        sampling = fitted(sampling, prompt, facts)
    check_served([prompt], sampling, facts, param, limit or "max_tokens")
    markers = MARKERS.get(service.reasoning_parser)
    thought = None if markers is None else _thought(service, prompt, markers)
    before = thought or "none"
    if markers is not None and held_to is not None and held_to is grammar and markers.closing in held_to[1].text:
        before = "none"  # whoever wrote the grammar has written the thought into it
    is_harmony = service.reasoning_parser == "harmony"
    if is_harmony and held_to is not None and held_to is grammar and _needs_channels(service, prompt, held_to[1]):
        before = "harmony"  # tools' own grammars have the messages in them
    sampling = await service.constrained(sampling, held_to, before)
    known = frozenset() if markers is None else markers.tokens & encoder.tokenizer.special_tokens.keys()
    if is_harmony or tools.is_on or known:  # markers may be control tokens
        sampling = replace(sampling, skip_special_tokens=False)
    tool_format = service.tool_format if tools.is_on else None
    return Conversation(prompt, sampling, thought, tool_format, tools, markers or THINK, is_harmony)


async def chat_tokens(
    service: Service,
    messages: list[dict[str, Any]],
    tools: ToolRequest,
    options: Mapping[str, Any] | None,
    room: Room | None = None,
) -> Sequence[int]:
    """A conversation as the model reads it, to be answered or only to be counted."""
    encoder = service.encoder()
    tool_format = service.tool_format
    messages = await encoder.beside(lambda: told_of_tools(messages, tools.tools, encoder.tokenizer, tool_format))
    return await encoder.chat(messages, tools=tools.tools or None, options=options, room=room)


def _needs_channels(service: Service, prompt: tuple[int, ...], grammar: GrammarSpec) -> bool:
    """Whether this grammar is of the final message's text alone, and the model is yet to open that."""
    has_tokens = service.encoder().tokenizer.special_tokens.keys() >= harmony.HELD_BY
    is_whole = grammar.kind == "lark" and harmony.CHANNEL in grammar.text  # its author has written the messages, too
    return has_tokens and not is_whole and not _ending(service, prompt).endswith(harmony.MESSAGE)


def _thought(service: Service, prompt: tuple[int, ...], markers: Markers) -> str:
    ending = _ending(service, prompt)
    if markers.are_open_in(ending):
        return "open"
    # A template that was told not to think closes it itself.
    return "none" if ending.endswith(markers.closing) else "possible"


def _ending(service: Service, prompt: tuple[int, ...]) -> str:
    return service.encoder().tokenizer.decode(prompt[-LAST_TOKENS:], skip_special_tokens=False).rstrip()
