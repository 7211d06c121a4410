"""A tool-call format: what its calls look like, as data, for the parser that finds them, the grammar that holds a model
to them and the writer that shows one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from uuid import uuid4

from twostroke.core.grammar import GrammarSpec
from twostroke.text.tool_parsers.call_grammar import calls_grammar
from twostroke.text.tool_parsers.call_parser import ToolCallParser
from twostroke.text.tool_parsers.call_scanner import CallScanner, Scanner
from twostroke.text.tool_parsers.gemma_arguments import QUOTE, GemmaScanner
from twostroke.text.tool_parsers.python_arguments import PythonScanner
from twostroke.text.tool_parsers.xml_arguments import Tags, XmlScanner

ArgumentStyle = Literal["json", "xml", "gemma", "python"]
MAX_CALLS = 16
"""That a grammar lets a model write in one answer."""
CALL_ID = "[CALL_ID]"
"""Behind it is the model's own id of a call, which nobody asks for: a call has a new one."""
NAME_PREFIX = "functions."
_NUMBERED = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?", re.DOTALL)


@dataclass(frozen=True)
class ToolFormat:
    """Markers are as a model writes them, with the white space beside them. A parser does without that space."""

    name: str
    opening: str = ""
    """The text that begins each call."""
    closing: str = ""
    """The text that ends one."""
    wrapper: tuple[str, str] | None = None
    """What stands around all calls of a block; an empty second: they go on to the answer's end."""
    wraps_each: bool = False
    """A block has one call."""
    separator: str = ""
    """What stands between two calls."""
    skips: str = ""
    """What else may stand there, beside white space."""
    is_list: bool = False
    """Calls stand in brackets, with commas between them."""
    begins_bare: bool = False
    """A call may be the whole answer, without any marker."""
    arguments_key: str = "arguments"
    after_name: str = ""
    """What parts a call's name from its arguments, where the two are in no object."""
    is_named_by_line: bool = False
    """The name is the rest of its line, or what stands before the first tag."""
    is_numbered: bool = False
    """Names are written as `functions.NAME:0` and counted through a conversation, results named by that."""
    arguments: ArgumentStyle = "json"
    """How arguments are written where the name is before them."""
    tags: Tags | None = None
    """Around arguments of the style `xml`."""
    quote: str = QUOTE
    """Around texts of the style `gemma`."""
    max_calls: int = MAX_CALLS
    has_short_ids: bool = False
    """Calls are named by nine letters and digits, and the template insists."""
    signs: tuple[str, ...] = ()
    """What a chat template that teaches this format holds; none: its markers."""
    families: tuple[str, ...] = ()
    """Of models that write so, whatever their files say."""
    preface: tuple[str, str] | None = None
    """What opens and what closes a thought that may stand before all else."""
    answer_opening: str = ""
    """What a text is opened with that is no call."""
    ends_thought: bool = False
    """A call ends a thought that was not closed."""

    @cached_property
    def markers(self) -> frozenset[str]:
        """That tell it from other formats."""
        own = {self.first_marker, self.after_name.strip()} - {""}
        return frozenset(self.signs or own)

    @cached_property
    def first_marker(self) -> str:
        """What begins a call, or a block of them, in the middle of an answer."""
        return (self.opening if self.wrapper is None else self.wrapper[0]).strip()

    @property
    def is_named(self) -> bool:
        """A call's name stands before its arguments."""
        return bool(self.after_name) or self.is_named_by_line

    @cached_property
    def separators(self) -> str:
        return self.skips + ("[]," if self.is_list else "")

    @property
    def bare_sign(self) -> str:
        """What a call without a marker begins with."""
        return "[" if self.is_list else "{"

    def new_call_id(self) -> str:
        return uuid4().hex[:9] if self.has_short_ids else f"call_{uuid4().hex[:24]}"

    def name_in(self, text: str) -> str:
        """The function's own name, out of what stands before the arguments."""
        text = text.partition(CALL_ID)[0].strip()
        if self.is_numbered:
            match = _NUMBERED.fullmatch(text)
            return "" if match is None else match[1]
        return text

    def parser(
        self,
        *,
        custom: Mapping[str, bool] | None = None,
        max_calls: int | None = None,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> ToolCallParser:
        """`custom` are the tools that take a text instead of arguments, and whether they are held to a grammar of it;
        after `max_calls` nothing more is read. `schemas`: of functions' parameters, by name, for a format whose text
        alone does not say what a value is."""
        return ToolCallParser(self, custom or {}, max_calls, schemas or {})

    def scanner(self, name: str, schema: Mapping[str, Any] | None) -> Scanner:
        """Of the arguments of a call whose name has been read."""
        if self.tags is not None:
            return XmlScanner(name, schema, self.tags)
        if self.arguments == "gemma":
            return GemmaScanner(name, self.quote)
        return PythonScanner(name) if self.arguments == "python" else CallScanner.of_arguments(name)

    def grammar(
        self, functions: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, int], *, only_one: bool
    ) -> GrammarSpec:
        """At least one call of these functions, each of `name` and `parameters`, and nothing else."""
        return calls_grammar(self, functions, special_tokens, only_one=only_one)
