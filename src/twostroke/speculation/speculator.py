"""The drafters of one backend at work: each stream is drafted for by those it may have, the best guess is taken, and of
all guesses of a step those that pay are computed. One that raises, returns rubbish or is slow loses its turn, and
in time all turns; no stream does. Lives on the thread that runs steps, where every token is known at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from twostroke.core.grammar import ForeseeingMatcher
from twostroke.core.request import Request
from twostroke.core.step import DecodeSlot, Drafted, Step
from twostroke.speculation.acceptance import Acceptance
from twostroke.speculation.choice import drafts_that_pay
from twostroke.speculation.drafter import NOTHING, Ask, ComputingDrafter, Drafter, Proposal
from twostroke.speculation.grammar import GrammarDrafter, MatcherOf

logger = logging.getLogger("twostroke.speculation")

MAX_FAULTS = 3
"""A drafter that raised this often in a row is asked no more."""
SLOW_SHARE = 0.5
"""Drafts that took longer to make than this share of a plain step were slow, unless they brought more than that."""
MAX_SLOW = 16
"""A drafter that held this many steps in a row up, beside its turns, is asked no more."""
MAX_SKIPPED = 256
"""The most steps that a slow drafter sits out."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What is computed behind a slot's own token."""

    method: str
    token_ids: tuple[int, ...]
    chances: tuple[float, ...]


@dataclass(slots=True)
class _Turn:
    """A drafter with what is known of it."""

    drafter: Drafter
    acceptance: Acceptance = field(default_factory=Acceptance)
    num_faults: int = 0
    """In a row."""
    is_told: bool = False
    spent_s: float = 0.0
    """Since the last step that had room for drafts, beside passes of a model that drafts."""
    num_slow: int = 0
    """Steps in a row in which that was too much."""
    skip: int = 0
    """Steps that it sits out."""
    next_skip: int = 1
    is_doubted: bool = False
    """Whether it was said that it hardly ever guesses right."""

    @property
    def is_out(self) -> bool:
        return self.num_faults >= MAX_FAULTS


