"""A tool-call format: what its calls look like, for the parser that finds them and the grammar that holds a model to
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from twostroke.core.grammar import GrammarSpec
from twostroke.text.tool_parsers.call_grammar import calls_grammar
from twostroke.text.tool_parsers.call_parser import ToolCallParser
from twostroke.text.tool_parsers.call_scanner import CallScanner, Scanner
from twostroke.text.tool_parsers.gemma_arguments import GemmaScanner
from twostroke.text.tool_parsers.xml_arguments import XmlScanner

ArgumentStyle = Literal["json", "xml", "gemma"]
MAX_CALLS = 16
"""That a grammar lets a model write in one answer."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    opening: str
    """The text that begins a call, or all of them."""
    closing: str | None = None
    """The text that ends one; without it, calls go on to the answer's end."""
    arguments_key: str = "arguments"
    after_name: str = ""
    """What parts a call's name from its arguments, where the two are in no object."""
    arguments: ArgumentStyle = "json"
    """How arguments are written where the name is before them: as a JSON object, by a tag each, or as Gemma 4 does."""
    wrapper: tuple[str, str] | None = None
    """What stands around all calls of a block."""
    skips: str = ""
    """What may stand between calls, beside white space."""
    begins_bare: bool = False
    """An answer that begins with `{` is a call too."""
    is_list: bool = False
    max_calls: int = MAX_CALLS
    has_short_ids: bool = False
    """Calls are named by nine letters and digits, and the template insists."""
    signs: tuple[str, ...] = ()
    """What tells it from other formats, where that is not its markers."""
    preface: tuple[str, str] | None = None
    """What opens and what closes a thought that may stand before all else."""
    answer_opening: str = ""
    """What a text is opened with that is no call."""

    @property
    def markers(self) -> frozenset[str]:
        """That tell it from other formats."""
        return frozenset(self.signs or {self.opening, self.after_name} - {""})

    def new_call_id(self) -> str:
        return uuid4().hex[:9] if self.has_short_ids else f"call_{uuid4().hex[:24]}"

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
        if self.arguments == "xml":
            return XmlScanner(name, schema)
        return GemmaScanner(name) if self.arguments == "gemma" else CallScanner.of_arguments(name)

    def grammar(
        self, functions: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, int], *, only_one: bool
    ) -> GrammarSpec:
        """At least one call of these functions, each of `name` and `parameters`, and nothing else."""
        return calls_grammar(self, functions, special_tokens, only_one=only_one)
