"""One drafter with what is known of it: how often it is right, how long it takes, whether it is to be asked. One that
takes real time is asked for as many tokens as pay with that time counted, and where none do it sits out, longer each
time, until a short trial. It owes what it takes meanwhile, and steps without it pay that back before the next trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from twostroke.core.request import Request
from twostroke.core.speculation import DrafterState
from twostroke.core.step import DraftCosts
from twostroke.speculation.acceptance import FIRST_RATE, Acceptance
from twostroke.speculation.choice import LEAST_GAIN, best_rate
from twostroke.speculation.draft_time import FADES, MOST_AT_ONCE, DraftTime
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
"""Of the time of steps, what a drafter that sits out may take: for its trials, and for what keeps it ready for them."""
MAX_SKIPPED = 256
"""The most steps that a slow drafter sits out, unless a trial takes so long that they must be more."""
UNASKED_STEPS = 64
"""For this many steps with decodes one that computes follows streams while nobody asks it, as there is no room for
drafts."""
FOLLOWED_OUT = 4
"""For this many while it sits out: then a short rest costs it nothing of what it knows of a stream."""
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
        self.num_faults_in_all = 0
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
        """Steps that it sits out, at least."""
        self._next_skip = 1
        self._second_trials = 0
        """That it may have before it sits out again."""
        self._is_sitting = False
        self._is_tried_again = False
        """Its trial brought no guess, and it has another at once."""
        self._owed_s = 0.0
        """What it took since it last paid, less what steps have paid back."""
        self._left_to_follow = UNASKED_STEPS
        self._follow_s: float | None = None
        """That it usually takes to follow a step."""
        self._pause = 0
        self._next_pause = FIRST_PAUSE

    @property
    def is_out(self) -> bool:
        return self._pause > 0 or self.num_faults >= MAX_FAULTS

    @property
    def state(self) -> DrafterState:
        return DrafterState(self.drafter.name, self.num_faults_in_all, self.is_out, self.is_doubted)

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

    def begin_step(self, *, decodes: bool) -> None:
        self.num_steps += 1
        self._left_to_follow -= decodes
        self._pause = max(0, self._pause - 1)

    @property
    def follows(self) -> bool:
        """Whether it is told what the model computes."""
        return self._left_to_follow >= 0 and not self.is_out

    def owe(self, seconds: float) -> None:
        """It took so long. One that pays owes nothing: its time is part of what was promised."""
        if self._is_sitting:
            self._owed_s += seconds

    def followed(self, took_s: float) -> None:
        usual_s = took_s if self._follow_s is None else self._follow_s
        took_s = min(took_s, MOST_AT_ONCE * usual_s)  # else something else held it up, or it will be seen again
        self._follow_s = FADES * usual_s + (1.0 - FADES) * took_s
        self.owe(took_s)

    def proposed(self, longest: int, took_s: float) -> None:
        """`longest`: tokens in a row. One that computes may have no guess for want of what it did not follow, which
        tells nothing of its time."""
        if longest or not (self.computes and self.time.is_known):
            self.time.observe(max(1, longest), took_s)
        self.owe(min(took_s, MOST_AT_ONCE * self.time.seconds(max(1, longest))))

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
        self._owed_s = max(0.0, self._owed_s - TRIAL_SHARE * plain_s)
        least_s = self.seconds(len(asks), 1)
        # Of one that computes, the first token's time is not all: it follows streams, and further tokens take as long.
        self.is_cheap = plain_s <= 0.0 or (
            not self.computes and self.time.is_known and least_s <= CHEAP_SHARE * plain_s
        )
        if self.is_cheap:
            return self._asked(asks)
        if not self.time.is_known and not least_s:
            return self._asked(_cut(asks, TRIAL_TOKENS, ahead))
        if self._skip or self._is_tried_again:
            return self._in_trial(_cut(asks, TRIAL_TOKENS, ahead))
        least = LEAST_GAIN * best_rate(found, num_slots, costs)
        if best := self._best_count(asks, least, num_slots, costs, ahead):
            self._next_skip = 1
            return self._asked(_cut(asks, best, ahead))
        self._skip, self._second_trials = 1 + self._next_skip, SECOND_TRIALS
        self._is_sitting, self._left_to_follow = True, min(self._left_to_follow, FOLLOWED_OUT)
        if self.source is None or self.is_doubted or not self.trust.is_open:
            self._next_skip = min(2 * self._next_skip, MAX_SKIPPED)
        return []

    def _asked(self, asks: Sequence[Ask]) -> list[Ask]:
        """As it pays."""
        self._is_sitting, self._left_to_follow = False, UNASKED_STEPS
        return list(asks)

    def _in_trial(self, asks: list[Ask]) -> list[Ask]:
        """What it is tried with, once its rest is over and it owes nothing; else nothing."""
        self._skip = max(0, self._skip - 1)
        if not self._is_tried_again and (self._skip or self._owed_s > 0.0):
            self._skip = max(1, self._skip)
            return []
        self._is_tried_again, self._skip = False, 0
        self._left_to_follow = 1  # what it is tried with next, or asked for, stands on the tokens that come now
        return asks

    def found_nothing(self) -> None:
        """It was asked, and guessed for nobody."""
        if self.computes and self._is_sitting and self._second_trials:
            self._second_trials -= 1
            self._is_tried_again = True

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
