"""One drafter with what is known of it: how often it is right, how long it takes, whether to ask it. A drafter that
takes real time is asked for as many tokens as pay with that time counted. If none pay it sits out, longer each time,
until a short trial. What it takes meanwhile is a debt, which steps without it pay back before the next trial."""

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
"""A drafter that takes less than this share of a plain step is always asked."""
NONE_AHEAD: Mapping[int, int] = MappingProxyType({})
TRIAL_TOKENS = 2
"""How many tokens a drafter is asked for whose time nobody knows, or which has sat out."""
TRIAL_SHARE = 0.01
"""The share of the steps' time that a drafter may take while it sits out: for its trials, and for what keeps it ready
for them."""
MAX_SKIPPED = 256
"""The most steps that a slow drafter sits out, unless a trial takes so long that they must be more."""
UNASKED_STEPS = 64
"""For this many steps with decodes a drafter that computes follows streams while nobody asks it, because there is no
room for drafts."""
FOLLOWED_OUT = 4
"""For this many steps it follows streams while it sits out. After a short rest it then still knows all of a stream."""
SECOND_TRIALS = 1
"""How many trials follow at once if the first brought no guess. A drafter that computes may have fallen behind while
nobody asked, and catches up when it is asked."""
MOST_RANDOM = 1.0
"""The highest temperature at which wrong guesses count against the drafter: nobody can guess random tokens."""
FIRST_PAUSE, LONGEST_PAUSE = 256, 16_384
"""How many steps the first and the longest pause of a drafter have that is slow to take in tokens. Each pause is twice
as long as the last. Meanwhile it is told nothing."""


class Turn:
    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.acceptance = Acceptance(getattr(drafter, "first_rate", FIRST_RATE))
        self.time = DraftTime()
        self.num_faults = 0
        """How many faults it had in a row."""
        self.num_faults_in_all = 0
        self.is_told = False
        """Whether its first fault was told."""
        self.spent_s = 0.0
        """Seconds that it took since the last step that had room for drafts, without the passes of a model that
        drafts."""
        self.num_steps = 0
        """Steps since then."""
        self.source: str | None = getattr(drafter, "source", None)
        """The file that it was made from. None means that it has none, and so cannot belong to another model."""
        self.trust = Trust()
        self.is_doubted = False
        """Whether users were told that it hardly ever guesses right."""
        self._noisy: set[int] = set()
        """Streams that are too random to show whether it guesses right."""
        self.num_slow = 0
        """Steps in a row in which `spent_s` was too much."""
        self.is_cheap = True
        """Whether it was asked without counting its time."""
        self.computes = isinstance(drafter, ComputingDrafter)
        """Whether it computes. If it does, it must be asked to keep up with a stream."""
        self._skip = 0
        """The least number of steps that it still sits out."""
        self._next_skip = 1
        self._second_trials = 0
        """How many second trials it may have before it sits out again."""
        self._is_sitting = False
        self._is_tried_again = False
        """True means that its trial brought no guess, and that it has another at once."""
        self._owed_s = 0.0
        """Seconds that it took since it last paid, less what steps have paid back."""
        self._left_to_follow = UNASKED_STEPS
        self._follow_s: float | None = None
        """Seconds that it usually takes to follow a step."""
        self._pause = 0
        self._next_pause = FIRST_PAUSE

    @property
    def is_out(self) -> bool:
        return self._pause > 0 or self.num_faults >= MAX_FAULTS

    @property
    def state(self) -> DrafterState:
        return DrafterState(self.drafter.name, self.num_faults_in_all, self.is_out, self.is_doubted)

    def pause(self) -> int:
        """Begins a pause, since whatever held it up may pass. Returns the steps until it is asked again, for streams
        that begin then."""
        self._pause, self.num_slow = self._next_pause, 0
        self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        return self._pause

    def open(self, seq_id: int, request: Request) -> None:
        """Notes that it drafts for this stream."""
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
        """Notes that it took so long. A drafter that pays owes nothing: its time was counted when it was asked."""
        if self._is_sitting:
            self._owed_s += seconds

    def followed(self, took_s: float) -> None:
        usual_s = took_s if self._follow_s is None else self._follow_s
        took_s = min(took_s, MOST_AT_ONCE * usual_s)  # if more, something else held it up, or it will be seen again
        self._follow_s = FADES * usual_s + (1.0 - FADES) * took_s
        self.owe(took_s)

    def proposed(self, longest: int, took_s: float) -> None:
        """Notes how long its proposals took. `longest` is the number of tokens of the longest one. A drafter that
        computes may have no guess because it lacks steps that it did not follow, which says nothing of its time."""
        if longest or not (self.computes and self.time.is_known):
            self.time.observe(max(1, longest), took_s)
        self.owe(min(took_s, MOST_AT_ONCE * self.time.seconds(max(1, longest))))

    @property
    def may_rest(self) -> bool:
        """Whether a stream that it found nothing for may rest from it for some steps. Other drafters sit out by
        themselves."""
        return self.is_cheap and not self.computes

    def seconds(self, num_streams: int, num_tokens: int) -> float:
        """Returns the predicted seconds of its proposals, as measured, or else as it says itself."""
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
        """Returns what to ask it for: all, fewer tokens of each, or nothing. `found` has, for each ask, the chances of
        the best drafts that others made. `ahead` says how many of a stream's first tokens are no drafts."""
        if not asks or self.is_out:
            return []
        plain_s = costs.with_drafts(0)
        self._owed_s = max(0.0, self._owed_s - TRIAL_SHARE * plain_s)
        least_s = self.seconds(len(asks), 1)
        # One token's time is not all that such a drafter takes: it follows streams, and further tokens take as long.
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
        """Asks it because that pays."""
        self._is_sitting, self._left_to_follow = False, UNASKED_STEPS
        return list(asks)

    def _in_trial(self, asks: list[Ask]) -> list[Ask]:
        """Returns what to try it with, once its rest is over and it owes nothing. Until then returns nothing."""
        self._skip = max(0, self._skip - 1)
        if not self._is_tried_again and (self._skip or self._owed_s > 0.0):
            self._skip = max(1, self._skip)
            return []
        self._is_tried_again, self._skip = False, 0
        self._left_to_follow = 1  # its next guess builds on the tokens that come now
        return asks

    def found_nothing(self) -> None:
        """Notes that it was asked, and guessed for nobody."""
        if self.computes and self._is_sitting and self._second_trials:
            self._second_trials -= 1
            self._is_tried_again = True

    def take_doubt(self) -> str | None:
        """Returns what to tell users of a drafter that hardly ever guesses right, once."""
        if self.source is None or self.is_doubted:
            return None
        doubt = self.trust.doubt(self.source)
        self.is_doubted = doubt is not None
        return doubt

    def learn(self, seq_id: int, proposal: Proposal, came: Sequence[int]) -> None:
        """Learns from all that was guessed, computed or not. So a drafter that sits out can return without computed
        drafts."""
        self.acceptance.learn(seq_id, *proposal, came)
        is_right = proposal.token_ids[:1] == tuple(came[:1])
        if proposal.token_ids and came and seq_id not in self._noisy:
            self.trust.learn(is_right)
        if is_right:
            self._next_skip = 1  # if it sits out, the next trial comes soon

    def _best_count(
        self, asks: Sequence[Ask], rate: float, num_slots: int, costs: DraftCosts, ahead: Mapping[int, int]
    ) -> int:
        """Returns the number of tokens for each stream that promises most, by what it usually brings and with its own
        time counted. 0 means that none promises more than `rate`. Deciding must cost little beside asking, so streams
        are added up."""
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
