"""Runs the drafters of one backend. The drafters that a stream may have guess its tokens, the best guess is taken, and
of all guesses of a step those that pay are computed. A drafter that is slow to take in tokens has a pause: no stream
waits for it. Lives on the thread that runs steps, where every token is known at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from twostroke.core.grammar import ForeseeingMatcher
from twostroke.core.request import Request
from twostroke.core.speculation import DrafterState
from twostroke.core.step import DecodeSlot, DraftCosts, Drafted, Step
from twostroke.speculation.choice import drafts_that_pay
from twostroke.speculation.drafter import NOTHING, Ask, ComputingDrafter, Drafter, Proposal
from twostroke.speculation.grammar import GrammarDrafter, MatcherOf
from twostroke.speculation.guard import Guard
from twostroke.speculation.turn import NONE_AHEAD, Turn

logger = logging.getLogger("twostroke.speculation")

SLOW_SHARE = 0.5
"""A drafter that takes more than this share of a plain step between its turns holds everybody up."""
MAX_SLOW = 16
"""A drafter that was too slow for this many steps in a row has a pause."""
MAX_REST = 7
"""The most steps in which no drafter is asked for a stream whose guesses were not worth computing. Asking takes some of
the time of a small model's step."""


Proposed = Sequence[tuple[Turn, Proposal]]
"""All guesses for a stream, each with the drafter that made it."""
DraftsThatPay = Callable[[Sequence[Sequence[float]], int, DraftCosts], list[int]]
"""A function like `drafts_that_pay`."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The drafts that are computed behind a slot's own token."""

    method: str
    token_ids: tuple[int, ...]
    chances: tuple[float, ...]
    survivals: tuple[float, ...] = ()
    """For each draft, the learnt chance that it holds with all before it. Guesses at tokens in flight have no entry."""


@dataclass(slots=True)
class _Rest:
    """The steps in which no drafter is asked for a stream: how many are left, and how many there are next time."""

    left: int = 0
    next: int = 0


