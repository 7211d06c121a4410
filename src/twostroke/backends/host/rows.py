"""The rows of a host backend: what it keeps for each running Sequence from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.sampler import RowSampler
from twostroke.core.grammar import Grammars, TokenMatcher
from twostroke.core.kv_layout import KVLayout
from twostroke.core.step import Drafts, RowJoin, Step

NO_BLOCK = -1
"""A block table's entry that was never granted, or whose block lies behind a sliding window."""


@dataclass(slots=True)
class Row:
    seq_id: int
    length: int
    """How many tokens are known. The last of them enters at the position `length - 1`."""
    last_token: int
    sampler: RowSampler
    tables: tuple[npt.NDArray[np.int32], ...]  # one for each KV group, [max blocks of a sequence]
    stop_ids: frozenset[int] = frozenset()
    second_text_at: int | None = None

    def drafts_left(self, drafts: Drafts) -> tuple[int, ...]:
        """Returns the host's guesses that lie behind what the row knows by now."""
        return drafts.token_ids[max(0, self.length - drafts.start) :][: drafts.most]


class RowSet:
    """Rows by sequence id; `update` takes a step's leaves, joins and grants, in that order."""

    def __init__(self, layout: KVLayout, max_context: int, vocab_size: int) -> None:
        self._layout = layout
        self.num_groups = len(layout.places_of(0))
        """How many groups the model that answers has. They come first of all groups."""
        self._table_len = layout.blocks_for(max_context)
        self._vocab_size = vocab_size
        self._rows: dict[int, Row] = {}
        self.grammars: Grammars | None = None
        """Needed by rows whose request has a grammar."""

    def __getitem__(self, seq_id: int) -> Row:
        return self._rows[seq_id]

    def matcher(self, seq_id: int) -> TokenMatcher | None:
        """Returns the matcher that watches over a row's answer. None means that there is none, or no such row."""
        row = self._rows.get(seq_id)
        return None if row is None else row.sampler.matcher

    def __len__(self) -> int:
        return len(self._rows)

    def update(self, step: Step) -> None:
        for seq_id in step.leaves:
            self._rows.pop(seq_id, None)  # a step that raised may have ended before it opened this row
        for join in step.joins:
            self._rows[join.seq_id] = self._open(join)
        for grant in step.grants:
            table = self._rows[grant.seq_id].tables[grant.group]
            end = grant.first_index + len(grant.block_ids)
            if end > len(table):  # numpy would drop a single id silently
                raise IndexError(f"a grant reaches entry {end} of a block table of {len(table)}")
            table[grant.first_index : end] = grant.block_ids

    def _open(self, join: RowJoin) -> Row:
        tables = tuple(np.full(self._table_len, NO_BLOCK, dtype=np.int32) for _ in self._layout.groups)
        matcher = None
        if (grammar := join.request.sampling.grammar) is not None:
            if self.grammars is None:
                raise ValueError("a request with a grammar reached a backend that was given none")
            matcher = self.grammars.matcher(grammar)
        sampler = RowSampler(join.request, join.sample_index, join.output_token_ids, self._vocab_size, matcher)
        known = join.request.prompt_token_ids + join.output_token_ids
        request = join.request
        return Row(join.seq_id, len(known), known[-1], sampler, tables, request.stop_ids, request.second_text_at)
