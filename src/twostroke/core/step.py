"""The work order of one forward pass and what comes back. A Step is frozen, says its phases in its types, and never
holds the value of a token that is still being sampled: a decode slot's input is the last token of its backend row.

A row is what a backend keeps for a running Sequence between steps: its length and last token, block tables, sampling
state. Only what changed is sent: `joins` opens rows, `grants` extends their block tables, `leaves` closes them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from twostroke.core.request import Request


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A contiguous range of one Sequence's known tokens to compute now."""

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    samples: bool
    """True when this chunk completes the prefill: its last position yields a token."""
    prompt_logprobs: int | None = None
    """When set: for each position of the chunk whose next token is known, the logprob of that next token, and this
    many of the most likely ones. The next token of the chunk's last position comes in `next_token_id`."""
    next_token_id: int | None = None
    pools: bool = False
    """In place of `samples`, of a request for a vector: this chunk completes the prompt, and its last states are pooled
    into one. Where the model pools more than the last of them, the chunk is the whole prompt."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class Drafts(NamedTuple):
    """Guesses at the tokens behind a slot's own, computed with it in one pass. Each is kept while the model would have
    chosen it, so a slot brings one token at least, and one more for every guess that held."""

    most: int
    """No more than this many are computed."""
    token_ids: tuple[int, ...] = ()
    """What the host guesses for the positions from `start` on. Empty: the backend drafts for itself."""
    start: int = 0
    """Guesses below the row's length were overtaken by tokens that the host did not know when it made them."""


class DecodeSlot(NamedTuple):
    """One Sequence's next tokens: the row's last token enters, and drafts behind it. (Frozen, like the others, and a
    tuple because a step makes hundreds: a frozen dataclass takes three times as long to make.)"""

    seq_id: int
    position: int
    """Where the last token enters, at most: the row knows its own length. It is less where drafts of a step in flight
    do not hold; blocks are granted for the most that may be written."""
    drafts: Drafts | None = None

    @property
    def num_queries(self) -> int:
        """The tokens that enter, and the most that come out."""
        return 1 if self.drafts is None else 1 + self.drafts.most

    def __repr__(self) -> str:
        drafts = "" if self.drafts is None else f", drafts={self.drafts}"
        return f"DecodeSlot(seq_id={self.seq_id}, position={self.position}{drafts})"


_drafts = itemgetter(2)


class DraftCosts(NamedTuple):
    """What a step is predicted to take with some drafts in it, so that whoever drafts computes those that pay."""

    num_drafts: tuple[int, ...]
    """In all its slots together, from 0 on, growing."""
    seconds: tuple[float, ...]
    """Of the first: its decodes without any. Of the others: what these drafts add on top, with all else that the step
    holds."""

    def with_drafts(self, count: int) -> float:
        """Seconds, on the line between the numbers that are known; beyond the last, on the last line."""
        known, seconds = self.num_drafts, self.seconds
        if len(known) == 1:
            return seconds[0]
        place = min(max(bisect_left(known, count), 1), len(known) - 1)
        first, last = known[place - 1], known[place]
        share = (count - first) / (last - first)
        return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])


NO_COSTS = DraftCosts((0,), (0.0,))


class Drafted(NamedTuple):
    """What became of a slot's drafts, beside the tokens that it brought."""

    method: str
    """Who made them."""
    num_drafts: int
    """That were computed, which may be fewer than the slot's `most`."""


@dataclass(frozen=True, slots=True)
class RowJoin:
    """Opens a row (or reopens it after preemption; then some output is already known)."""

    seq_id: int
    request: Request
    sample_index: int = 0
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockGrant:
    """Entries `first_index`, `first_index + 1`, ... of a row's block table in one KV group."""

    seq_id: int
    group: int
    first_index: int
    block_ids: tuple[int, ...]


class BlockCopy(NamedTuple):
    """One block of a KV group, between the device and a slot in host memory."""

    group: int
    block_id: int
    slot: int


class StateRestore(NamedTuple):
    """A sequence goes on from a state that was kept: it is copied into the sequence's own slot. No slot that a step
    restores from is written to by it, so a step's copies may be made in any order."""

    seq_id: int
    group: int
    source: int
    target: int


class StateSave(NamedTuple):
    """Keep a copy of a sequence's state as it is behind its first `length` tokens, if this step computes the last of
    them. Of a chunk that is its end. Where drafts are about, it may turn out to be another step that does: the save is
    part of all that may, and the one that does makes it, if the token held."""

    seq_id: int
    group: int
    slot: int
    """Where the copy goes."""
    length: int


@dataclass(frozen=True, slots=True)
class Step:
    """A backend takes spills, then loads, leaves, joins, grants and restores; then computes decodes and prefills side
    by side; then makes saves. A chunk that begins at position 0 finds no state before it, whatever its slot holds."""

    step_id: int
    prefills: tuple[PrefillChunk, ...] = ()
    decodes: tuple[DecodeSlot, ...] = ()
    joins: tuple[RowJoin, ...] = ()
    leaves: tuple[int, ...] = ()
    grants: tuple[BlockGrant, ...] = ()
    draft_costs: DraftCosts = NO_COSTS
    """For a backend that drafts for itself."""
    spills: tuple[BlockCopy, ...] = ()
    """Blocks to copy to host memory before this step, or a later one, writes to them."""
    loads: tuple[BlockCopy, ...] = ()
    """Blocks to copy from host memory, behind all that was launched before. They may still be on their way while this
    step computes: a step waits for those that its own grants and saves name."""
    restores: tuple[StateRestore, ...] = ()
    saves: tuple[StateSave, ...] = ()

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.prefills)

    @property
    def has_drafts(self) -> bool:
        return any(map(_drafts, self.decodes))

    @property
    def num_decode_tokens(self) -> int:
        """The queries of all slots."""
        return sum(slot.num_queries for slot in self.decodes) if self.has_drafts else len(self.decodes)

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of one token, and of the most likely tokens at its position, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SampledToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back: of each sequence whose next token was due, that one, and those of its drafts that held. One in
    `errors` could not be continued (its logits were not finite, say) behind what it sampled; the rest of the step is
    sound."""

    step_id: int
    sampled: Mapping[int, tuple[SampledToken, ...]]
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
    compute_s: float = 0.0
    others_share: float = 0.0
    """Of the cores that the backend may use, what other programs took meanwhile, as far as it knows."""
    drafted: Mapping[int, Drafted] = field(default_factory=dict)
    """Of each slot that drafts were computed for. Of those that held, each brought a token behind the slot's own."""
    drafting_s: float = 0.0
    """Of `compute_s`, what making drafts took: looking them up, or computing them and what they are made from."""
    stuck: frozenset[int] = frozenset()
    """Of those in `errors`, whose grammar allows no token: their KV is right, and others may use it."""
    vectors: Mapping[int, bytes] = field(default_factory=dict)
    """Of each chunk that `pools`, in 32-bit floats, the lowest byte first."""
