"""Where the last tokens of a text stood before, in itself and in the texts of its window, and what followed them there.
Each place is filed under what ends at it, in four lengths; places of one kind form a chain, the latest first. So the
chains are the nodes of a suffix tree that are worth having, and any token can be forgotten again. Knows no requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LENGTHS = (2, 4, 8, 16)
"""Tokens that a place is filed under; each key is made of two of the length before."""
MAX_SIGHTINGS = 8
"""Of one kind, the latest places that are looked at."""
LONGEST = 32
MAX_COMPARED = 8
"""Of the texts of a window, the latest that a new one is compared with."""
FEW = 24
"""Up to this many tokens are filed one by one, more of them as arrays."""
NOWHERE = -1
_BASE = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_POWERS = tuple(tuple(pow(_BASE, length - 1 - place, 1 << 64) for place in range(length)) for length in LENGTHS)
_STEPS = tuple(np.uint64(pow(_BASE, length // 2, 1 << 64)) for length in LENGTHS)
_COMPARED_BYTES = 256
"""Of tokens that are only compared, as many bytes as a token takes that is filed, at least."""
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
        """`first`: where filing begins; those before are context, and filed with another text."""
        self.window, self.number, self.tokens, self.base, self.known = window, number, tokens, base, known
        self.donor: int | None = None
        """The number of the text that it begins like."""
        self.counted = 0
        """The size that its owner knows of."""
        self.is_closed = False
        self.first = first
        self.floor = first
        """Of those that were filed, the first that was not forgotten."""
        self.previous = tuple(array("q") for _ in LENGTHS)
        """Of each place from `first` on, the one before it in each chain."""

    @property
    def num_filed(self) -> int:
        """Places behind `first` that are filed. The last token never is: nothing follows it yet."""
        return len(self.previous[0])

    @property
    def num_waiting(self) -> int:
        return len(self.tokens) - 1 - self.first - len(self.previous[0])

    @property
    def num_forgotten(self) -> int:
        return self.floor - self.first

    @property
    def size(self) -> int:
        """Tokens that it takes the memory of. Those of a stream are kept anyway, and those before `base` only to be
        compared."""
        filed = len(self.tokens) - self.first if self.is_closed else self.num_filed
        return filed - self.num_forgotten + len(self.known) // _COMPARED_BYTES

    def followed(self, place: int, most: int, *, repeats: bool) -> list[int]:
        """What stands from a place on. Of the stream that asks (`repeats`), a repetition goes on behind its end."""
        tokens = self.tokens[place : place + most]
        if repeats and 0 < len(tokens) < most:
            tokens = (tokens * (most // len(tokens) + 1))[:most]
        return tokens

    def close(self) -> None:
        """Nothing will come behind it."""
        self.is_closed = True
        self.known += array("i", self.tokens[len(self.known) // 4 - self.base :]).tobytes()


class Sighting(NamedTuple):
    text: Text
    follows: int
    """Where in its tokens that stands which followed."""


class Window:
    """Texts that may learn from each other."""

    def __init__(self) -> None:
        self.texts: dict[int, Text] = {}
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in LENGTHS)

    def __len__(self) -> int:
        """Places that are filed, in all lengths: what grows with memory."""
        return sum(map(len, self._latest))

    def open(self, number: int, token_ids: Sequence[int]) -> Text:
        """A text begins. What it begins with may be filed already with another text, its donor, as the turns of a
        conversation are."""
        known = array("i", token_ids).tobytes()
        shared, donor = 0, None
        for other in islice(reversed(self.texts.values()), MAX_COMPARED):
            # Of one that is being forgotten, not all is there.
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
        """File the next places of a text; how many were."""
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
        """Take out the first places of a text that are still filed; how many were."""
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
        """One of which nothing is filed any more."""
        del self.texts[text.number]

    def sightings(self, text: Text) -> tuple[int, list[Sighting]]:
        """The latest places where the last tokens stood before, as many of them as are filed together; and how many
        stood at the very latest, up to LONGEST."""
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
    """How many of the last tokens stand before that place too."""
    pairs = zip(reversed(tokens[-LONGEST:]), reversed(seen.tokens[max(0, follows - LONGEST) : follows]), strict=False)
    count = 0
    for one, other in pairs:
        if one != other:
            break
        count += 1
    return count


def keys_at(tokens: list[int], end: int) -> list[int]:
    """Of each length that there is, the key of the tokens before `end`."""
    return [
        sum(map(mul, tokens[end - length : end], powers)) & _MASK
        for length, powers in zip(LENGTHS, _POWERS, strict=True)
        if end >= length
    ]


def _keys_between(tokens: list[int], start: int, stop: int) -> list[npt.NDArray[np.uint64]]:
    """Of each length, the keys of the contexts that end at the places from `start` below `stop`; of those that begin
    before the first token, anything."""
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
    """Bytes that both begin with."""
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
