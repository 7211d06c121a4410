"""The memory of states, one of a sequence in each layer that keeps one, and what a step says of its sequences. States
after drafts are kept aside until it is known how many of these hold."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.memory import Bytes, address_of, float_zeros
from twostroke.backends.cpu.recurrent_arguments import RunField, StateField
from twostroke.backends.host.batch import Batch
from twostroke.core.kv_blocks import BlockFormat
from twostroke.core.kv_layout import KVGroup
from twostroke.models.spec import Recurrent

Int32Array = npt.NDArray[np.int32]
FIRST_ASIDE = 16
"""States after drafts that there is room for at first, of all sequences of a step."""


class GroupStates:
    """Of one group: [layers, slots, numbers], a state's parts one behind the other."""

    def __init__(self, group: KVGroup, mixer: Recurrent) -> None:
        self.group, self._values = group, mixer.state_values
        self._states = float_zeros(len(group.layers), group.num_blocks, self._values)
        self._aside = float_zeros(len(group.layers), FIRST_ASIDE, self._values)
        self.places: dict[int, int] = {}
        """Of a slot, where the states after its drafts are."""

    def fields(self, layer: int, group_field: int, part: int) -> dict[IntEnum, int]:
        place = self.group.layers.index(layer)
        return {
            StateField.STATES: address_of(self._states[place]),
            StateField.SLOT_FLOATS: self._values,
            StateField.PART: part,
            StateField.ASIDE: address_of(self._aside[place]),
            StateField.GROUP: group_field,
        }

    def has_room(self, num_aside: int) -> bool:
        return num_aside <= int(self._aside.shape[1])

    def make_room(self, num_aside: int) -> None:
        """Tapes that were made before point to other memory."""
        self._aside = float_zeros(len(self.group.layers), 2 * num_aside, self._values)

    def copy(self, source: int, target: int) -> None:
        self._states[:, target] = self._states[:, source]

    def save(self, slot: int, num_drafts: int, target: int) -> None:
        self._states[:, target] = self._behind(slot, num_drafts)

    def commit(self, slot: int, num_drafts: int) -> None:
        if num_drafts:
            self._states[:, slot] = self._behind(slot, num_drafts)
        self.places.pop(slot, None)

    def _behind(self, slot: int, num_drafts: int) -> npt.NDArray[np.float32]:
        """[layers, numbers]"""
        return self._aside[:, self.places[slot] + num_drafts - 1] if num_drafts else self._states[:, slot]

    def block_format(self) -> BlockFormat:
        axes = (("layer", len(self.group.layers)), ("number", self._values))
        return BlockFormat(self.group.layers, None, "float32 of a state, in blocks of 16 for cpu", 4, axes)

    def copy_out(self, slot: int, into: Bytes) -> None:
        into.view(np.float32).reshape(len(self._states), self._values)[...] = self._states[:, slot]

    def copy_in(self, slot: int, data: Bytes) -> None:
        self._states[:, slot] = data.view(np.float32).reshape(len(self._states), self._values)


class StateStore:
    """A model's, by group; as `backends/host/states.py` asks of a store."""

    def __init__(self, groups: dict[int, GroupStates]) -> None:
        self.groups = groups

    def copy(self, group: int, source: int, target: int) -> None:
        self.groups[group].copy(source, target)

    def save(self, group: int, slot: int, num_drafts: int, target: int) -> None:
        self.groups[group].save(slot, num_drafts, target)

    def commit(self, group: int, slot: int, num_drafts: int) -> None:
        self.groups[group].commit(slot, num_drafts)

    def drop_aside(self) -> None:
        for group in self.groups.values():
            group.places = {}

    def make_room(self, batch: Batch) -> bool:
        """Whether tapes are to be made anew: a step has more drafts than any had before."""
        if not self.groups:
            return False
        slots = batch.tables[next(iter(self.groups))][: batch.num_decodes, 0]
        num_drafts = int((slots[1:] == slots[:-1]).sum())
        lacking = [group for group in self.groups.values() if not group.has_room(num_drafts)]
        for group in lacking:
            group.make_room(num_drafts)
        return bool(lacking)

    def runs(self, batch: Batch) -> Int32Array:
        """[runs, fields of RunField] of a step. It is noted where the states after drafts will be."""
        records, drafts = runs(batch, next(iter(batch.tables[number][:, 0] for number in self.groups)))
        for number, group in self.groups.items():
            slots = batch.tables[number][:, 0]
            if (slots < 0).any() or (slots >= group.group.num_blocks).any():
                raise IndexError("a step reads or writes a state whose slot was never granted")
            group.places = {int(slots[row]): place for row, place in drafts.items()}
        return records


def runs(batch: Batch, slots: Int32Array) -> tuple[Int32Array, dict[int, int]]:
    """The records, and of the rows that drafts follow where states after these go. `slots` [num_segments]: rows of a
    decode that have the same follow each other, its token and its drafts."""
    found: list[list[int]] = []
    places: dict[int, int] = {}
    num_aside, previous = 0, -1
    for row, slot in enumerate(slots[: batch.num_decodes].tolist()):
        if slot == previous:
            found[-1][RunField.COUNT] += 1
            if found[-1][RunField.ASIDE] < 0:
                found[-1][RunField.ASIDE] = places[found[-1][RunField.ROW]] = num_aside
            num_aside += 1
        else:
            found.append([row, 1, row, int(batch.positions[row] == 0), -1])
        previous = slot
    for segment in range(batch.num_decodes, batch.num_segments):
        first, count = int(batch.segment_first[segment]), int(batch.segment_count[segment])
        found.append([first, count, segment, int(batch.segment_start[segment] == 0), -1])
    return np.array(found, dtype=np.int32).reshape(-1, len(RunField)), places