class Speculator:
    def __init__(self, drafters: Sequence[Drafter], vocab_size: int) -> None:
        self._turns = {drafter.name: Turn(drafter) for drafter in drafters}
        self._computing = [
            (turn, turn.drafter) for turn in self._turns.values() if isinstance(turn.drafter, ComputingDrafter)
        ]
        self._covered = {name for drafter in drafters for name in getattr(drafter, "covers", ())}
        """The names of drafters that find nothing which another does not find, too. They are asked only if a request
        names them."""
        self._guard = Guard(vocab_size)
        self._methods: dict[int, tuple[str, ...]] = {}
        """The names of the drafters of each row."""
        self._rests: dict[int, _Rest] = {}
        self._drafts: dict[int, Draft] = {}
        """The drafts of the step that is computed."""
        self._proposed: dict[int, list[tuple[Turn, Proposal]]] = {}
        """All guesses for this step."""
        self._matcher_of: MatcherOf | None = None
        self.doubts: list[str] = []
        """A sentence on each drafter that hardly ever guesses right. Nothing went wrong, but it is of no use."""

    @property
    def faults(self) -> list[str]:
        """What went wrong, a sentence each, the latest last."""
        return self._guard.faults

    def states(self) -> tuple[DrafterState, ...]:
        """Returns the state of each drafter. May be called on any thread."""
        return tuple(turn.state for turn in self._turns.values())

    def watch(self, matcher_of: MatcherOf) -> None:
        """Takes the matchers of answers with a grammar. They say which tokens are forced, and which guesses are
        forbidden."""
        self._matcher_of = matcher_of
        for turn in self._turns.values():
            if isinstance(turn.drafter, GrammarDrafter):
                turn.drafter.watch(matcher_of)

    def update(self, step: Step, done: object = None) -> None:
        """Takes in a step's leaves and joins. In between, drafters that compute are told of the model's last pass,
        `done`. They are told only now, so that no tokens wait for the preparation of drafts, and no work is done for
        rows that left."""
        self._drafts, self._proposed = {}, {}  # a step that raised may have left something
        for turn in self._turns.values():
            turn.begin_step(decodes=bool(step.decodes))
        for seq_id in step.leaves:
            self._close(seq_id)
        if done is not None:
            for turn, drafter in self._computing:
                if turn.follows:
                    self._guard.follow(turn, partial(drafter.follow, done))
        for join in step.joins:
            self._close(join.seq_id)
            self._open(join.seq_id, join.request, join.request.prompt_token_ids + join.output_token_ids)
        for turn, drafter in self._computing:
            self._guard.call(turn, partial(drafter.begin, step))

    def forget(self) -> None:
        """Drops what is known of requests that ended, for privacy."""
        for turn in self._turns.values():
            forget = getattr(turn.drafter, "forget", None)
            if forget is not None:
                self._guard.call(turn, forget)

    def _open(self, seq_id: int, request: Request, token_ids: tuple[int, ...]) -> None:
        asked = request.sampling.speculation
        if asked is not None and asked.is_off:
            return
        named = None if asked is None else asked.method
        may_draft = {GrammarDrafter.name: request.sampling.grammar is not None}
        wanted = self._turns.keys() - self._covered if named is None else {named}
        methods = tuple(
            name for name, turn in self._turns.items() if may_draft.get(name, name in wanted) and not turn.is_out
        )
        self._methods[seq_id] = methods
        self._rests[seq_id] = _Rest()
        for name in methods:
            self._turns[name].open(seq_id, request)
            self._inform(seq_id, name, lambda drafter: drafter.open(seq_id, request, token_ids))

    def _close(self, seq_id: int) -> None:
        self._rests.pop(seq_id, None)
        for name in self._methods.pop(seq_id, ()):
            turn = self._turns[name]
            turn.close(seq_id)
            self._guard.call(turn, partial(turn.drafter.close, seq_id))

    def _inform(self, seq_id: int, name: str, what: Callable[[Drafter], None]) -> None:
        """Tells a drafter something about a stream. If it fails, it no longer knows where the stream stands, and drafts
        only for others."""
        turn = self._turns[name]
        num_faults = turn.num_faults
        self._guard.call(turn, lambda: what(turn.drafter))
        if turn.num_faults > num_faults:
            self._methods[seq_id] = tuple(other for other in self._methods[seq_id] if other != name)
            turn.close(seq_id)
            self._guard.call(turn, partial(turn.drafter.close, seq_id))

    def draft(
        self, step: Step, ahead: Mapping[int, int] = NONE_AHEAD, pays: DraftsThatPay = drafts_that_pay
    ) -> Mapping[int, Draft]:
        """Returns the drafts to compute with each slot that may have some. `ahead` has, for rows whose last tokens are
        still in flight, the most that these can be. The first guesses are for their places, and become drafts only if
        fewer tokens come. `pays` decides how many drafts each slot has."""
        slots = [slot for slot in step.decodes if slot.drafts is not None and self._is_awake(slot.seq_id)]
        if not slots:
            return {}
        found = self._best(slots, len(step.decodes), step.draft_costs, ahead)
        counts = pays([chances for _, chances in found], len(step.decodes), step.draft_costs)
        for slot, (draft, survivals), count in zip(slots, found, counts, strict=True):
            rest = self._rests[slot.seq_id]
            if count:
                survivals, count = survivals[:count], count + ahead.get(slot.seq_id, 0)
                kept = draft.token_ids[:count], draft.chances[:count], tuple(survivals)
                self._drafts[slot.seq_id] = Draft(draft.method, *kept)
                rest.next = 0
            elif all(self._turns[name].may_rest for name in self._methods[slot.seq_id]):
                rest.left, rest.next = rest.next, min(MAX_REST, 2 * rest.next + 1)
        return self._drafts

    def _is_awake(self, seq_id: int) -> bool:
        methods = self._methods.get(seq_id)
        if not methods:
            return False
        rest = self._rests[seq_id]
        if not rest.left or GrammarDrafter.name in methods:  # tokens that a grammar forces must not be missed
            return True
        rest.left -= 1
        return False

    def _best(
        self, slots: list[DecodeSlot], num_slots: int, costs: DraftCosts, ahead: Mapping[int, int]
    ) -> list[tuple[Draft, list[float]]]:
        """Returns, for each slot, the guess that promises most, and the chance of each draft to hold with all before
        it."""
        best: dict[int, tuple[Draft, list[float]]] = {slot.seq_id: (Draft("", (), ()), []) for slot in slots}
        for name, turn in self._turns.items():
            wanted = [
                Ask(slot.seq_id, slot.drafts.most + ahead.get(slot.seq_id, 0))
                for slot in slots
                if slot.drafts is not None and name in self._methods[slot.seq_id]
            ]
            if not wanted or turn.is_out or self._is_held_up(turn, costs.with_drafts(0)):
                continue
            asks = turn.worthwhile(wanted, [best[ask.seq_id][1] for ask in wanted], num_slots, costs, ahead)
            proposals = self._guard.proposals(turn, asks)
            if asks and not any(one.token_ids for one in proposals):
                turn.found_nothing()
            for ask, found in zip(asks, proposals, strict=True):
                proposal = self._followed(ask.seq_id, found)
                if not proposal.token_ids:
                    turn.acceptance.missed(ask.seq_id)
                    continue
                self._proposed.setdefault(ask.seq_id, []).append((turn, proposal))
                survivals = turn.acceptance.survivals(ask.seq_id, proposal.chances)[ahead.get(ask.seq_id, 0) :]
                if sum(survivals) > sum(best[ask.seq_id][1]):
                    best[ask.seq_id] = (Draft(name, proposal.token_ids, proposal.chances), survivals)
        return [best[slot.seq_id] for slot in slots]

    def _followed(self, seq_id: int, proposal: Proposal) -> Proposal:
        """Returns the proposal without the tokens that the answer's grammar forbids, and without those behind them."""
        matcher = None if self._matcher_of is None else self._matcher_of(seq_id)
        if not proposal.token_ids or not isinstance(matcher, ForeseeingMatcher):
            return proposal
        try:
            count = matcher.num_taken(proposal.token_ids)
        except Exception:  # the library raised: no request ends because of a guess
            return NOTHING
        return Proposal(proposal.token_ids[:count], proposal.chances[:count])

    def _is_held_up(self, turn: Turn, plain_s: float) -> bool:
        """Whether its work between its turns cost too much, step after step, so that it has a pause from now on.
        Sitting turns out would not help."""
        is_slow = plain_s > 0 and turn.spent_s > SLOW_SHARE * plain_s * max(1, turn.num_steps)
        turn.spent_s, turn.num_steps = 0.0, 0
        turn.num_slow = turn.num_slow + 1 if is_slow else 0
        if turn.num_slow < MAX_SLOW:
            return False
        name = turn.drafter.name
        for seq_id, methods in self._methods.items():
            if name in methods:  # it will not be told how these go on
                self._methods[seq_id] = tuple(other for other in methods if other != name)
                turn.close(seq_id)
                self._guard.call(turn, partial(turn.drafter.close, seq_id))
        count = turn.pause()
        turn.num_faults_in_all += 1
        if not turn.is_told:
            turn.is_told = True
            self._guard.tell(f"the drafter {name} takes too long to hear of tokens: it has a pause of {count} steps")
        return True

    def take_proposed(self) -> Mapping[int, Proposed]:
        """Returns all guesses for the step that is launched, for a caller that launches others before its tokens come.
        That caller calls `learn` itself."""
        proposed, self._proposed = self._proposed, {}
        return proposed

    def learn(self, seq_id: int, proposed: Proposed, came: Sequence[int]) -> None:
        """Learns from guesses. `came` has all tokens of the row since they were made."""
        for turn, proposal in proposed:
            turn.learn(seq_id, proposal, came)
            if (doubt := turn.take_doubt()) is not None:
                self.doubts.append(doubt)
                logger.warning(doubt)

    def settle(self, seq_id: int, token_ids: Sequence[int]) -> Drafted | None:
        """Takes in the tokens that came for a row: the drafts that held, and the slot's own behind them."""
        draft = self._drafts.pop(seq_id, None)
        self.learn(seq_id, self._proposed.pop(seq_id, ()), token_ids)
        for name in self._methods.get(seq_id, ()):
            self._inform(seq_id, name, lambda drafter: drafter.extend(seq_id, token_ids))
        return None if draft is None else Drafted(draft.method, len(draft.token_ids))
