"""Drafts that the host makes for a device that runs ahead of it. The host guesses from the last token that it knows,
and so also what steps in flight are about to say; the device takes the guesses behind its own last token. Lives on the
thread that launches steps; knows no tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from twostroke.backends.cuda.results import sampling_ids
from twostroke.backends.cuda.verify import MAX_GUESSES, NO_GUESS, UNPLACED, Guess
from twostroke.core.grammar import ForeseeingMatcher
from twostroke.core.step import DecodeSlot, Drafted, RowJoin, Step, StepResult
from twostroke.speculation.choice import drafts_of_one_width
from twostroke.speculation.grammar import MatcherOf
from twostroke.speculation.speculator import Proposed, Speculator
from twostroke.speculation.unseen import UnseenDrafts


@dataclass(slots=True)
class _Guessed:
    """For a step in flight, to learn from."""

    step_id: int
    proposed: Proposed
    came: list[int] = field(default_factory=list)  # since then


@dataclass(slots=True)
class _Stream:
    length: int  # tokens that the host knows
    in_flight: int = 0  # the most tokens that launched steps may bring
    guessed: list[_Guessed] = field(default_factory=list)  # the earliest first


class Guesser:
    def __init__(self) -> None:
        self.speculator: Speculator | None = None
        self.unseen: UnseenDrafts | None = None
        """Of whoever drafts on the device."""
        self.matcher_of: MatcherOf | None = None
        """Of a row, what watches over its answer, at the last token that the host knows."""
        self._streams: dict[int, _Stream] = {}
        self._drafted: dict[int, Drafted] = {}
        """Of the step that is being launched."""

    def update(self, step: Step) -> None:
        """A step begins: take its leaves and joins."""
        self._drafted = {}
        for seq_id in step.leaves:
            self._streams.pop(seq_id, None)
            if self.unseen is not None:
                self.unseen.close(seq_id)
        for join in step.joins:
            known = len(join.request.prompt_token_ids) + len(join.output_token_ids)
            self._streams[join.seq_id] = _Stream(known)
            if self.unseen is not None:
                self.unseen.open(join.seq_id, join.request, ())
        if self.speculator is not None:
            self.speculator.update(step)

    def take_back(self, joins: tuple[RowJoin, ...]) -> None:
        """The step was not launched: it has opened nothing."""
        self.update(Step(0, leaves=tuple(join.seq_id for join in joins)))

    def guesses(self, step: Step, widths: Sequence[int]) -> list[Guess]:
        """One for each slot of a step without chunks; empty: nothing is guessed. `widths`: queries a slot that such a
        step may have, growing."""
        if not widths:
            return []
        found = [self._told(slot, widths[-1] - 1) for slot in step.decodes]
        chances: dict[int, tuple[float, ...]] = {}
        if self.speculator is not None:
            chances = self._speculate(self.speculator, step, widths, found)
        if self.unseen is not None:
            self._ask_device(self.unseen, step, widths, found, chances)
        return found if any(guess.num_drafts for guess in found) else []

    def _may_draft(self, slot: DecodeSlot) -> bool:
        """Behind a draft a grammar must say what may come if it holds."""
        matcher = None if self.matcher_of is None else self.matcher_of(slot.seq_id)
        return matcher is None or isinstance(matcher, ForeseeingMatcher)

    def _told(self, slot: DecodeSlot, most: int) -> Guess:
        """What the step itself guesses."""
        drafts, stream = slot.drafts, self._streams[slot.seq_id]
        if drafts is None or not drafts.token_ids or not self._may_draft(slot):
            return NO_GUESS
        known = max(0, stream.length - drafts.start)
        token_ids = drafts.token_ids[known : known + MAX_GUESSES]
        return Guess(min(drafts.most, most, len(token_ids)), drafts.start + known, token_ids)

    def _speculate(
        self, speculator: Speculator, step: Step, widths: Sequence[int], found: list[Guess]
    ) -> dict[int, tuple[float, ...]]:
        """Returns the chances that its drafts hold, by sequence."""
        slots = tuple(slot if self._may_draft(slot) else slot._replace(drafts=None) for slot in step.decodes)
        ahead = {slot.seq_id: self._streams[slot.seq_id].in_flight for slot in slots}
        pays = partial(drafts_of_one_width, most=[width - 1 for width in widths])
        drafts = speculator.draft(replace(step, decodes=slots), ahead, pays)
        for seq_id, proposed in speculator.take_proposed().items():
            self._streams[seq_id].guessed.append(_Guessed(step.step_id, proposed))
        chances = {}
        for place, slot in enumerate(slots):
            if (draft := drafts.get(slot.seq_id)) is not None:
                in_time = len(draft.token_ids[:MAX_GUESSES]) - ahead[slot.seq_id]
                if in_time > 0:
                    found[place] = Guess(in_time, self._streams[slot.seq_id].length, draft.token_ids[:MAX_GUESSES])
                    self._drafted[slot.seq_id] = Drafted(draft.method, in_time)
                    chances[slot.seq_id] = draft.survivals
        return chances

    def _ask_device(
        self,
        unseen: UnseenDrafts,
        step: Step,
        widths: Sequence[int],
        found: list[Guess],
        chances: Mapping[int, tuple[float, ...]],
    ) -> None:
        """For slots that nobody found anything for, and those where it promises more than what was looked up. What the
        step itself guesses is left alone."""
        slots = [
            slot
            for slot, guess in zip(step.decodes, found, strict=True)
            if (not guess.num_drafts or slot.seq_id in chances) and self._may_draft(slot)
        ]
        numbers = [width - 1 for width in widths]
        counts = unseen.counts(slots, len(step.decodes), step.draft_costs, numbers, chances)
        for place, slot in enumerate(step.decodes):
            if count := counts.get(slot.seq_id, 0):
                found[place] = Guess(count)
                self._drafted[slot.seq_id] = Drafted(unseen.name, count)

    def launched(self, step: Step, guesses: Sequence[Guess]) -> Mapping[int, Drafted]:
        """What is in flight now; of the slots that have drafts, whose they are."""
        for place, seq_id in enumerate(sampling_ids(step)):
            count = guesses[place].num_drafts if guesses else 0
            self._streams[seq_id].in_flight += 1 + count
        return self._drafted

    def settle(self, step: Step, guesses: Sequence[Guess], result: StepResult) -> None:
        """These tokens came."""
        for place, seq_id in enumerate(sampling_ids(step)):
            stream = self._streams.get(seq_id)
            if stream is None:
                continue  # it left meanwhile
            stream.in_flight -= 1 + (guesses[place].num_drafts if guesses else 0)
            token_ids = [token.token_id for token in result.sampled.get(seq_id, ())]
            stream.length += len(token_ids)
            if token_ids and self.speculator is not None:
                self._learn(self.speculator, seq_id, stream, step.step_id, token_ids)
                self.speculator.settle(seq_id, token_ids)
            if self.unseen is not None and guesses and guesses[place].start == UNPLACED:
                self.unseen.learn(seq_id, guesses[place].num_drafts, token_ids)

    def _learn(
        self, speculator: Speculator, seq_id: int, stream: _Stream, step_id: int, token_ids: Sequence[int]
    ) -> None:
        """What was guessed for a step began with the tokens that were in flight then, so both count."""
        for guessed in stream.guessed:
            guessed.came.extend(token_ids)
        while stream.guessed and stream.guessed[0].step_id <= step_id:
            guessed = stream.guessed.pop(0)
            speculator.learn(seq_id, guessed.proposed, guessed.came)
