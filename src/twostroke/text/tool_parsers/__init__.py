"""How models write tool calls: a format each, found by name or by what a model's template and vocabulary hold."""

from __future__ import annotations

from typing import NamedTuple

from twostroke.core.errors import BadRequestError
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tool_parsers.formats import ToolFormat
from twostroke.text.tool_parsers.known_formats import FORMATS, HERMES, OTHER_NAMES


class Choice(NamedTuple):
    tool_format: ToolFormat
    reason: str


def choose(name: str, tokenizer: Tokenizer, family: str = "") -> Choice:
    """By name; `auto` asks the chat template, then the vocabulary, then the model's family, and takes the most common
    format else."""
    if name != "auto":
        known = FORMATS | OTHER_NAMES
        if (found := known.get(name.lower().replace("_", "-"))) is None:
            raise BadRequestError(f"the tool parser must be auto, {', '.join(sorted(FORMATS))}, not {name!r:.40}")
        return Choice(found, "as asked")
    template = tokenizer.chat_template or ""
    for tool_format in FORMATS.values():
        if all(sign in template for sign in tool_format.markers):
            return Choice(tool_format, "by the chat template")
    if template and "tools" not in template:
        return Choice(HERMES, "the chat template knows no tools, so the prompt explains this one")
    special = tokenizer.special_tokens.keys()
    for tool_format in FORMATS.values():
        if special >= tool_format.markers:
            return Choice(tool_format, "by the vocabulary")
    for tool_format in FORMATS.values():
        if family in tool_format.families:
            return Choice(tool_format, f"by the family {family}")
    return Choice(HERMES, "the most common, as nothing tells another")
