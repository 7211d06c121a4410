"""What a host backend does with states around a pass: begin from one that was kept, settle which drafts of a slot hold,
and keep copies. Knows rows and lengths; what a state is, and where it lies, the store knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from twostroke.backends.host.rows import RowSet
from twostroke.core.kv_layout import KVLayout
from twostroke.core.step import SampledToken, Step


class HostStates(Protocol):
    """The states of one model's recurrent layers, in slots by group.

    A pass leaves in a sequence's slot the state behind its chunk, or behind the one token that a decode slot is certain
    of. Behind each of the slot's drafts, which may not hold, it keeps a state aside: it computes them one from the
    other, in their order, and changes nothing in the slot."""

    def copy(self, group: int, source: int, target: int) -> None:
        """A slot's state to another slot, in all of a group's layers."""

    def save(self, group: int, slot: int, num_drafts: int, target: int) -> None:
        """The state behind the first `num_drafts` of the slot's drafts to another slot; 0: what the slot holds."""

    def commit(self, group: int, slot: int, num_drafts: int) -> None:
        """This many of the slot's drafts hold: the state behind them is the sequence's. All that was kept aside is
        forgotten."""

    def drop_aside(self) -> None:
        """Forget what was kept aside in a step that failed."""


class StateKeeper:
    def __init__(self, layout: KVLayout, rows: RowSet, states: HostStates) -> None:
        self._groups = tuple(number for number, group in enumerate(layout.groups) if group.is_state)
        self._rows, self._states = rows, states
        self._starts: dict[int, int] = {}

    def begin(self, step: Step) -> None:
        """Rows are as the step has them, and nothing is computed."""
        self._states.drop_aside()
        for _, group, source, target in step.restores:
            self._states.copy(group, source, target)
        # What a row has computed: all it knows but the token that enters now.
        self._starts = {slot.seq_id: self._rows[slot.seq_id].length - 1 for slot in step.decodes}

    def end(
        self, step: Step, drafts: Mapping[int, tuple[int, ...]], sampled: Mapping[int, tuple[SampledToken, ...]]
    ) -> None:
        """Tokens are chosen: a slot's state stands behind its own token and those drafts that brought another."""
        num_held = {seq_id: max(0, len(sampled.get(seq_id, ())) - 1) for seq_id in drafts}
        ends = {chunk.seq_id: chunk.end for chunk in step.prefills}
        for seq_id, group, target, length in step.saves:
            first = ends[seq_id] if seq_id in ends else self._starts[seq_id] + 1
            if first <= length <= first + num_held.get(seq_id, 0):
                self._states.save(group, self._slot(seq_id, group), length - first, target)
        for seq_id, count in num_held.items():
            for group in self._groups:
                self._states.commit(group, self._slot(seq_id, group), count)

    def _slot(self, seq_id: int, group: int) -> int:
        return int(self._rows[seq_id].tables[group][0])
