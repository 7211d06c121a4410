"""Text that knows which of its characters a chat template wrote. Joining, cutting and replacing keep that knowledge;
whatever else is done to such a text yields a plain `str`, and of a plain one nothing is the template's: what is not
known to come from the template is never taken for it. The characters are always those that `str` would give."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsIndex

Ranges = tuple[tuple[int, int], ...]
"""Begin and end, in order, never touching."""

_CONVERSION = re.compile(r"%(?:(%)|(?:\((?P<key>[^()]*)\))?[#0\- +]*\d*(?:\.\d*)?[hlL]?[a-zA-Z])")


class TemplateText(str):
    __slots__ = ("_own",)

    _own: Ranges

    def __new__(cls, text: object = "", own: Ranges = ()) -> TemplateText:
        """Nothing of it is the template's unless `ranges` says so. Building one from a user's text adds no trust."""
        made = super().__new__(cls, text)
        made._own = own
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return joined((self, other)) if _is_plain(other) else NotImplemented

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if _is_plain(other) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        text = super().__mul__(times)
        if self._own == ((0, len(self)),):
            return written(text)
        return joined([self] * (len(text) // len(self))) if self._own else text

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if not isinstance(key, slice):
            super().__getitem__(key)  # raises where there is none
            start = key.__index__()
            return self._part(start + len(self) if start < 0 else start, 1)
        start, stop, step = key.indices(len(self))
        return self._part(start, max(0, stop - start)) if step == 1 else super().__getitem__(key)

    def __mod__(self, values: Any) -> str:
        return _same(super().__mod__(values), self._converted, values)

    def lstrip(self, characters: str | None = None, /) -> str:
        length = len(super().lstrip(characters))
        return self._part(len(self) - length, length)

    def rstrip(self, characters: str | None = None, /) -> str:
        return self._part(0, len(super().rstrip(characters)))

    def strip(self, characters: str | None = None, /) -> str:
        start = len(self) - len(super().lstrip(characters))
        return self._part(start, len(super().strip(characters)))

    def removeprefix(self, prefix: str, /) -> str:
        length = len(super().removeprefix(prefix))
        return self._part(len(self) - length, length)

    def removesuffix(self, suffix: str, /) -> str:
        return self._part(0, len(super().removesuffix(suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines, start = [], 0
        for whole, line in zip(super().splitlines(True), super().splitlines(keepends), strict=True):
            lines.append(self._part(start, len(line)))
            start += len(whole)
        return lines

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._three(*super().partition(sep))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._three(*super().rpartition(sep))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:  # between all characters: nobody's template does
            return super().replace(old, new, count)
        return joined_by(new, self.split(old, count))

    def join(self, parts: Iterable[str], /) -> str:
        return joined_by(self, parts)

    def upper(self) -> str:
        return _same(super().upper(), self._mapped, str.upper)

    def lower(self) -> str:
        return _same(super().lower(), self._mapped, str.lower)

    def title(self) -> str:
        return _same(super().title(), self._mapped, str.title)

    def capitalize(self) -> str:
        return _same(super().capitalize(), self._mapped, str.capitalize)

    def _part(self, start: int, length: int) -> str:
        end = start + length
        text = str.__getitem__(self, slice(start, end))
        if not text:
            return text
        first = bisect_right(self._own, start, key=lambda both: both[1])
        last = bisect_left(self._own, end, key=lambda both: both[0])
        own = tuple((max(a, start) - start, min(b, end) - start) for a, b in self._own[first:last])
        return TemplateText(text, own) if own else text

    def _located(self, pieces: list[str], sep: str | None) -> list[str]:
        """Pieces, in order, that a separator stands between: white space of any length where none is named."""
        found, start = [], 0
        for piece in pieces:
            if sep is None:
                start = str.index(self, piece, start)
            found.append(self._part(start, len(piece)))
            start += len(piece) + (0 if sep is None else len(sep))
        return found

    def _three(self, before: str, between: str, after: str) -> tuple[str, str, str]:
        start = len(before) + len(between)
        return self._part(0, len(before)), self._part(len(before), len(between)), self._part(start, len(after))

    def _mapped(self, change: Callable[[str], str]) -> str:
        ends = [0, *(end for both in self._own for end in both), len(self)]
        parts = []
        for index in range(len(ends) - 1):  # every other one is the template's
            text = change(str.__getitem__(self, slice(ends[index], ends[index + 1])))
            parts.append(written(text) if index % 2 else text)
        return joined(parts)

    def _converted(self, values: Any) -> str:
        """As `%` does, piece by piece."""
        remaining = iter(values if isinstance(values, tuple) else (values,))
        parts, start = [], 0
        for match in _CONVERSION.finditer(self):
            parts.append(self._part(start, match.start() - start))
            if match[1]:
                parts.append("%")
            elif match["key"] is not None and isinstance(values, Mapping):
                parts.append(str.__mod__(match[0], values))
            else:
                value = next(remaining)
                is_whole = match[0] == "%s" and isinstance(value, str)
                parts.append(value if is_whole else str.__mod__(match[0], (value,)))
            start = match.end()
        parts.append(self._part(start, len(self) - start))
        if any("%" in part for part in parts[::2]):
            raise ValueError("a conversion of a kind that is not known here")
        return joined(parts)


def written(text: str) -> TemplateText:
    """A text that the template wrote, all of it."""
    return TemplateText(text, ((0, len(text)),) if text else ())


def own_ranges(text: str) -> Ranges:
    return text._own if isinstance(text, TemplateText) else ()


def joined(parts: Iterable[str]) -> str:
    """Called for each text that is joined to a long one: the ranges of the long one are taken over whole."""
    texts = list(parts)
    text = "".join(texts)
    own: list[tuple[int, int]] = []
    length = 0
    for part in texts:
        if isinstance(part, TemplateText) and part._own:
            first, *others = part._own if length else (part._own[0],)
            if own and own[-1][1] == length + first[0]:
                own[-1] = own[-1][0], length + first[1]
            elif length:
                own.append((length + first[0], length + first[1]))
            else:
                own.extend(part._own)
            own.extend((length + start, length + end) for start, end in others)
        length += len(part)
    return TemplateText(text, tuple(own)) if own else text


def joined_by(separator: str, parts: Iterable[str]) -> str:
    spread: list[str] = []
    for index, part in enumerate(parts):
        spread += (separator, part) if index else (part,)
    return joined(spread)


def _is_plain(other: object) -> bool:
    """Whether it joins as plain text does; a text that escapes HTML, and what is no text, do it their own way."""
    return isinstance(other, str) and not hasattr(other, "__html__")


def _same(text: str, piecewise: Callable[[Any], str], argument: Any) -> str:
    """The joined pieces, if they spell what `str` gives for the whole; otherwise that plain text, of which nothing is
    the template's."""
    try:
        made = piecewise(argument)
    except Exception:  # the whole went well: whatever this is, it is no fault of the template
        return text
    return made if made == text else text
