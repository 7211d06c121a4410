"""How models write tool calls: a format each, found by name or by what a model's template and vocabulary hold."""

from __future__ import annotations

from twostroke.core.errors import BadRequestError
from twostroke.text import harmony
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tool_parsers.formats import ToolFormat

HERMES = ToolFormat(name="hermes", opening="<tool_call>", closing="</tool_call>")
"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, SmolLM and most others."""
LLAMA3 = ToolFormat(
    name="llama3", opening="<|python_tag|>", arguments_key="parameters", skips=";", begins_bare=True, max_calls=1
)
"""`{"name": ..., "parameters": {...}}` as the whole answer, or after `<|python_tag|>`."""
MISTRAL = ToolFormat(name="mistral", opening="[TOOL_CALLS]", skips="[],", is_list=True, has_short_ids=True)
"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`: Mistral's up to Small 3.1."""
MISTRAL_ARGS = ToolFormat(name="mistral-args", opening="[TOOL_CALLS]", after_name="[ARGS]", has_short_ids=True)
"""`[TOOL_CALLS]name[ARGS]{...}`, each call with its own marker, some with `[CALL_ID]...` behind the name: its later."""

HARMONY = ToolFormat(
    name="harmony",
    opening=harmony.CALL_OPENING,
    after_name=harmony.CALL_AFTER_NAME,
    max_calls=1,
    signs=harmony.SIGNS,
    preface=harmony.THOUGHT,
    answer_opening=harmony.ANSWER_OPENING,
)
"""`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}`, a message of its own: gpt-oss."""

GEMMA4 = ToolFormat(
    name="gemma4",
    opening="<|tool_call>call:",
    after_name="{",
    closing="<tool_call|>",
    arguments="gemma",
    signs=("<|tool_call>", "<tool_call|>"),
)
"""`<|tool_call>call:name{city:<|"|>Paris<|"|>}<tool_call|>`: Gemma 4."""
MINIMAX = ToolFormat(
    name="minimax",
    opening='<invoke name="',
    after_name='">',
    arguments="xml",
    wrapper=("<minimax:tool_call>", "</minimax:tool_call>"),
    signs=("<minimax:tool_call>", "</minimax:tool_call>"),
)
"""`<minimax:tool_call>`, then for each call `<invoke name="...">` and a `<parameter name="...">` each: MiniMax M2."""

FORMATS = {
    tool_format.name: tool_format for tool_format in (HARMONY, GEMMA4, MINIMAX, HERMES, LLAMA3, MISTRAL_ARGS, MISTRAL)
}
"""Of two with the same opening, the one that is known by more comes first."""


def choose(name: str, tokenizer: Tokenizer) -> ToolFormat:
    """By name; `auto` asks the chat template, then the vocabulary, and takes the most common format else."""
    if name != "auto":
        if name not in FORMATS:
            raise BadRequestError(f"the tool parser must be auto, {', '.join(FORMATS)}, not {name!r:.40}")
        return FORMATS[name]
    template = tokenizer.chat_template or ""
    for tool_format in FORMATS.values():
        if all(marker in template for marker in tool_format.markers):
            return tool_format
    special = tokenizer.special_tokens.keys()
    return next((known for known in FORMATS.values() if special >= known.markers), HERMES)
