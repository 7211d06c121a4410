"""The states behind the slots. A recurrent layer keeps one state of a sequence, however long it is, in the slot that
entry 0 of the sequence's table names. A sequence's first token begins from zeros, whatever the slot held before.

A decode slot may have drafts behind its token. The token holds, so its state is written at once; the states after its
drafts are kept aside until `commit` says how many of them hold. `backends/host/states.py` calls it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.core.kv_layout import KVGroup
from twostroke.models.spec import ModelSpec, Recurrent

Array = npt.NDArray[np.float32]
State = tuple[Array, ...]
"""A state's parts, as `state_shapes` of its layer has them."""


class StateStore:
    def __init__(self, groups: dict[int, KVGroup], spec: ModelSpec) -> None:
        """`groups`: those of states, by their place in the layout."""
        self._groups = groups
        self._shapes: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._states: dict[int, Array] = {}  # of a layer [num_slots, state_values]: its parts, one behind the other
        self._aside: dict[tuple[int, int], list[Array]] = {}  # by layer and slot: the states after its drafts
        for group in groups.values():
            for layer in group.layers:
                own = spec.layers[layer].attention
                assert isinstance(own, Recurrent)
                self._shapes[layer] = own.state_shapes
                self._states[layer] = np.zeros((group.num_blocks, own.state_values), dtype=np.float32)

    def read(self, layer: int, slot: int, position: int) -> State:
        """As it is before the token at `position`: views, not to be written to."""
        if slot < 0:
            raise IndexError("a step reads a state whose slot was never granted")
        return self._parts(layer, self._states[layer][slot] if position else np.zeros_like(self._states[layer][0]))

    def write(self, layer: int, slot: int, state: State) -> None:
        self._states[layer][slot] = _joined(state)

    def keep_aside(self, layer: int, slot: int, state: State) -> None:
        """The state after one more draft than the last that was kept."""
        self._aside.setdefault((layer, slot), []).append(_joined(state))

    def save(self, group: int, slot: int, num_drafts: int, target: int) -> None:
        """The state after this many of the slot's drafts, to another slot; 0: what the slot holds."""
        for layer in self._groups[group].layers:
            kept = self._aside[layer, slot][num_drafts - 1] if num_drafts else self._states[layer][slot]
            self._states[layer][target] = kept

    def commit(self, group: int, slot: int, num_drafts: int) -> None:
        """This many drafts of the slot's last step hold; all that was kept aside for it is forgotten."""
        if num_drafts:
            self.save(group, slot, num_drafts, slot)
        for layer in self._groups[group].layers:
            self._aside.pop((layer, slot), None)

    def drop_aside(self) -> None:
        """No draft holds that was not committed."""
        self._aside.clear()

    def copy(self, group: int, source: int, target: int) -> None:
        """A slot's state to another slot, in all of a group's layers: a snapshot, or what a sequence begins with."""
        for layer in self._groups[group].layers:
            self._states[layer][target] = self._states[layer][source]

    def values(self, group: int) -> int:
        """Of one slot in one layer."""
        return len(self._states[self._groups[group].layers[0]][0])

    def copy_out(self, group: int, slot: int, into: Array) -> None:
        """into [layers, values]"""
        for place, layer in enumerate(self._groups[group].layers):
            into[place] = self._states[layer][slot]

    def copy_in(self, group: int, slot: int, data: Array) -> None:
        for place, layer in enumerate(self._groups[group].layers):
            self._states[layer][slot] = data[place]

    def _parts(self, layer: int, values: Array) -> State:
        parts, start = [], 0
        for shape in self._shapes[layer]:
            end = start + int(np.prod(shape))
            parts.append(values[start:end].reshape(shape))
            start = end
        return tuple(parts)


def _joined(state: State) -> Array:
    return np.concatenate([part.reshape(-1) for part in state])
