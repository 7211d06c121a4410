"""Where slots lie in memory: runs of slots of one size, one behind the other. Said in numbers that another engine can
read. A slot has an index in the list of all, by which both sides name it to NIXL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from twostroke.cluster.transfer.channel import TransferError
from twostroke.cluster.transfer.interface import Place, Slots

Rows = npt.NDArray[np.uint64]
MOST_SLOTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Run:
    group: int
    first_slot: int
    address: int
    slot_bytes: int
    num_slots: int

    @property
    def end(self) -> int:
        return self.address + self.slot_bytes * self.num_slots

    @property
    def next(self) -> tuple[int, int, int, int]:
        """Group, slot, address and bytes of the slot that would go on with it."""
        return self.group, self.first_slot + self.num_slots, self.end, self.slot_bytes


class SlotMemory:
    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = tuple(runs)
        self._index: dict[Place, int] = {}
        for run in self.runs:
            for offset in range(run.num_slots):
                self._index[run.group, run.first_slot + offset] = len(self._index)

    @classmethod
    def of(cls, slots: Slots, places: Iterable[Place]) -> SlotMemory:
        """Looks at each slot once."""
        runs: list[Run] = []
        for group, slot in sorted(set(places)):
            data = np.frombuffer(slots.view(group, slot), dtype=np.uint8)
            address, num_bytes = int(data.ctypes.data), data.nbytes
            last = runs[-1] if runs else None
            if last is not None and last.next == (group, slot, address, num_bytes):
                runs[-1] = Run(group, last.first_slot, last.address, num_bytes, last.num_slots + 1)
            else:
                runs.append(Run(group, slot, address, num_bytes, 1))
        return cls(runs)

    def described(self) -> list[tuple[int, ...]]:
        return [astuple(run) for run in self.runs]

    @classmethod
    def read(cls, given: object) -> SlotMemory:
        """Of a peer's message. Raises TransferError."""
        if not isinstance(given, list) or not all(_is_run(entry) for entry in given):
            raise TransferError("it does not say where its slots lie")
        runs = [Run(*entry) for entry in given]
        if sum(run.num_slots for run in runs) > MOST_SLOTS:
            raise TransferError("it has more slots than any engine")
        return cls(runs)

    def rows(self) -> Rows:
        """(address, bytes, device) of each slot, by index."""
        parts = [np.empty((0, 3), dtype=np.uint64)]
        for run in self.runs:
            part = np.zeros((run.num_slots, 3), dtype=np.uint64)
            offsets = np.arange(run.num_slots, dtype=np.uint64) * np.uint64(run.slot_bytes)
            part[:, 0], part[:, 1] = np.uint64(run.address) + offsets, run.slot_bytes
            parts.append(part)
        return np.concatenate(parts)

    def regions(self) -> list[tuple[int, int]]:
        """(address, bytes) of what is to be registered, adjacent runs as one."""
        regions: list[tuple[int, int]] = []
        for run in sorted(self.runs, key=lambda run: run.address):
            if regions and sum(regions[-1]) == run.address:
                regions[-1] = (regions[-1][0], run.end - regions[-1][0])
            else:
                regions.append((run.address, run.end - run.address))
        return regions

    def indices(self, places: Sequence[Place]) -> npt.NDArray[np.int32]:
        """Raises TransferError for a slot that is none."""
        try:
            return np.array([self._index[place] for place in places], dtype=np.int32)
        except KeyError as problem:
            raise TransferError(f"there is no slot {problem}") from problem


def _is_run(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 5 and all(type(part) is int and part >= 0 for part in entry)
