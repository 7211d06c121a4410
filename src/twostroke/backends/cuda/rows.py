"""The rows of a device: what it keeps for each running Sequence from step to step. The host knows which row is whose;
block tables, lengths and last tokens live on the device, and only what changed is sent."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from twostroke.backends.cuda.grammar_rows import GrammarRows
from twostroke.backends.cuda.kernels.rows import write_entries
from twostroke.backends.cuda.sampling import SamplingRows
from twostroke.backends.cuda.staging import Integers, Staging
from twostroke.core.kv_layout import KVLayout
from twostroke.core.step import BlockGrant, RowJoin, Step

ENTRIES_PER_COPY = 1 << 15
NO_SECOND = 2**31 - 1


class Tables(Protocol):
    def __getitem__(self, group: int, /) -> torch.Tensor:
        """int32 [rows, blocks of a sequence]"""


class ModelRows(Protocol):
    """What a model reads of rows: those of all, with the tables of its own groups alone."""

    @property
    def tables(self) -> Tables: ...

    @property
    def last_tokens(self) -> torch.Tensor: ...

    @property
    def second_texts(self) -> torch.Tensor:
        """int32 [rows]: of two texts that are read together, where the second begins; beyond all where there is one."""

    @property
    def sampling(self) -> SamplingRows: ...


class DeviceRows:
    """One row more than may run: padding's own, whose table knows the scratch block alone."""

    def __init__(
        self, layout: KVLayout, max_rows: int, max_context: int, sampling: SamplingRows, device: torch.device
    ) -> None:
        self.sampling = sampling
        self.grammars = GrammarRows(sampling.vocab_size)
        self.padding_row = max_rows
        self.index_of: dict[int, int] = {}  # sequence id -> row
        self._free = list(range(max_rows - 1, -1, -1))
        self._table_len = layout.blocks_for(max_context)
        self._scratch_block = layout.groups[0].num_blocks
        scratch = torch.tensor([group.num_blocks for group in layout.groups], dtype=torch.int32, device=device)
        shape = (len(layout.groups), max_rows + 1, self._table_len)
        self.tables = scratch[:, None, None].expand(shape).contiguous()  # [groups, rows, blocks of a sequence]
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.second_texts = torch.full((max_rows + 1,), NO_SECOND, dtype=torch.int32, device=device)
        self._has_second: set[int] = set()
        self._staging = Staging(2 * ENTRIES_PER_COPY, device)

    def __len__(self) -> int:
        return len(self.index_of)

    def prepare(self) -> None:
        """Launch what `update` does, on the padding row, which stays as it is: no request waits for a compiler."""
        padding_entry = np.array([self.padding_row * self._table_len], dtype=np.int32)
        self._write_entries(padding_entry, np.array([self._scratch_block], dtype=np.int32))
        self.sampling.prepare_records()

    def update(self, step: Step) -> None:
        """Take a step's leaves, joins and grants, in that order."""
        for seq_id in step.leaves:
            self._close(seq_id)
        for join in step.joins:
            if not self._free:
                raise IndexError(
                    f"a row for sequence {join.seq_id} was asked for, and all {self.padding_row} are taken"
                )
            row = self._free.pop()
            self.index_of[join.seq_id] = row
            self._note_second(row, join.request.second_text_at)
            self.sampling.open(row, join)
            self.grammars.open(join)
        if step.grants:
            self._write(step.grants)
        self.sampling.flush()

    def _note_second(self, row: int, begins_at: int | None) -> None:
        """Rarely: most texts are read alone, and then the row is as it was."""
        if begins_at is None and row not in self._has_second:
            return
        self._has_second.discard(row) if begins_at is None else self._has_second.add(row)
        value = NO_SECOND if begins_at is None else begins_at
        self._staging.send((np.array([row], dtype=np.int32), np.array([value], dtype=np.int32)))
        write_entries(self.second_texts, *self._staging.views((1, 1)))

    def take_back(self, joins: tuple[RowJoin, ...]) -> None:
        """Close the rows of a step that could not be launched."""
        for join in joins:
            self._close(join.seq_id)

    def _close(self, seq_id: int) -> None:
        row = self.index_of.pop(seq_id, None)  # a step that raised may have ended before it opened this row
        if row is not None:
            self.sampling.close(row)
            self.grammars.close(seq_id)
            self._free.append(row)

    def _write(self, grants: tuple[BlockGrant, ...]) -> None:
        indices: list[int] = []
        blocks: list[int] = []
        num_rows = self.padding_row + 1
        for grant in grants:
            end = grant.first_index + len(grant.block_ids)
            if end > self._table_len:
                raise IndexError(f"a grant reaches entry {end} of a block table of {self._table_len}")
            base = (grant.group * num_rows + self.index_of[grant.seq_id]) * self._table_len
            indices.extend(range(base + grant.first_index, base + end))
            blocks.extend(grant.block_ids)
        for start in range(0, len(indices), ENTRIES_PER_COPY):
            part = slice(start, start + ENTRIES_PER_COPY)
            self._write_entries(np.array(indices[part], dtype=np.int32), np.array(blocks[part], dtype=np.int32))

    def _write_entries(self, indices: Integers, blocks: Integers) -> None:
        self._staging.send((indices, blocks))
        write_entries(self.tables, *self._staging.views((len(indices), len(blocks))))
