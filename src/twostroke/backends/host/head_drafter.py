"""Heads that draft. They follow what the model computes, keep what its hidden states say of each stream, and draw a
chain of guesses from that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.arithmetic import Array, rms_norm
from twostroke.backends.host.companions import TargetPass
from twostroke.backends.host.draft_blocks import DrafterBlocks
from twostroke.backends.host.draft_rows import DraftRow, DraftRows
from twostroke.backends.host.kept_blocks import BlockStore
from twostroke.backends.host.medusa import MedusaNetwork
from twostroke.backends.host.paged_layer import FIRST_SLOT, Ints
from twostroke.core.request import Request
from twostroke.core.step import Step
from twostroke.speculation.drafter import NOTHING, Ask, Proposal

LEAST_SURVIVAL = 0.1
"""A chain ends when the chance that all its guesses hold is less than this."""
MAX_CHAIN = 8
FADES = 0.9


class NetworkSpec(Protocol):
    @property
    def hidden_size(self) -> int: ...


class Network(Protocol):
    """The arithmetic of a head that keeps slots, as `backends/host/eagle3.py` and `backends/host/mtp.py` have it."""

    @property
    def spec(self) -> NetworkSpec: ...

    @property
    def kv(self) -> BlockStore:
        """Its slots, as blocks of one group."""

    def join(self, taps: Array) -> Array: ...

    def blank(self, blocks: Ints) -> bool:
        """Makes the slots of these blocks neutral, if a step looks at all of a stream's slots. Returns False if that is
        not needed."""

    def write(self, token_ids: Ints, hidden: Array, positions: Ints, tables: Ints) -> None: ...

    def step(
        self, token_ids: Ints, hidden: Array, positions: Ints, tables: Ints, firsts: Ints
    ) -> tuple[Array, Array]: ...


@dataclass(slots=True)
class Clock:
    """The seconds of a pass, by the number of bits of the number of its streams."""

    pass_s: dict[int, float] = field(default_factory=dict)

    def took(self, num_streams: int, seconds: float) -> None:
        size = num_streams.bit_length()
        self.pass_s[size] = FADES * self.pass_s.get(size, seconds) + (1.0 - FADES) * seconds

    def expects(self, num_streams: int) -> float:
        size = num_streams.bit_length()
        known = min(self.pass_s, key=lambda other: abs(other - size), default=None)
        return 0.0 if known is None else self.pass_s[known]


def likeliest(scores: Array, target_ids: npt.NDArray[np.int64]) -> Iterator[tuple[int, float]]:
    """Yields, for each row [n, draft vocab], the target's token that the head finds likeliest, and its chance."""
    best = scores.argmax(axis=1)
    totals = np.exp(scores - scores[np.arange(len(scores)), best][:, None]).sum(axis=1)
    if not np.isfinite(totals).all():
        raise ValueError("the head's scores are not finite")
    for index, total in zip(best.tolist(), totals.tolist(), strict=True):
        yield int(target_ids[index]), 1.0 / total


@dataclass(slots=True)
class _Followed:
    """What is known of a stream beside its slots."""

    joined: Array | None = None  # [hidden]
    """The joined hidden state of the last token that the target has read."""
    first: int = FIRST_SLOT
    """The first of its slots that holds something."""


@dataclass(slots=True)
class _Chain:
    row: DraftRow
    most: int
    state: Array  # [hidden]
    token: int
    first: int
    token_ids: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    survival: float = 1.0

    @property
    def goes_on(self) -> bool:
        return len(self.token_ids) < min(self.most, MAX_CHAIN) and self.survival >= LEAST_SURVIVAL


