"""Splits one answer into content and tool calls as it comes, wherever the pieces are cut. What only looked like a call
comes out as content; a call is handed on from its first argument, and is finished once its arguments are whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from twostroke.text.tool_parsers.call_grammar import raw_head, raw_tail
from twostroke.text.tool_parsers.call_scanner import MAX_NAME_CHARS, WHITESPACE, CallScanner, Scanner
from twostroke.text.tool_parsers.custom_input import CustomInput

if TYPE_CHECKING:
    from twostroke.text.tool_parsers.formats import ToolFormat

BARE_CALL = '{"name"'
"""What a call without a marker begins with; another object at an answer's beginning is an answer."""
_NAME_PARTS = "_.-"
"""What may stand in a name before a parenthesis, beside letters and digits."""


class CallDelta(NamedTuple):
    number: int
    name: str | None
    """Set on a call's first."""
    arguments: str
    """The next piece of them; of a custom tool, of its input."""


@dataclass(slots=True)
class Split:
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ToolCallParser:
    """One answer's."""

    def __init__(
        self,
        tool_format: ToolFormat,
        custom: Mapping[str, bool],
        max_calls: int | None,
        schemas: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._format, self._schemas = tool_format, schemas
        self._first = tool_format.first_marker
        self._is_in_blocks = tool_format.wrapper is not None
        self._opening = tool_format.opening.strip() if self._is_in_blocks else ""
        """Of a call inside a block."""
        self._block_end = "" if tool_format.wrapper is None else tool_format.wrapper[1].strip()
        self._call_end = tool_format.closing.strip()
        self._after_name = tool_format.after_name.strip()
        self._custom = custom
        self._raw_heads = {name: raw_head(tool_format, name) for name, is_raw in custom.items() if is_raw}
        self._raw_tail = raw_tail(tool_format)
        self._max_calls = max_calls
        self._input: CustomInput | None = None
        self._written = ""  # of the call, as far as it may be the head of a raw one
        self._state: Callable[[str, Split], None] = self._in_text
        self._scanner: Scanner | None = None
        self._held = ""  # may be the beginning of a marker
        self._spaces = ""  # shown only if text follows
        self._raw = ""  # of a call that was not handed on yet
        self._before_name = 0  # characters of it before the name
        self._has_text = False
        self._is_bare = False  # the call has no marker
        self._is_announced = False
        self._has_arguments = False
        self.num_calls = 0
        """Handed on, at least in part."""
        self.finished: list[int] = []
        """The numbers of the calls whose arguments are whole."""

    def push(self, text: str) -> Split:
        split = Split()
        for character in text:
            self._state(character, split)
        self._pass_arguments(split)
        return split

    def finish(self, *, is_cut: bool = False) -> Split:
        """What was held back. Where an answer was cut, what may be the beginning of a call is left out: nobody was
        meant to read it."""
        split = Split()
        self._pass_arguments(split)
        self._end_raw_input()
        is_inside = self._state == self._closing or (self._state == self._in_block and not self._raw)
        held = "" if self._is_announced or is_inside else self._raw + self._held
        if held and is_cut and self._may_be_markup(held):
            self._spaces = held = ""
        self._show(held, split)
        if self.num_calls == 0:
            split.content += self._spaces
        self._held = self._raw = self._spaces = ""
        return split

    def end_message(self) -> None:
        """In a format whose answers are messages: what was begun in this one and is not whole never will be."""
        self._end_raw_input()
        if self._is_announced:
            self._scanner, self._is_announced, self._held = None, False, ""
            self._state = self._in_text

    def _end_raw_input(self) -> None:
        if self._state == self._in_raw_input and self._held == self._raw_tail:
            self.finished.append(self.num_calls - 1)

    def _may_be_markup(self, held: str) -> bool:
        if not self._is_bare or self._format.is_list:
            return True  # a marker or a name, or the beginning of one
        squeezed = "".join(held.split())
        return squeezed.startswith(BARE_CALL) or BARE_CALL.startswith(squeezed)

    def _in_text(self, character: str, split: Split) -> None:
        self._held += character
        while self._held and not self._first.startswith(self._held):
            if self._format.begins_bare and self._held[0] == self._format.bare_sign and not self._has_text:
                rest, self._held = self._held, ""
                self._begin_bare()
                for later in rest:
                    self._state(later, split)
                return
            self._show(self._held[0], split)
            self._held = self._held[1:]
        if self._held == self._first:
            self._raw, self._held = self._held, ""
            self._state = self._in_block if self._is_in_blocks else self._named_or_not()

    def _begin_bare(self) -> None:
        self._is_bare = True
        self._state = self._before_list if self._format.is_list else self._before_object

    def _before_list(self, character: str, split: Split) -> None:
        """At the bracket that begins a list without a marker."""
        self._raw += character
        self._state = self._in_block

    def _in_block(self, character: str, split: Split) -> None:
        """Between calls of one block, where the next may begin, or the block end."""
        if not self._held and character in WHITESPACE + self._format.separators:
            self._raw += character if self._raw else ""
            return
        self._held += character
        held = self._held
        if held == self._block_end and not self._raw:
            self._held, self._state = "", self._in_text
        elif held == self._opening:
            self._raw, self._held = self._raw + held, ""
            self._state = self._named_or_not()
        elif not any(marker.startswith(held) for marker in (self._opening, self._block_end) if marker):
            self._held = ""
            if self._opening or len(held) > 1 or not self._begins_call(held):
                self._give_up(held, split)
                return
            self._state = self._named_or_not()
            self._state(held, split)

    def _begins_call(self, character: str) -> bool:
        """Of a call that has no marker of its own."""
        return character == "{" if not self._format.is_named else character.isalpha() or character == "_"

    def _named_or_not(self) -> Callable[[str, Split], None]:
        """What comes behind the beginning of a call."""
        self._before_name = len(self._raw)
        return self._naming if self._format.is_named else self._before_object

    def _naming(self, character: str, split: Split) -> None:
        """Up to the arguments, in a format that has the name before them."""
        self._raw += character
        named = self._raw[self._before_name :]
        if self._format.is_named_by_line:
            if character in "\n<" and (name := named[:-1].strip()):
                self._begin_call(self._format.scanner(name, self._schemas.get(name)))
                if character == "<" and self._scanner is not None:
                    self._scanner.push(character)
                return
        elif named.endswith(self._after_name):
            name = self._format.name_in(named.removesuffix(self._after_name))
            if not name:
                self._give_up("", split)
                return
            self._begin_call(self._format.scanner(name, self._schemas.get(name)))
            return
        is_wrong = self._format.arguments == "python" and not (character.isalnum() or character in _NAME_PARTS)
        if character == "{" or len(named) > MAX_NAME_CHARS or is_wrong:
            self._give_up("", split)

    def _before_object(self, character: str, split: Split) -> None:
        """Behind a marker, where the call's object begins."""
        if character == "{":
            self._begin_call()
            self._state(character, split)
        elif character in WHITESPACE:
            self._raw += character if self._raw else ""
        else:
            self._give_up(character, split)

    def _begin_call(self, scanner: Scanner | None = None) -> None:
        self._scanner = scanner or CallScanner()
        self._is_announced, self._has_arguments = False, False
        self._written = ""
        self._state = self._in_call

    def _in_call(self, character: str, split: Split) -> None:
        scanner = self._scanner
        assert scanner is not None
        if not self._is_announced:
            self._raw += character
        scanner.push(character)
        if self._raw_heads and self._takes_raw_input(character, scanner, split):
            return
        if not self._is_announced:
            if scanner.has_failed:
                self._give_up("", split)
                return
            # Not before its arguments: a name alone, should nothing follow, would be taken for a call without any.
            if scanner.name is not None and (scanner.has_arguments or scanner.is_done):
                self._announce(scanner.name, split)
        is_open = self._is_announced and self.num_calls - 1 not in self.finished
        if is_open and (scanner.is_whole or scanner.is_done):
            self._end_arguments(split)
        if scanner.is_done or scanner.has_failed:
            self._end_call(split)

    def _takes_raw_input(self, character: str, scanner: Scanner, split: Split) -> bool:
        if len(self._written) <= MAX_NAME_CHARS:
            self._written = (self._written + character).lstrip()
        if scanner.name not in self._raw_heads or self._written != self._raw_heads[scanner.name]:
            return False
        if not self._is_announced:
            self._announce(scanner.name, split)
        self._scanner, self._input, self._held = None, None, ""
        self._state = self._in_raw_input
        return True

    def _in_raw_input(self, character: str, split: Split) -> None:
        """To the answer's end, but for what every such call ends with."""
        self._held += character

    def _announce(self, name: str, split: Split) -> None:
        split.calls.append(CallDelta(self.num_calls, name, ""))
        self.num_calls += 1
        self._is_announced, self._raw = True, ""
        self._input = CustomInput() if name in self._custom else None

    def _end_arguments(self, split: Split) -> None:
        self._pass_arguments(split)
        rest = "" if self._has_arguments else "{}"  # it was called without any
        if self._input is not None:
            rest = self._input.finish()
        if rest:
            split.calls.append(CallDelta(self.num_calls - 1, None, rest))
        self.finished.append(self.num_calls - 1)

    def _end_call(self, split: Split) -> None:
        self._pass_arguments(split)
        self._scanner, self._is_announced, self._is_bare = None, False, False
        self._state = self._closing if self._call_end else self._after_call()
        if self.num_calls == self._max_calls:
            self._state = self._behind_the_last

    def _after_call(self) -> Callable[[str, Split], None]:
        return self._in_block if self._is_in_blocks else self._in_text

    def _behind_the_last(self, character: str, split: Split) -> None:
        """No more calls were wanted, and what is said behind one is not waited for."""

    def _closing(self, character: str, split: Split) -> None:
        """After a call, up to its closing marker; what stands before that is no part of anything."""
        self._held += character
        while self._held and not self._call_end.startswith(self._held):
            self._held = self._held[1:]
        if self._held == self._call_end:
            self._held = ""
            self._state = self._after_call()

    def _pass_arguments(self, split: Split) -> None:
        if self._state == self._in_raw_input and len(self._held) > len(self._raw_tail):
            shown = len(self._held) - len(self._raw_tail)
            split.calls.append(CallDelta(self.num_calls - 1, None, self._held[:shown]))
            self._held = self._held[shown:]
        if self._scanner is not None and self._is_announced and (new := self._scanner.take_arguments()):
            self._has_arguments = True
            if self._input is not None:
                new = self._input.push(new)
            if new:
                split.calls.append(CallDelta(self.num_calls - 1, None, new))

    def _give_up(self, character: str, split: Split) -> None:
        """It was no call."""
        self._scanner, self._is_bare = None, False
        raw, self._raw = self._raw + character, ""
        self._state = self._in_text
        self._show(raw, split)

    def _show(self, text: str, split: Split) -> None:
        for character in text:
            if character in WHITESPACE:
                self._spaces += character
                continue
            self._has_text = True
            split.content += self._spaces + character
            self._spaces = ""
