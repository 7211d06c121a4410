"""Finds where the last tokens of a text stood before, in itself and in the texts of its window, and what followed them
there. Each place is filed under the tokens that end at it, in four lengths. Places with the same tokens form a chain,
the latest first. So the chains are the useful nodes of a suffix tree, and any token can be forgotten again. Knows no
requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LENGTHS = (2, 4, 8, 16)
"""How many tokens a place is filed under. Each key is made of two keys of the length before."""
MAX_SIGHTINGS = 8
"""How many of the latest places in one chain are looked at."""
LONGEST = 32
MAX_COMPARED = 8
"""How many of the latest texts of a window a new one is compared with."""
FEW = 24
"""Up to this many tokens are filed one by one, and more of them as arrays."""
NOWHERE = -1
_BASE = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_POWERS = tuple(tuple(pow(_BASE, length - 1 - place, 1 << 64) for place in range(length)) for length in LENGTHS)
_STEPS = tuple(np.uint64(pow(_BASE, length // 2, 1 << 64)) for length in LENGTHS)
_COMPARED_BYTES = 256
"""This many bytes of tokens that are only compared take the memory of one token that is filed."""
_OFFSET_BITS = 32
_OFFSET = (1 << _OFFSET_BITS) - 1


class Text:
    """The tokens of one request, as far as they are known, from `base` on."""

    __slots__ = (
        "base",
        "counted",
        "donor",
        "first",
        "floor",
        "is_closed",
        "known",
        "number",
        "previous",
        "tokens",
        "window",
    )

    def __init__(self, window: Window, number: int, tokens: list[int], base: int, first: int, known: bytes) -> None:
        """`first` is where filing begins. The tokens before it are context, and are filed with another text."""
        self.window, self.number, self.tokens, self.base, self.known = window, number, tokens, base, known
        self.donor: int | None = None
        """The number of the text that has the same beginning."""
        self.counted = 0
        """The size that its owner has counted."""
        self.is_closed = False
        self.first = first
        self.floor = first
        """The first of the filed places that was not forgotten."""
        self.previous = tuple(array("q") for _ in LENGTHS)
        """For each place from `first` on, the place before it in each chain."""

    @property
    def num_filed(self) -> int:
        """How many places from `first` on are filed. The last token never is: nothing follows it yet."""
        return len(self.previous[0])

    @property
    def num_waiting(self) -> int:
        return len(self.tokens) - 1 - self.first - len(self.previous[0])

    @property
    def num_forgotten(self) -> int:
        return self.floor - self.first

    @property
    def size(self) -> int:
        """How many filed tokens would take as much memory as this text. A stream's tokens are kept anyway, and those
        before `base` are kept only to be compared."""
        filed = len(self.tokens) - self.first if self.is_closed else self.num_filed
        return filed - self.num_forgotten + len(self.known) // _COMPARED_BYTES

    def followed(self, place: int, most: int, *, repeats: bool) -> list[int]:
        """Returns the tokens from a place on. `repeats` means that the text is the stream that asks: then what runs
        into its end repeats."""
        tokens = self.tokens[place : place + most]
        if repeats and 0 < len(tokens) < most:
            tokens = (tokens * (most // len(tokens) + 1))[:most]
        return tokens

    def close(self) -> None:
        """Notes that no more tokens will come."""
        self.is_closed = True
        self.known += array("i", self.tokens[len(self.known) // 4 - self.base :]).tobytes()


class Sighting(NamedTuple):
    text: Text
    follows: int
    """The place in its tokens of the one that followed."""


class Window:
    """Texts that may learn from each other."""

    def __init__(self) -> None:
        self.texts: dict[int, Text] = {}
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in LENGTHS)

    def __len__(self) -> int:
        """How many places are filed, in all lengths. Memory grows with it."""
        return sum(map(len, self._latest))

    def open(self, number: int, token_ids: Sequence[int]) -> Text:
        """Returns a new text. Its beginning may be filed already with another text, its donor, as with the turns of a
        conversation."""
        known = array("i", token_ids).tobytes()
        shared, donor = 0, None
        for other in islice(reversed(self.texts.values()), MAX_COMPARED):
            # A text that is being forgotten is not complete.
            if not other.num_forgotten and (count := _common(known, other.known) // 4) > shared:
                shared, donor = count, other
        # The place of the last shared token may have been followed by another token, or by none.
        first = max(0, shared - 1)
        base = max(0, first - LENGTHS[-1] + 1)
        text = Text(self, number, list(token_ids[base:]), base, first - base, known)
        text.donor = None if donor is None else donor.number
        self.texts[number] = text
        return text

    def file(self, text: Text, most: int) -> int:
        """Files the next places of a text, and returns how many."""
        count = min(most, text.num_waiting)
        if count <= 0:
            return 0
        start = text.first + text.num_filed
        if count <= FEW:
            for place in range(start, start + count):
                self._file_one(text, place, keys_at(text.tokens, place + 1))
            return count
        mark = text.number << _OFFSET_BITS
        for length, keys, latest, previous in zip(
            LENGTHS, _keys_between(text.tokens, start, start + count), self._latest, text.previous, strict=True
        ):
            missing = max(0, min(count, length - 1 - start))  # too near the beginning to have such a context
            previous.extend([NOWHERE] * missing)
            for place, key in enumerate(keys[missing:].tolist(), start=mark | (start + missing)):
                previous.append(latest.get(key, NOWHERE))
                latest[key] = place
        return count

    def _file_one(self, text: Text, place: int, keys: list[int]) -> None:
        mark = text.number << _OFFSET_BITS | place
        num_keys = len(keys)
        for index, latest in enumerate(self._latest):
            if index < num_keys:
                key = keys[index]
                text.previous[index].append(latest.get(key, NOWHERE))
                latest[key] = mark
            else:
                text.previous[index].append(NOWHERE)

    def forget(self, text: Text, most: int) -> int:
        """Takes out the first places of a text that are still filed, and returns how many."""
        end = text.first + text.num_filed
        stop = min(end, text.floor + most)
        if stop > text.floor:
            mark = text.number << _OFFSET_BITS
            for keys, latest in zip(_keys_between(text.tokens, text.floor, stop), self._latest, strict=True):
                for place, key in enumerate(keys.tolist(), start=mark | text.floor):
                    if latest.get(key) == place:
                        del latest[key]
        count, text.floor = stop - text.floor, stop
        return count

    def drop(self, text: Text) -> None:
        """Drops a text of which nothing is filed any more."""
        del self.texts[text.number]

    def sightings(self, text: Text) -> tuple[int, list[Sighting]]:
        """Returns the latest places where the last tokens stood before, for the longest length that has any. Also
        returns how many tokens stood at the very latest of them, up to LONGEST."""
        tokens = text.tokens
        keys = keys_at(tokens, len(tokens))
        for index in range(len(keys) - 1, -1, -1):
            place = self._latest[index].get(keys[index], NOWHERE)
            if place == NOWHERE:
                continue
            length, found = LENGTHS[index], []
            tail = tokens[-length:]
            for _ in range(MAX_SIGHTINGS):
                if place == NOWHERE or (seen := self.texts.get(place >> _OFFSET_BITS)) is None:
                    break
                offset = place & _OFFSET
                if offset < seen.floor:
                    break
                if seen.tokens[offset - length + 1 : offset + 1] == tail:  # keys of different tokens may be equal
                    found.append(Sighting(seen, offset + 1))
                place = seen.previous[index][offset - seen.first]
            if found:
                return _alike(tokens, *found[0]), found
        return 0, []


def _alike(tokens: list[int], seen: Text, follows: int) -> int:
    """Returns how many of the last tokens stand before that place, too."""
    pairs = zip(reversed(tokens[-LONGEST:]), reversed(seen.tokens[max(0, follows - LONGEST) : follows]), strict=False)
    count = 0
    for one, other in pairs:
        if one != other:
            break
        count += 1
    return count


def keys_at(tokens: list[int], end: int) -> list[int]:
    """Returns, for each length that fits, the key of the tokens before `end`."""
    return [
        sum(map(mul, tokens[end - length : end], powers)) & _MASK
        for length, powers in zip(LENGTHS, _POWERS, strict=True)
        if end >= length
    ]


def _keys_between(tokens: list[int], start: int, stop: int) -> list[npt.NDArray[np.uint64]]:
    """Returns, for each length, the keys of the contexts that end at the places from `start` below `stop`. The keys of
    contexts that would begin before the first token mean nothing."""
    before = LENGTHS[-1] - 1
    values = np.zeros(before + stop - start, dtype=np.uint64)
    known = tokens[max(0, start - before) : stop]
    values[len(values) - len(known) :] = known
    found = []
    for length, step in zip(LENGTHS, _STEPS, strict=True):
        half = length // 2
        values = values[:-half] * step + values[half:]
        found.append(values[len(values) - (stop - start) :])
    return found


def _common(one: bytes, other: bytes) -> int:
    """Returns how many bytes at the beginning are equal in both."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
