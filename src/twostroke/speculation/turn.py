"""One drafter with what is known of it: how often it is right, how long it takes, whether it is to be asked. One that
takes real time is asked for as many tokens as pay with that time counted, and where none do it sits out, longer each
time, until a short trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from twostroke.core.request import Request
from twostroke.core.step import DraftCosts
from twostroke.speculation.acceptance import FIRST_RATE, Acceptance
from twostroke.speculation.choice import LEAST_GAIN, best_rate
from twostroke.speculation.draft_time import DraftTime
from twostroke.speculation.drafter import Ask, ComputingDrafter, Drafter, Proposal
from twostroke.speculation.trust import Trust

MAX_FAULTS = 3
"""A drafter that raised this often in a row is asked no more."""
CHEAP_SHARE = 0.02
"""Of a plain step: a drafter that takes less is asked without a thought."""
NONE_AHEAD: Mapping[int, int] = MappingProxyType({})
TRIAL_TOKENS = 2
"""That one is asked for whose time nobody knows, or which has sat out."""
TRIAL_SHARE = 0.01
"""Of all time, the most that trials may take."""
MAX_SKIPPED = 256
"""The most steps that a slow drafter sits out, unless a trial takes so long that they must be more."""
SECOND_TRIALS = 1
"""Trials that follow at once where nobody got a guess: one that computes may have fallen behind while nobody asked, and
goes on from there when it is asked."""
MOST_RANDOM = 1.0
"""The highest temperature at which wrong guesses tell of the drafter: nobody guesses noise."""
FIRST_PAUSE, LONGEST_PAUSE = 256, 16_384
"""Steps in which one that is slow to hear of tokens hears of nothing: twice as many each time."""


class Turn:
    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.acceptance = Acceptance(getattr(drafter, "first_rate", FIRST_RATE))
        self.time = DraftTime()
        self.num_faults = 0
        """In a row."""
        self.is_told = False
        """Whether its first fault was told."""
        self.spent_s = 0.0
        """Since the last step that had room for drafts, beside passes of a model that drafts."""
        self.num_steps = 0
        """Since then."""
        self.source: str | None = getattr(drafter, "source", None)
        """The file that it was made from; None: it has none, and cannot be another model's."""
        self.trust = Trust()
        self.is_doubted = False
        """Whether it was said that it hardly ever guesses right."""
        self._noisy: set[int] = set()
        """Streams that tell nothing of that."""
        self.num_slow = 0
        """Steps in a row in which that was too much."""
        self.is_cheap = True
        """Whether it was asked without a thought."""
        self.computes = isinstance(drafter, ComputingDrafter)
        """Then it must be asked to keep up with a stream."""
        self._skip = 0
        """Steps that it sits out."""
        self._next_skip = 1
        self._second_trials = 0
        """That it may have before it sits out again."""
        self._pause = 0
        self._next_pause = FIRST_PAUSE

    @property
    def is_out(self) -> bool:
        return self._pause > 0 or self.num_faults >= MAX_FAULTS

    def pause(self) -> int:
        """Whatever held it up may pass: the steps until it is asked again, for streams that begin then."""
        self._pause, self.num_slow = self._next_pause, 0
        self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        return self._pause

    def open(self, seq_id: int, request: Request) -> None:
        """It drafts for this stream."""
        self.acceptance.open(seq_id)
        if request.sampling.temperature > MOST_RANDOM:
            self._noisy.add(seq_id)

    def close(self, seq_id: int) -> None:
        self.acceptance.close(seq_id)
        self._noisy.discard(seq_id)

    def begin_step(self) -> None:
        self.num_steps += 1
        self._pause = max(0, self._pause - 1)

    @property
    def may_rest(self) -> bool:
        """Whether a stream that it found nothing for may go without it: others sit out by themselves."""
        return self.is_cheap and not self.computes

    def seconds(self, num_streams: int, num_tokens: int) -> float:
        """What it should take: as measured, or by its own word."""
        if self.time.is_known:
            return self.time.seconds(num_tokens)
        said = getattr(self.drafter, "seconds", None)
        return 0.0 if said is None else float(said(num_streams, num_tokens))

    def worthwhile(
        self,
        asks: Sequence[Ask],
        found: Sequence[Sequence[float]],
        num_slots: int,
        costs: DraftCosts,
        ahead: Mapping[int, int] = NONE_AHEAD,
    ) -> list[Ask]:
        """Of these, what it is to be asked for: all, fewer tokens of each, or nothing. `found`: of each, the chances of
        the best drafts that others made. `ahead`: of a stream's tokens, how many, the first, are no drafts."""
        if not asks or self.is_out:
            return []
        plain_s = costs.with_drafts(0)
        least_s = self.seconds(len(asks), 1)
        self.is_cheap = plain_s <= 0.0 or (self.time.is_known and least_s <= CHEAP_SHARE * plain_s)
        if self.is_cheap:
            return list(asks)
        if not self.time.is_known and not least_s:
            return _cut(asks, TRIAL_TOKENS, ahead)
        if self._skip:
            self._skip -= 1
            return [] if self._skip else _cut(asks, TRIAL_TOKENS, ahead)
        least = LEAST_GAIN * best_rate(found, num_slots, costs)
        if best := self._best_count(asks, least, num_slots, costs, ahead):
            self._next_skip = 1
            return _cut(asks, best, ahead)
        trial_steps = int(self.seconds(len(asks), TRIAL_TOKENS) / (TRIAL_SHARE * plain_s))
        self._skip, self._second_trials = 1 + max(self._next_skip, trial_steps), SECOND_TRIALS
        if self.source is None or self.is_doubted or not self.trust.is_open:
            self._next_skip = min(2 * self._next_skip, MAX_SKIPPED)
        return []

    def found_nothing(self) -> None:
        """It was asked, and guessed for nobody."""
        if self.computes and self._second_trials:
            self._second_trials -= 1
            self._skip = 1

    def take_doubt(self) -> str | None:
        """What is to be said of one that hardly ever guesses right, once."""
        if self.source is None or self.is_doubted:
            return None
        doubt = self.trust.doubt(self.source)
        self.is_doubted = doubt is not None
        return doubt

    def learn(self, seq_id: int, proposal: Proposal, came: Sequence[int]) -> None:
        """What came tells of all that was guessed, computed or not: one that failed needs no drafts to return."""
        self.acceptance.learn(seq_id, *proposal, came)
        is_right = proposal.token_ids[:1] == tuple(came[:1])
        if proposal.token_ids and came and seq_id not in self._noisy:
            self.trust.learn(is_right)
        if is_right:
            self._next_skip = 1  # if it sits out, the next trial comes soon

    def _best_count(
        self, asks: Sequence[Ask], rate: float, num_slots: int, costs: DraftCosts, ahead: Mapping[int, int]
    ) -> int:
        """The number of tokens for each stream that promises most, by what it usually brings and with its own time
        counted; 0: none promises more than `rate`. Deciding must cost little beside asking, so streams are added up."""
        usual = [self.acceptance.usual_survivals(ask.seq_id, ask.most)[ahead.get(ask.seq_id, 0) :] for ask in asks]
        best, expected, num_drafts = 0, float(num_slots), 0
        for count in range(1, max(map(len, usual)) + 1):
            chances = [survivals[count - 1] for survivals in usual if len(survivals) >= count]
            expected += sum(chances)
            num_drafts += len(chances)
            promised = expected / (costs.with_drafts(num_drafts) + self.seconds(len(asks), count))
            if promised > rate:
                best, rate = count, promised
        return best


def _cut(asks: Sequence[Ask], most: int, ahead: Mapping[int, int]) -> list[Ask]:
    return [Ask(ask.seq_id, min(ahead.get(ask.seq_id, 0) + most, ask.most)) for ask in asks]
