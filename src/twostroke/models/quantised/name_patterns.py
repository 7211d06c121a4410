"""Patterns of module names, as quantised folders list them. A pattern is a stranger's: it is matched in time that grows
with pattern and name alone, where Python's own matcher may try for ever. What cannot be matched so is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

_MAX_PATTERN_CHARACTERS = 1000
_MAX_STATES = 1000
"""A count such as {1,1000} makes copies, and counts within counts make many."""
_MAX_STEPS = 50_000_000
"""Of one pattern over all names: some seconds."""
_PLAIN_LOOPS, _PLAIN_CHOICES = 3, 1000
"""With no more loops, each over single characters, and no more ways through branches and optional parts, Python's own
matcher is quick: names are short."""
_MAX_NAME_CHARACTERS = 512

_CHARACTERS = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)

Test = Callable[[str], bool]


class UnreadablePatternError(ValueError):
    """What is wrong with a pattern, in half a sentence."""


@dataclass(slots=True)
class _State:
    """Where a match may stand: a test of the next character leads to `after`; without one, all of `moves` are free."""

    test: Test | None = None
    after: int = 0
    moves: list[int] = field(default_factory=list)
    only_at: str | None = None
    """Free moves that are open at the "start" or the "end" of the name alone."""


@dataclass(slots=True)
class NamePattern:
    """A regular expression that is matched from a name's start, as `re.match` has it."""

    text: str
    _states: tuple[_State, ...]
    _plain: re.Pattern[str] | None = None
    """Where Python's own matcher cannot take long."""
    _steps: int = 0

    @classmethod
    def of(cls, text: str, *, may_be_plain: bool = True) -> NamePattern:
        """Raises UnreadablePatternError."""
        if len(text) > _MAX_PATTERN_CHARACTERS:
            raise UnreadablePatternError(f"has {len(text)} characters, and {_MAX_PATTERN_CHARACTERS} are read at most")
        try:
            tree = _parser.parse(text)
        except (re.error, RecursionError, OverflowError, ValueError, FutureWarning) as error:
            raise UnreadablePatternError(f"is not a regular expression ({str(error)[:60]})") from None
        if tree.state.flags & ~re.UNICODE.value:
            raise UnreadablePatternError("sets flags, which are not read")
        builder = _Builder([_State()])  # the first state is the end
        try:
            start = builder.sequence(tree, 0)
        except RecursionError:
            raise UnreadablePatternError("is nested too deeply") from None
        builder.states.append(_State(moves=[start]))
        is_plain = may_be_plain and builder.loops <= _PLAIN_LOOPS and builder.choices <= _PLAIN_CHOICES
        return cls(text, tuple(builder.states), re.compile(text) if is_plain else None)

    def matches(self, name: str) -> bool:
        """Whether it matches a beginning of the name."""
        if len(name) > _MAX_NAME_CHARACTERS:
            raise UnreadablePatternError(f"is to be matched with a name of {len(name)} characters")
        if self._plain is not None:
            return self._plain.match(name) is not None
        self._steps += len(self._states) * len(name)
        if self._steps > _MAX_STEPS:
            raise UnreadablePatternError("takes too long to match")
        here = self._reached([len(self._states) - 1], 0, len(name))
        for position, character in enumerate(name):
            if 0 in here or not here:
                break
            next_ones = []
            for index in here:
                state = self._states[index]
                if state.test is not None and state.test(character):
                    next_ones.append(state.after)
            here = self._reached(next_ones, position + 1, len(name))
        return 0 in here

    def _reached(self, indexes: Iterable[int], position: int, length: int) -> set[int]:
        """All states that free moves lead to."""
        found: set[int] = set()
        waiting = list(indexes)
        while waiting:
            index = waiting.pop()
            if index in found:
                continue
            found.add(index)
            state = self._states[index]
            is_open = state.only_at is None or position == (0 if state.only_at == "start" else length)
            if is_open:
                waiting += state.moves
        return found


