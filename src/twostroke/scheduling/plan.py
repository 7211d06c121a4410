"""A Step while it is being chosen: the work that was taken into its token budget so far. Frozen into a Step when
complete."""

from __future__ import annotations

from collections.abc import Sequence as Series
from typing import Protocol

from twostroke.core.sequence import Sequence
from twostroke.core.step import (
    NO_COSTS,
    BlockCopy,
    BlockGrant,
    DecodeSlot,
    DraftCosts,
    Drafts,
    PrefillChunk,
    RowJoin,
    StateRestore,
    StateSave,
    Step,
)
from twostroke.kv.snapshots import Snapshots


class Drafting(Protocol):
    """Decides what is drafted."""

    def begin(self, running: Series[Sequence]) -> None:
        """Called before a step for these sequences is chosen, in which nobody reads a prompt."""
        return

    def drafts(self, sequence: Sequence, most: int) -> Drafts | None:
        """Returns drafts for the next slot of this stream: `most` at most, which is at least one. None means no
        drafts."""

    def costs(self) -> DraftCosts:
        """Returns what drafts cost in that step, for a backend that drafts for itself."""
        return NO_COSTS


class StepPlan:
    def __init__(self, max_tokens: int) -> None:
        self.tokens_left = max_tokens
        self.sequences: dict[int, Sequence] = {}
        """The sequences that have work in this step, by id."""
        self.prefilling: list[Sequence] = []
        """Running sequences that still have something to read, in their order."""
        self.has_preempted = False
        self.reading_s = 0.0
        """Predicted seconds of its chunks, as if each were alone in a step."""
        self._prefills: list[PrefillChunk] = []
        self._saves: list[StateSave] = []
        self._restores: tuple[StateRestore, ...] = ()
        self.decodes: list[DecodeSlot] = []
        self._joins: list[RowJoin] = []
        self._grants: list[BlockGrant] = []

    @property
    def is_full(self) -> bool:
        return self.tokens_left == 0

    def __len__(self) -> int:
        return len(self.sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self.sequences

    def add_slot(
        self, sequence: Sequence, position: int, grants: tuple[BlockGrant, ...], drafts: Drafts | None = None
    ) -> None:
        seq_id = sequence.seq_id
        self.decodes.append(DecodeSlot(seq_id, position, drafts))
        self.sequences[seq_id] = sequence
        self.tokens_left -= 1
        sequence.num_in_flight += 1
        if drafts is not None:
            self.tokens_left -= drafts.most
            sequence.num_in_flight += drafts.most
            sequence.num_drafts_in_flight += drafts.most
        if grants:
            self._grants.extend(grants)

    def add_chunk(self, sequence: Sequence, chunk: PrefillChunk, grants: tuple[BlockGrant, ...]) -> None:
        num_tokens = len(chunk.token_ids)
        self._prefills.append(chunk)
        self.sequences[sequence.seq_id] = sequence
        self.tokens_left -= num_tokens
        sequence.num_in_flight += num_tokens
        self._grants.extend(grants)

    def add_join(self, sequence: Sequence) -> None:
        output = tuple(sequence.output_token_ids)
        self._joins.append(RowJoin(sequence.seq_id, sequence.request, sequence.sample_index, output))

    def take_snapshots(self, states: Snapshots) -> None:
        """Adds the step's snapshots. Called when all its work is chosen and each running sequence has a slot for its
        own state: snapshots may take the slots that are left."""
        for chunk in self._prefills:
            self._saves += states.of_chunk(self.sequences[chunk.seq_id], chunk.end)
        for slot in self.decodes:
            self._saves += states.of_slot(self.sequences[slot.seq_id], slot)
        self._restores = states.restores()

    def freeze(
        self,
        step_id: int,
        leaves: tuple[int, ...],
        drafting: Drafting | None = None,
        copies: tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]] = ((), ()),
    ) -> Step:
        """Returns the Step. `drafting` gave it drafts, and knows what they cost. `copies` are its spills and loads."""
        costs = NO_COSTS
        if drafting is not None and any(slot.drafts for slot in self.decodes):
            costs = drafting.costs()
        return Step(
            step_id,
            prefills=tuple(self._prefills),
            decodes=tuple(self.decodes),
            joins=tuple(self._joins),
            leaves=leaves,
            grants=tuple(self._grants),
            draft_costs=costs,
            spills=copies[0],
            loads=copies[1],
            restores=self._restores,
            saves=tuple(self._saves),
        )