class SlotDrafter:
    """A head with slots of its own: EAGLE-3's, or a model's MTP block."""

    def __init__(
        self,
        network: Network,
        rows: DraftRows,
        *,
        name: str,
        source: str,
        target_ids: npt.NDArray[np.int64],
        taps: Callable[[TargetPass, npt.NDArray[np.intp]], Array],
        num_blocks: int,
        block_size: int,
    ) -> None:
        """`taps` gives the target's hidden states at rows of a pass, side by side."""
        self.name = name
        self._network, self._rows, self._taps = network, rows, taps
        self.source, self._target_ids, self._block_size = source, target_ids, block_size
        self._block_ends = np.zeros((num_blocks, network.spec.hidden_size), np.float32)
        """For each block, the joined hidden state of its last token. The first slot behind the block is made from
        it."""
        self._followed: dict[int, _Followed] = {}
        self._clock = Clock()

    @property
    def blocks(self) -> DrafterBlocks:
        return DrafterBlocks(self._network.kv, self._rows.is_written, self._block_ends)

    def open(self, seq_id: int, request: Request, token_ids: Sequence[int]) -> None:
        self._rows.open(seq_id, token_ids)
        self._followed[seq_id] = _Followed()

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._rows[seq_id].extend(token_ids)

    def close(self, seq_id: int) -> None:
        self._rows.close(seq_id)
        self._followed.pop(seq_id, None)

    def begin(self, step: Step) -> None:
        self._rows.begin(step)

    def seconds(self, num_streams: int, num_drafts: int) -> float:
        return min(num_drafts, MAX_CHAIN) * self._clock.expects(num_streams)

    def follow(self, done: TargetPass) -> None:
        """Fills the slots of all tokens that the target has read and that stay."""
        pieces = []
        for seq_id, places in done.rows().items():
            row = self._rows.get(seq_id)
            count = 0 if row is None else _num_kept(row, done, places)
            if row is not None and count:
                pieces.append((seq_id, row, np.arange(places.start, places.start + count)))
        if not pieces:
            return
        indices = np.concatenate([own for _, _, own in pieces])
        joined = self._network.join(self._taps(done, indices))
        before, end = np.empty_like(joined), 0
        for seq_id, row, own in pieces:
            first, end = end, end + len(own)
            before[first:end] = self._before(seq_id, row, int(done.batch.positions[own[0]]), joined[first:end])
        tables = np.stack([row.tables[0] for _, row, own in pieces for _ in own])
        positions = done.batch.positions[indices]
        self._network.write(done.batch.token_ids[indices], before, positions, tables)
        ends = np.flatnonzero((positions + 1) % self._block_size == 0)
        self._block_ends[tables[ends, positions[ends] // self._block_size]] = joined[ends]
        for _, row, own in pieces:
            self._rows.computed(row, int(done.batch.positions[own[-1]]) + 1)

    def _before(self, seq_id: int, row: DraftRow, start: int, joined: Array) -> Array:
        """Returns, for each of a stream's next tokens, the joined hidden state of the token before it, and keeps the
        last one."""
        known = self._followed[seq_id]
        last, known.joined = known.joined, joined[-1]
        if row.computed != start or (last is None and start % self._block_size):
            # Slots before this one were never written: nobody drafted for the request, or nobody asked. They say
            # nothing, and neither does this one, which lacks the state before it.
            is_blank = self._network.blank(self._rows.unwritten(row, start))
            known.first, row.computed, last = FIRST_SLOT if is_blank else start + 1, start, joined[0]
            row.whole_from = 0 if is_blank else start + 1
        elif last is None:
            last = joined[0] if start == 0 else self._block_ends[row.tables[0][start // self._block_size - 1]]
        return np.concatenate([last[None], joined[:-1]])

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        chains: dict[int, _Chain] = {}
        for seq_id, most in asks:
            row, known = self._rows[seq_id], self._followed[seq_id]
            if known.joined is not None and row.lag == 1:
                chains[seq_id] = _Chain(row, most, known.joined, row.tokens[-1], known.first)
        while going := [chain for chain in chains.values() if chain.goes_on]:
            self._advance(going)
        found = [chains.get(seq_id) for seq_id, _ in asks]
        return [NOTHING if one is None else Proposal(tuple(one.token_ids), tuple(one.chances)) for one in found]

    def _advance(self, chains: list[_Chain]) -> None:
        """Adds one more guess to each chain."""
        started_s = time.perf_counter()
        states, scores = self._network.step(
            np.array([chain.token for chain in chains], dtype=np.int32),
            np.stack([chain.state for chain in chains]),
            np.array([len(chain.row.tokens) - 1 + len(chain.token_ids) for chain in chains], dtype=np.int32),
            np.stack([chain.row.tables[0] for chain in chains]),
            np.array([chain.first for chain in chains], dtype=np.int32),
        )
        for chain, state, (token, chance) in zip(chains, states, likeliest(scores, self._target_ids), strict=True):
            chain.state, chain.token = state, token
            chain.token_ids.append(token)
            chain.chances.append(chance)
            chain.survival *= chance
        self._clock.took(len(chains), time.perf_counter() - started_s)


def _num_kept(row: DraftRow, done: TargetPass, places: range) -> int:
    """Returns how many of a stream's rows of a pass belong to tokens that the stream has. Rows of drafts that did not
    hold do not."""
    start, tokens = int(done.batch.positions[places.start]), done.batch.token_ids
    count = 0
    for place in places:
        if start + count >= len(row.tokens) or row.tokens[start + count] != tokens[place]:
            break
        count += 1
    return count


class MedusaDrafter:
    """Drafts by several heads that read the same hidden state. One pass makes all drafts, and only that state is
    kept."""

    name = "medusa"

    def __init__(
        self,
        network: MedusaNetwork,
        *,
        source: str,
        target_ids: npt.NDArray[np.int64],
        final_norm: Array,
        norm_eps: float,
    ) -> None:
        self._network, self.source, self._target_ids = network, source, target_ids
        self._final_norm, self._norm_eps = final_norm, norm_eps
        self._hidden: dict[int, Array | None] = {}
        self._num_came: dict[int, int] = {}
        """For each stream, how many tokens came since it was followed."""
        self._clock = Clock()

    def open(self, seq_id: int, request: Request, token_ids: Sequence[int]) -> None:
        self._hidden[seq_id], self._num_came[seq_id] = None, 0

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._num_came[seq_id] = len(token_ids)

    def close(self, seq_id: int) -> None:
        self._hidden.pop(seq_id, None)
        self._num_came.pop(seq_id, None)

    def begin(self, step: Step) -> None:
        """Forgets the states of streams whose tokens came in a pass that was not followed: nobody wanted drafts
        then."""
        for seq_id, count in self._num_came.items():
            if count:
                self._hidden[seq_id] = None
        self._num_came = dict.fromkeys(self._num_came, 0)

    def seconds(self, num_streams: int, num_drafts: int) -> float:
        return self._clock.expects(num_streams)

    def follow(self, done: TargetPass) -> None:
        """Keeps the hidden state that the last token of each stream was drawn from."""
        hidden = done.scores.last_hidden
        assert hidden is not None
        chunks = {chunk.seq_id for chunk in done.step.prefills}
        for seq_id, places in done.logit_rows().items():
            if places and (came := self._num_came.get(seq_id, 0)):
                place = places[-1] if seq_id in chunks else places[came - 1]
                self._hidden[seq_id], self._num_came[seq_id] = hidden[place].copy(), 0

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        known = [(index, state) for index, ask in enumerate(asks) if (state := self._hidden[ask.seq_id]) is not None]
        found = [NOTHING] * len(asks)
        if not known:
            return found
        started_s = time.perf_counter()
        normed = rms_norm(np.stack([state for _, state in known]), self._final_norm, self._norm_eps)
        scores = self._network.scores(normed, max(asks[index].most for index, _ in known))
        guesses = [list(likeliest(one, self._target_ids)) for one in scores]  # [heads][streams]
        for place, (index, _) in enumerate(known):
            own = [one[place] for one in guesses][: asks[index].most]
            found[index] = Proposal(tuple(token for token, _ in own), tuple(chance for _, chance in own))
        self._clock.took(len(known), time.perf_counter() - started_s)
        return found
