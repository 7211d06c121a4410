"""Where the ranks of one copy meet: they are told what to compute, add up what each found, and lay their logits side by
side. Through shared memory, or through rank 0's hands (`RelayMeeting`), which is slow, simple, and what the other is
tested against. Sums go from rank 0 up, in float32: every rank has the same bits, either way."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twostroke.backends.sharded.lines import Line

Floats = npt.NDArray[np.float32]

LEAST_SLOT_VALUES = 1 << 18
"""What a rank can show the others at a time: a megabyte, which stays in the cache."""
_TURNS = 2
_VALUE_BYTES = 4


class Meeting(Protocol):
    """As one rank has it. All ranks make the same calls in the same order. Each raises RankLostError."""

    rank: int

    def tell(self, message: bytes) -> None:
        """Rank 0's: to all others. An empty one ends them."""

    def hear(self) -> bytearray:
        """The others': what they are told next."""

    def add_up(self, values: Floats) -> None:
        """Put the sum over all ranks in their place."""

    def collect(self, part: Floats) -> Floats | None:
        """[rows, own width] of each rank; for rank 0 [rows, all widths], a new array."""

    def close(self) -> None: ...


class _Lines:
    """What both have in common: streams to other ranks, by rank."""

    def __init__(self, rank: int, lines: Mapping[int, Line]) -> None:
        self.rank, self._lines = rank, lines

    def tell(self, message: bytes) -> None:
        for line in self._lines.values():
            line.send_message(message)

    def hear(self) -> bytearray:
        return self._lines[0].receive_message()

    def close(self) -> None:
        for line in self._lines.values():
            line.close()


class SharedMeeting(_Lines):
    """Each rank has a slot that it alone writes, and all read, twice: while one turn's is read, the next turn's may be
    written. Who has come to a turn has read all of the one before, so the same slot is free again two turns on."""

    def __init__(self, rank: int, lines: Mapping[int, Line], widths: Sequence[int], memory: int) -> None:
        """`lines`: to every other rank. `widths`: of what each has to collect. `memory`: the descriptor of
        `shared_bytes` bytes that all ranks have."""
        super().__init__(rank, lines)
        self._widths, values = widths, slot_values(widths)
        self._map = mmap.mmap(memory, shared_bytes(widths))
        self._slots = np.frombuffer(self._map, dtype=np.float32).reshape(_TURNS, len(widths), values)
        self._turn = 0

    def add_up(self, values: Floats) -> None:
        assert values.flags.c_contiguous
        flat, room = values.reshape(-1), self._slots.shape[2]
        for first in range(0, len(flat), room):
            piece = flat[first : first + room]
            slots = self._meet(piece)[:, : len(piece)]
            np.add(slots[0], slots[1], out=piece)
            for other in slots[2:]:
                piece += other

    def collect(self, part: Floats) -> Floats | None:
        rows, at_a_time = len(part), self._slots.shape[2] // max(self._widths)
        found = np.empty((rows, sum(self._widths)), dtype=np.float32) if self.rank == 0 else None
        bounds = list(pairwise(np.cumsum([0, *self._widths]).tolist()))
        for first in range(0, rows, at_a_time):
            piece = np.ascontiguousarray(part[first : first + at_a_time])
            slots, count = self._meet(piece.reshape(-1)), len(piece)
            if found is not None:
                for slot, width, (start, stop) in zip(slots, self._widths, bounds, strict=True):
                    found[first : first + count, start:stop] = slot[: count * width].reshape(count, width)
        return found

    def _meet(self, own: Floats) -> Floats:
        """Show the others these numbers; return when all have done so  # [ranks, values of a slot]"""
        slots: Floats = self._slots[self._turn]
        self._turn = (self._turn + 1) % _TURNS
        slots[self.rank, : len(own)] = own
        for line in self._lines.values():
            line.signal()
        for line in self._lines.values():
            line.await_signal()
        return slots


class RelayMeeting(_Lines):
    """All numbers go to rank 0, and come back from there: no memory is shared."""

    def __init__(self, rank: int, lines: Mapping[int, Line], widths: Sequence[int]) -> None:
        """`lines`: of rank 0, to all others; of others, to rank 0."""
        super().__init__(rank, {peer: line for peer, line in lines.items() if 0 in (rank, peer)})
        self._widths = widths

    def add_up(self, values: Floats) -> None:
        assert values.flags.c_contiguous
        if self.rank:
            self._lines[0].send(_bytes_of(values))
            self._lines[0].receive_into(_bytes_of(values))
            return
        found = np.empty_like(values)
        for _, line in sorted(self._lines.items()):
            line.receive_into(_bytes_of(found))
            values += found
        for line in self._lines.values():
            line.send(_bytes_of(values))

    def collect(self, part: Floats) -> Floats | None:
        if self.rank:
            self._lines[0].send(_bytes_of(np.ascontiguousarray(part)))
            return None
        parts = [part]
        for peer, line in sorted(self._lines.items()):
            parts.append(np.empty((len(part), self._widths[peer]), dtype=np.float32))
            line.receive_into(_bytes_of(parts[-1]))
        return np.concatenate(parts, axis=1)


def slot_values(widths: Sequence[int]) -> int:
    """Numbers in a slot: at least a row of what is collected."""
    return max(LEAST_SLOT_VALUES, *widths)


def shared_bytes(widths: Sequence[int]) -> int:
    return _TURNS * len(widths) * slot_values(widths) * _VALUE_BYTES


def _bytes_of(values: Floats) -> memoryview:
    return values.reshape(-1).view(np.uint8).data