@dataclass(slots=True)
class _Builder:
    """From the tree that Python's parser makes: each part is built in front of the state that it leads to."""

    states: list[_State]
    loops: int = 0
    choices: int = 1

    def add(self, state: _State) -> int:
        if len(self.states) >= _MAX_STATES:
            raise UnreadablePatternError("has too many parts once its counts are written out")
        self.states.append(state)
        return len(self.states) - 1

    def sequence(self, parts: Any, after: int) -> int:
        for operation, argument in reversed(list(parts)):
            after = self.part(operation, argument, after)
        return after

    def part(self, operation: Any, argument: Any, after: int) -> int:
        if operation in _CHARACTERS:
            return self.add(_State(test=_test_of(operation, argument), after=after))
        if operation is sre.BRANCH:
            self.choices *= len(argument[1])
            return self.add(_State(moves=[self.sequence(branch, after) for branch in argument[1]]))
        if operation is sre.SUBPATTERN:
            _, add_flags, del_flags, inner = argument
            if add_flags or del_flags:
                raise UnreadablePatternError("sets flags, which are not read")
            return self.sequence(inner, after)
        if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, inner = argument
            return self.repeat(least, most, inner, after)
        if operation is sre.AT and argument in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
            return self.add(_State(moves=[after], only_at="start"))
        if operation is sre.AT and argument in (sre.AT_END, sre.AT_END_STRING):
            return self.add(_State(moves=[after], only_at="end"))
        raise UnreadablePatternError(f"has a part of the kind {str(operation).lower()}, which is not matched here")

    def repeat(self, least: int, most: Any, inner: Any, after: int) -> int:
        if least == 0 and most == 1:
            self.choices *= 2
        elif least != most:
            is_simple = len(inner) == 1 and inner[0][0] in _CHARACTERS
            self.loops += 1 if is_simple else _PLAIN_LOOPS + 1
        if most is sre.MAXREPEAT:
            loop = self.add(_State())
            self.states[loop].moves = [self.sequence(inner, loop), after]
            end = loop
        else:
            end = after
            for _ in range(int(most) - least):
                end = self.add(_State(moves=[self.sequence(inner, end), after]))
        for _ in range(least):
            end = self.sequence(inner, end)
            self.add(_State())  # so that counts of nothing are counted, too
        return end


def _test_of(operation: Any, argument: Any) -> Test:
    if operation is sre.ANY:
        return lambda character: character != "\n"
    if operation is sre.LITERAL:
        return lambda character: ord(character) == argument
    if operation is sre.NOT_LITERAL:
        return lambda character: ord(character) != argument
    is_negated = bool(argument) and argument[0][0] is sre.NEGATE
    tests = [_test_of_item(*item) for item in argument[is_negated:]]
    return lambda character: any(test(character) for test in tests) != is_negated


_CATEGORIES: dict[Any, Test] = {
    sre.CATEGORY_DIGIT: lambda character: character.isdecimal(),
    sre.CATEGORY_NOT_DIGIT: lambda character: not character.isdecimal(),
    sre.CATEGORY_WORD: lambda character: character.isalnum() or character == "_",
    sre.CATEGORY_NOT_WORD: lambda character: not (character.isalnum() or character == "_"),
    sre.CATEGORY_SPACE: lambda character: character.isspace(),
    sre.CATEGORY_NOT_SPACE: lambda character: not character.isspace(),
}


def _test_of_item(operation: Any, argument: Any) -> Test:
    if operation is sre.LITERAL:
        return lambda character: ord(character) == argument
    if operation is sre.RANGE:
        return lambda character: argument[0] <= ord(character) <= argument[1]
    if operation is sre.CATEGORY and argument in _CATEGORIES:
        return _CATEGORIES[argument]
    raise UnreadablePatternError("has a set of characters of a kind that is not matched here")