class Speculator:
    def __init__(self, drafters: Sequence[Drafter], vocab_size: int) -> None:
        self._turns = {drafter.name: _Turn(drafter) for drafter in drafters}
        self._computing = [
            (turn, turn.drafter) for turn in self._turns.values() if isinstance(turn.drafter, ComputingDrafter)
        ]
        self._vocab_size = vocab_size
        self._methods: dict[int, tuple[str, ...]] = {}
        """Of each row, who drafts for it."""
        self._drafts: dict[int, Draft] = {}
        """Of the step that is computed."""
        self._matcher_of: MatcherOf | None = None
        self.faults: list[str] = []
        """What went wrong, a sentence each, the latest last: of each drafter its first fault, and that it is asked no
        more."""

    def watch(self, matcher_of: MatcherOf) -> None:
        """Grammars say what is forced, and what is drafted in vain."""
        self._matcher_of = matcher_of
        for turn in self._turns.values():
            if isinstance(turn.drafter, GrammarDrafter):
                turn.drafter.watch(matcher_of)

    def update(self, step: Step, done: object = None) -> None:
        """Take a step's leaves and joins; in between, tell those that compute of the last pass of the model, `done`.
        Only now: nobody's tokens wait for what drafts are made from, and for rows that left nothing is made."""
        for seq_id in step.leaves:
            self._close(seq_id)
        if done is not None:
            self._follow(done)
        for join in step.joins:
            self._close(join.seq_id)
            self._open(join.seq_id, join.request, join.request.prompt_token_ids + join.output_token_ids)
        for turn, drafter in self._computing:
            self._guarded(turn, partial(drafter.begin, step))

    def _follow(self, done: object) -> None:
        for turn, drafter in self._computing:
            spent_s = turn.spent_s
            self._guarded(turn, partial(drafter.follow, done))
            turn.spent_s = spent_s  # a prompt that is read along takes as long as it takes
            doubt = getattr(drafter, "doubt", None)
            if doubt is not None and not turn.is_doubted:
                turn.is_doubted = True
                self.faults.append(doubt)

    def _open(self, seq_id: int, request: Request, token_ids: tuple[int, ...]) -> None:
        asked = request.sampling.speculation
        if asked is not None and asked.is_off:
            return
        named = None if asked is None else asked.method
        may_draft = {GrammarDrafter.name: request.sampling.grammar is not None}
        methods = tuple(name for name in self._turns if may_draft.get(name, named is None or name == named))
        self._methods[seq_id] = methods
        for name in methods:
            turn = self._turns[name]
            turn.acceptance.open(seq_id)
            self._guarded(turn, partial(turn.drafter.open, seq_id, request, token_ids))

    def _close(self, seq_id: int) -> None:
        for name in self._methods.pop(seq_id, ()):
            turn = self._turns[name]
            turn.acceptance.close(seq_id)
            self._guarded(turn, partial(turn.drafter.close, seq_id))

    def _guarded(self, turn: _Turn, act: Callable[[], object]) -> object:
        """What it returns; None where it raised."""
        if turn.is_out:
            return None
        began_s = time.perf_counter()
        try:
            return act()
        except Exception as error:
            self._fault(turn, f"failed: {type(error).__name__}: {_shown(error)}")
            return None
        finally:
            turn.spent_s += time.perf_counter() - began_s

    def _fault(self, turn: _Turn, what: str) -> None:
        turn.num_faults += 1
        if not turn.is_told:
            turn.is_told = True
            self._tell(f"the drafter {turn.drafter.name} {what}")
        if turn.num_faults == MAX_FAULTS:
            self._tell(f"the drafter {turn.drafter.name} is asked no more")

    def _tell(self, fault: str) -> None:
        self.faults.append(fault)
        logger.warning(fault)

    def draft(self, step: Step) -> Mapping[int, Draft]:
        """Of each slot that may have some, the drafts to compute with it."""
        slots = [slot for slot in step.decodes if slot.drafts is not None and self._methods.get(slot.seq_id)]
        self._drafts = {}
        if not slots:
            return self._drafts
        found = self._best(slots, step.draft_costs.with_drafts(0))
        counts = drafts_that_pay([chances for _, chances in found], len(step.decodes), step.draft_costs)
        for slot, (draft, _), count in zip(slots, found, counts, strict=True):
            if count:
                self._drafts[slot.seq_id] = Draft(draft.method, draft.token_ids[:count], draft.chances[:count])
            else:
                for name in self._methods[slot.seq_id]:
                    self._turns[name].acceptance.rest(slot.seq_id)
        return self._drafts

    def _best(self, slots: list[DecodeSlot], plain_s: float) -> list[tuple[Draft, list[float]]]:
        """Of each slot the guess that promises most, and the chance of each draft to hold with all before it."""
        best: dict[int, tuple[Draft, list[float]]] = {slot.seq_id: (Draft("", (), ()), []) for slot in slots}
        for name, turn in self._turns.items():
            asks = [
                Ask(slot.seq_id, slot.drafts.most)
                for slot in slots
                if slot.drafts is not None and name in self._methods[slot.seq_id]
            ]
            for ask, proposal in zip(asks, self._proposals(turn, asks, plain_s), strict=True):
                proposal = self._followed(ask.seq_id, proposal)
                survivals = turn.acceptance.survivals(ask.seq_id, proposal.chances)
                if sum(survivals) > sum(best[ask.seq_id][1]):
                    best[ask.seq_id] = (Draft(name, proposal.token_ids, proposal.chances), survivals)
        return [best[slot.seq_id] for slot in slots]

    def _followed(self, seq_id: int, proposal: Proposal) -> Proposal:
        """Without what the grammar of the answer forbids, and what stands behind it."""
        matcher = None if self._matcher_of is None else self._matcher_of(seq_id)
        if not proposal.token_ids or not isinstance(matcher, ForeseeingMatcher):
            return proposal
        count = matcher.num_taken(proposal.token_ids)
        return Proposal(proposal.token_ids[:count], proposal.chances[:count])

    def _proposals(self, turn: _Turn, asks: list[Ask], plain_s: float) -> list[Proposal]:
        nothing = [NOTHING] * len(asks)
        if not asks or turn.is_out or self._is_held_up(turn, plain_s):
            return nothing
        if turn.skip:
            turn.skip -= 1
            return nothing
        num_faults = turn.num_faults
        found = self._guarded(turn, partial(turn.drafter.propose, asks))
        took_s, turn.spent_s = turn.spent_s, 0.0
        if plain_s > 0 and took_s > SLOW_SHARE * plain_s:
            turn.skip = turn.next_skip
            turn.next_skip = min(2 * turn.next_skip, MAX_SKIPPED)
        else:
            turn.next_skip = 1
        if not isinstance(found, list) or len(found) != len(asks):
            if turn.num_faults == num_faults:  # else it raised, which is told
                self._fault(turn, "returned no proposal for each stream")
            return nothing
        sound = [self._sound(turn, ask, proposal) for ask, proposal in zip(asks, found, strict=True)]
        if None not in sound:
            turn.num_faults = 0
        return [proposal or NOTHING for proposal in sound]

    def _is_held_up(self, turn: _Turn, plain_s: float) -> bool:
        """Whether what it does between its turns cost too much, step after step: sitting turns out would not help."""
        is_slow = plain_s > 0 and turn.spent_s > SLOW_SHARE * plain_s
        turn.spent_s = 0.0
        turn.num_slow = turn.num_slow + 1 if is_slow else 0
        if turn.num_slow < MAX_SLOW:
            return False
        turn.num_faults = MAX_FAULTS - 1
        self._fault(turn, "takes too long to hear of tokens")
        return True

    def _sound(self, turn: _Turn, ask: Ask, proposal: object) -> Proposal | None:
        """Cut to what was asked for; None: it is rubbish."""
        try:
            said: Any = proposal
            token_ids, chances = tuple(said[0][: ask.most]), tuple(map(float, said[1][: ask.most]))
            if len(token_ids) == len(chances) and all(
                isinstance(token, int) and 0 <= token < self._vocab_size and 0.0 <= chance <= 1.0
                for token, chance in zip(token_ids, chances, strict=True)
            ):
                return Proposal(token_ids, chances)
        except Exception:  # whatever looking at rubbish can bring about
            pass
        self._fault(turn, f"returned what are no tokens: {_shown(proposal)}")
        return None

    def settle(self, seq_id: int, token_ids: Sequence[int]) -> Drafted | None:
        """These tokens came for a row: the drafts that held, and the slot's own behind them."""
        draft = self._drafts.pop(seq_id, None)
        for name in self._methods.get(seq_id, ()):
            turn = self._turns[name]
            self._guarded(turn, partial(turn.drafter.extend, seq_id, token_ids))
        if draft is None:
            return None
        num_held = len(token_ids) - 1
        if draft.token_ids[num_held : num_held + 1] == tuple(token_ids[-1:]):
            num_held += 1  # it ended the answer: nothing behind it was looked at
        self._turns[draft.method].acceptance.learn(seq_id, draft.chances, num_held)
        return Drafted(draft.method, len(draft.token_ids))


def _shown(value: object) -> str:
    """Of something that may be anything, a few words."""
    try:
        return f"{value!s:.80}"
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"
