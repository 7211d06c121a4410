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
            self.sampling.open(row, join)
            self.grammars.open(join)
        if step.grants:
            self._write(step.grants)
        self.sampling.flush()

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
