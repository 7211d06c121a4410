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
    """A contiguous range of one Sequence's known tokens, to be computed in this step."""

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    samples: bool
    """True when this chunk completes the prefill: its last position yields a token."""
    prompt_logprobs: int | None = None
    """If set, the logprob of the next token is told for each position whose next token is known, with this many of the
    most likely tokens. The token that follows the chunk's last position is in `next_token_id`."""
    next_token_id: int | None = None
    pools: bool = False
    """Stands in place of `samples` for a request for a vector: this chunk completes the prompt, and its last states are
    pooled into one. If the model pools more than the last state, the chunk is the whole prompt."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class Drafts(NamedTuple):
    """Guesses at the tokens that follow a slot's own token. They are computed with it in one pass. A guess is kept as
    long as the model would have chosen it. So a slot brings at least one token, and one more for each guess that
    held."""

    most: int
    """The most drafts that are computed."""
    token_ids: tuple[int, ...] = ()
    """The host's guesses for the positions from `start` on. Empty means that the backend drafts for itself."""
    start: int = 0
    """The position of the first guess. Guesses at positions below the row's length came too late: tokens that the host
    did not know when it guessed are there already."""


class DecodeSlot(NamedTuple):
    """Computes one Sequence's next tokens: the row's last token enters, and drafts behind it. It is a named tuple
    because a step makes hundreds, and a frozen dataclass takes three times as long to make."""

    seq_id: int
    position: int
    """The highest position at which the last token may enter. The row knows its own length, which is less if drafts of
    a step in flight do not hold. Blocks are granted for the most that may be written."""
    drafts: Drafts | None = None

    @property
    def num_queries(self) -> int:
        """How many tokens enter. At most as many come out."""
        return 1 if self.drafts is None else 1 + self.drafts.most

    def __repr__(self) -> str:
        drafts = "" if self.drafts is None else f", drafts={self.drafts}"
        return f"DecodeSlot(seq_id={self.seq_id}, position={self.position}{drafts})"


_drafts = itemgetter(2)


class DraftCosts(NamedTuple):
    """The predicted seconds of a step for several numbers of drafts, so that a backend that drafts for itself computes
    only drafts that pay."""

    num_drafts: tuple[int, ...]
    """Numbers of drafts in all slots of the step together, growing from 0."""
    seconds: tuple[float, ...]
    """Predicted seconds of the whole step with each of these numbers of drafts. The first are those of its decodes
    alone."""

    def with_drafts(self, count: int) -> float:
        """Returns the seconds for this number of drafts, interpolated between the known numbers. Beyond the last it
        continues the last line."""
        known, seconds = self.num_drafts, self.seconds
        if len(known) == 1:
            return seconds[0]
        place = min(max(bisect_left(known, count), 1), len(known) - 1)
        first, last = known[place - 1], known[place]
        share = (count - first) / (last - first)
        return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])


NO_COSTS = DraftCosts((0,), (0.0,))


class Drafted(NamedTuple):
    """How many drafts a slot had, and who made them. The tokens that they brought are told elsewhere."""

    method: str
    """The name of the method that made them."""
    num_drafts: int
    """How many drafts were computed. There may be fewer than the slot's `most`."""


@dataclass(frozen=True, slots=True)
class RowJoin:
    """Opens a row, or reopens it after a preemption. In that case some output is already known."""

    seq_id: int
    request: Request
    sample_index: int = 0
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockGrant:
    """New entries `first_index`, `first_index + 1`, ... of a row's block table in one KV group."""

    seq_id: int
    group: int
    first_index: int
    block_ids: tuple[int, ...]


class BlockCopy(NamedTuple):
    """Copies one block of a KV group, between the device and a slot in host memory."""

    group: int
    block_id: int
    slot: int


class StateRestore(NamedTuple):
    """Lets a sequence go on from a state that was kept: it is copied into the sequence's own slot. A step never writes
    to a slot that it restores from, so its copies may be made in any order."""

    seq_id: int
    group: int
    source: int
    target: int


class StateSave(NamedTuple):
    """Keeps a copy of a sequence's state behind its first `length` tokens, if this step computes the last of them. For
    a prefill chunk that is its end. With drafts, it is not known beforehand which step computes that token. So every
    step that may do it carries the save, and the one that does makes it, if the token held."""

    seq_id: int
    group: int
    slot: int
    """The slot that the copy goes to."""
    length: int


@dataclass(frozen=True, slots=True)
class Step:
    """A backend carries out spills first, then loads, leaves, joins, grants and restores. Then it computes decodes and
    prefills side by side, and at last it makes saves. A chunk that begins at position 0 starts from an empty state,
    whatever its slot holds."""

    step_id: int
    prefills: tuple[PrefillChunk, ...] = ()
    decodes: tuple[DecodeSlot, ...] = ()
    joins: tuple[RowJoin, ...] = ()
    leaves: tuple[int, ...] = ()
    grants: tuple[BlockGrant, ...] = ()
    draft_costs: DraftCosts = NO_COSTS
    """Only a backend that drafts for itself reads them."""
    spills: tuple[BlockCopy, ...] = ()
    """Blocks to copy to host memory before this step, or a later one, writes to them."""
    loads: tuple[BlockCopy, ...] = ()
    """Blocks to copy from host memory, after all that was launched before. The copies may still be under way while this
    step computes. A step waits for those that its own grants and saves name."""
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
        """How many queries all slots have together."""
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
    """What a step brought. `sampled` has, for each sequence whose next token was due, this token and one for each draft
    that held. A sequence in `errors` could not go on after what it sampled, because its logits were not finite, say.
    The rest of the step is valid."""

    step_id: int
    sampled: Mapping[int, tuple[SampledToken, ...]]
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
    compute_s: float = 0.0
    others_share: float = 0.0
    """The share of the backend's cores that other programs took during the step, as far as it is known."""
    drafted: Mapping[int, Drafted] = field(default_factory=dict)
    """Drafts of each slot that had any, by sequence. Each draft that held brought a token behind the slot's own."""
    drafting_s: float = 0.0
    """The part of `compute_s` that making drafts took: looking them up, or computing them and what they are made
    from."""
    stuck: frozenset[int] = frozenset()
    """Sequences in `errors` that ended because their grammar allows no token. Their KV is right, and others may use
    it."""
    vectors: Mapping[int, bytes] = field(default_factory=dict)
    """The vector of each chunk that `pools`, by sequence: 32-bit floats, the lowest byte first."""
