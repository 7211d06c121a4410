"""What a step does with states around its pass: begin from copies that were kept, and keep copies. Rows know their
slots and how far they are, so this waits for nothing. What drafts left behind is `recurrent.py`'s to settle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from twostroke.backends.cuda.kernels.state_items import ANY_LENGTH, COPIES_AT_ONCE, Lengths, copy_states, keep_states
from twostroke.backends.cuda.kv_store import KVStore
from twostroke.backends.cuda.rows import DeviceRows
from twostroke.backends.cuda.staging import Staging
from twostroke.core.step import Step


class DeviceStates:
    def __init__(self, kv: KVStore, rows: DeviceRows) -> None:
        assert kv.states is not None
        self._group, self._states = kv.states
        self._rows = rows
        self.lengths = Lengths(rows.sampling.records, rows.tables[self._group])
        self._staging = Staging(4 * COPIES_AT_ONCE, self._states.device)
        self._scratch_slot = self._states.shape[1] - 1

    def prepare(self) -> None:
        """Launch what steps do, on the slot that padding has: no request waits for a compiler."""
        self._restore([(self._scratch_slot, self._scratch_slot)])
        self._keep([(self._rows.padding_row, self._scratch_slot, ANY_LENGTH)])

    def restore(self, step: Step) -> None:
        """Rows are as the step has them, and nothing is computed."""
        self._restore([(source, target) for _, _, source, target in step.restores])

    def save(self, step: Step) -> None:
        """All is computed and sampled: of a chunk its end is known, of a slot the row knows where it is."""
        ends, index_of = {chunk.seq_id: chunk.end for chunk in step.prefills}, self._rows.index_of
        found = []
        for seq_id, _, slot, length in step.saves:
            if seq_id not in ends:
                found.append((index_of[seq_id], slot, length))
            elif ends[seq_id] == length:
                found.append((index_of[seq_id], slot, ANY_LENGTH))
        self._keep(found)

    def nobodys_saves(self) -> torch.Tensor:
        """One, as of a step that verifies drafts, of padding's stream to padding's slot."""
        return self._sent([(0, self._scratch_slot, 1)], 3)

    def drafted_saves(self, step: Step) -> Iterator[torch.Tensor]:
        """Of a step that verifies drafts, on the device, some at a time: the place of each one's stream, its slot and
        its length  # [saves, 3]"""
        places = {slot.seq_id: place for place, slot in enumerate(step.decodes)}
        found = [(places[seq_id], slot, length) for seq_id, _, slot, length in step.saves]
        for first in range(0, len(found), COPIES_AT_ONCE):
            yield self._sent(found[first : first + COPIES_AT_ONCE], 3)

    def _restore(self, pairs: Sequence[tuple[int, int]]) -> None:
        for first in range(0, len(pairs), COPIES_AT_ONCE):
            copy_states(self._states, self._sent(pairs[first : first + COPIES_AT_ONCE], 2))

    def _keep(self, saves: Sequence[tuple[int, int, int]]) -> None:
        for first in range(0, len(saves), COPIES_AT_ONCE):
            keep_states(self._states, self._sent(saves[first : first + COPIES_AT_ONCE], 3), self.lengths)

    def _sent(self, numbers: Sequence[tuple[int, ...]], width: int) -> torch.Tensor:
        """[numbers, width]"""
        array = np.array(numbers, dtype=np.int32).reshape(-1)
        self._staging.send((array,))
        return self._staging.views((len(array),))[0].view(-1, width)
