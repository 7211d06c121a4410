"""What a drafter that computes knows of each row: its tokens, how far its own KV reaches, and what it guessed behind
that. KV of a drafter may lag behind the model's: it is caught up with, or no drafts are made. A block that is found
again by its prefix holds a drafter's KV only if one wrote it: here it is known which do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.batch import Batch
from twostroke.backends.host.rows import RowSet
from twostroke.core.kv_layout import KVLayout
from twostroke.core.step import Step

Int32Array = npt.NDArray[np.int32]


@dataclass(slots=True)
class DraftRow:
    tokens: list[int]
    """All that are known; the last was not computed by anybody yet."""
    tables: tuple[Int32Array, ...]  # one a KV group of the drafter, [max blocks of a sequence]
    computed: int = 0
    """Positions below it have KV of the known tokens."""
    whole_from: int = 0
    """Positions below it may have none: a block that holds one of them is not whole."""
    guesses: list[int] = field(default_factory=list)
    """Tokens whose KV was written behind them, from position `computed` on."""

    @property
    def lag(self) -> int:
        """Known tokens without KV."""
        return len(self.tokens) - self.computed

    def extend(self, token_ids: Iterable[int]) -> None:
        """These came. KV of a guess that was right stays."""
        for token in token_ids:
            if self.guesses and self.computed == len(self.tokens):
                if self.guesses[0] == token:
                    self.computed += 1
                    del self.guesses[0]
                else:
                    self.guesses.clear()
            self.tokens.append(token)

    def rewind(self) -> None:
        """Leave the last token to be computed: what follows it is asked for, and only its own pass says that."""
        self.computed = min(self.computed, len(self.tokens) - 1)
        self.guesses.clear()


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one row to compute in a pass of the drafter."""

    row: DraftRow
    start: int
    token_ids: Sequence[int]
    is_chunk: bool
    """Whether it is read as a prompt is; else each token is computed as in decode."""
    wants_logits: bool
    """Of its last token."""


class DraftRows:
    """Rows by sequence id, of those that a drafter drafts for."""

    def __init__(self, rows: RowSet, layout: KVLayout, model: int) -> None:
        """`layout`: of all models; `model`: whose groups are the drafter's."""
        self._rows = rows
        self._block_size = layout.block_size
        self._places = layout.places_of(model)
        self._is_written = {place: np.zeros(layout.groups[place].num_blocks, dtype=np.bool_) for place in self._places}
        """Of each block, whether it holds the drafter's KV of all its tokens."""
        self._drafted: dict[int, DraftRow] = {}

    def __getitem__(self, seq_id: int) -> DraftRow:
        return self._drafted[seq_id]

    def get(self, seq_id: int) -> DraftRow | None:
        return self._drafted.get(seq_id)

    def open(self, seq_id: int, token_ids: Sequence[int]) -> None:
        tables = self._rows[seq_id].tables
        self._drafted[seq_id] = DraftRow(list(token_ids), tuple(tables[place] for place in self._places))

    def close(self, seq_id: int) -> None:
        self._drafted.pop(seq_id, None)

    def begin(self, step: Step) -> None:
        """Take a step's grants, of all rows: a new block holds nothing yet. A row that joins may begin with blocks of
        others, up to where its first chunk starts."""
        joined = {join.seq_id for join in step.joins}
        found = {chunk.seq_id: chunk.start // self._block_size for chunk in step.prefills if chunk.seq_id in joined}
        for grant in step.grants:
            if grant.group in self._is_written:
                num_found = max(0, found.get(grant.seq_id, 0) - grant.first_index)
                self._is_written[grant.group][list(grant.block_ids[num_found:])] = False
        for seq_id, num_blocks in found.items():
            if (row := self._drafted.get(seq_id)) is not None:
                row.computed = self._block_size * self._num_written(row, num_blocks)

    def _num_written(self, row: DraftRow, num_blocks: int) -> int:
        """Of its first blocks, how many are written without a gap."""
        is_written = np.ones(num_blocks, dtype=np.bool_)
        for place, table in zip(self._places, row.tables, strict=True):
            is_written &= self._is_written[place][table[:num_blocks]]
        return num_blocks if is_written.all() else int(is_written.argmin())

    @property
    def is_written(self) -> tuple[npt.NDArray[np.bool_], ...]:
        """One a group of the drafter: of each block, whether it holds its KV of all its tokens. May be written where a
        block's content comes from elsewhere."""
        return tuple(self._is_written.values())

    def unwritten(self, row: DraftRow, end: int) -> Int32Array:
        """Of a drafter with one group, the blocks below a position that hold nothing of it."""
        table = row.tables[0][: -(-end // self._block_size)]
        return table[(table >= 0) & ~self._is_written[self._places[0]][table]]

    def computed(self, row: DraftRow, end: int) -> None:
        """KV of known tokens was written at the positions below `end`."""
        first = max(row.computed // self._block_size, -(-row.whole_from // self._block_size))
        last = end // self._block_size
        row.computed = end
        for place, table in zip(self._places, row.tables, strict=True):
            self._is_written[place][table[first:last]] = True


def batch_of(pieces: Sequence[Piece]) -> Batch:
    """In the order of a batch: tokens that are computed as in decode first, whatever their pieces; then chunks."""
    singles = [piece for piece in pieces if not piece.is_chunk]
    chunks = [piece for piece in pieces if piece.is_chunk]
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    owners: list[DraftRow] = []
    for piece in singles + chunks:
        token_ids += piece.token_ids
        positions += range(piece.start, piece.start + len(piece.token_ids))
        if piece.wants_logits:
            logit_rows.append(len(token_ids) - 1)
        owners += [piece.row] * (1 if piece.is_chunk else len(piece.token_ids))
    num_decodes = sum(len(piece.token_ids) for piece in singles)
    counts = [1] * num_decodes + [len(piece.token_ids) for piece in chunks]
    firsts = np.cumsum([0, *counts[:-1]])
    return Batch(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        num_decodes=num_decodes,
        segment_first=firsts.astype(np.int32),
        segment_count=np.array(counts, dtype=np.int32),
        segment_start=np.array(positions, dtype=np.int32)[firsts],
        tables=tuple(np.stack(tables) for tables in zip(*(owner.tables for owner in owners), strict=True)),
        logit_rows=np.array(logit_rows, dtype=np.int32),
    )
