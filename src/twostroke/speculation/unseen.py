"""Decides how many drafts a device makes for itself. The host never sees these drafts, only how many of them held. So
it asks for as many as usually pay, by what each stream's held before, and counts the time that making them takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from twostroke.core.request import Request
from twostroke.core.speculation import DrafterState
from twostroke.core.step import DecodeSlot, DraftCosts
from twostroke.speculation.drafter import NOTHING, Ask, Proposal
from twostroke.speculation.turn import Turn

logger = logging.getLogger("twostroke.speculation")
NO_TOKEN = -1
ANY_NUMBER = 1 << 30
NOTHING_FOUND: Mapping[int, Sequence[float]] = MappingProxyType({})


class UnseenDrafts:
    """What is known of one drafter on a device. It is told of rows as drafters are, and lives on the thread that
    launches steps."""

    def __init__(
        self,
        name: str,
        source: str,
        seconds: Callable[[int, int], float],
        most: int = ANY_NUMBER,
        max_context: int = ANY_NUMBER,
    ) -> None:
        """`seconds` predicts the seconds of drafts by the number of streams and of drafts each; 0 means that nobody
        knows. `most` is the most drafts of a stream. Streams longer than `max_context` have none."""
        self.name, self.source, self.seconds = name, source, seconds
        self._most, self._max_context = most, max_context
        self._turn = Turn(self)
        self._streams: set[int] = set()
        self.doubt: str | None = None
        """The sentence that was told if its drafts never hold."""
        self.fault: str | None = None
        """The sentence that says what went wrong. Since then it is asked no more."""

    @property
    def state(self) -> DrafterState:
        return DrafterState(self.name, int(self.fault is not None), self.fault is not None, self.doubt is not None)

    def open(self, seq_id: int, request: Request, token_ids: Sequence[int]) -> None:
        asked = request.sampling.speculation
        if asked is None or (not asked.is_off and asked.method in (None, self.name)):
            self._streams.add(seq_id)
            self._turn.open(seq_id, request)

    def close(self, seq_id: int) -> None:
        self._streams.discard(seq_id)
        self._turn.close(seq_id)

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Does nothing: the device knows the tokens."""

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """Returns nothing for each ask, since the host knows no drafts."""
        return [NOTHING] * len(asks)

    def give_up(self, error: Exception) -> None:
        """Notes that the device could not draft, so that nobody asks it again."""
        self.fault = f"the drafter {self.name} failed and is asked no more: {type(error).__name__}: {error!s:.80}"
        logger.warning(self.fault)

    def counts(
        self,
        slots: Sequence[DecodeSlot],
        num_slots: int,
        costs: DraftCosts,
        numbers: Sequence[int],
        found: Mapping[int, Sequence[float]] = NOTHING_FOUND,
    ) -> dict[int, int]:
        """Returns, for these slots, how many drafts to make and to verify: one of `numbers`, which grow, or the slot's
        own limit below that. `num_slots` counts the slots of the whole step. `found` has the chances of drafts that the
        host found for some streams. These are taken if they promise as many tokens, since nobody has to make them."""
        asks = [
            Ask(slot.seq_id, most)
            for slot in slots
            if slot.drafts is not None
            and self.fault is None
            and slot.seq_id in self._streams
            and slot.position < self._max_context
            and self._promises_more(slot.seq_id, most := min(slot.drafts.most, numbers[-1], self._most), found)
        ]
        asks = self._turn.worthwhile(asks, [found.get(ask.seq_id, ()) for ask in asks], num_slots, costs)
        if not asks:
            return {}
        # The time of a step is that of its widest slot, and there are few widths: up to the next, drafts are free.
        best = max(ask.most for ask in asks)
        room = next(number for number in numbers if number >= best)
        wanted = {slot.seq_id: slot.drafts.most for slot in slots if slot.drafts is not None}
        made = {ask.seq_id: min(room, self._most, wanted[ask.seq_id]) for ask in asks}
        counts = {seq_id: count for seq_id, count in made.items() if self._promises_more(seq_id, count, found)}
        if counts:  # drafts of a trial are verified, too
            verified_s = costs.with_drafts(num_slots * max(counts.values())) - costs.with_drafts(0)
            self._turn.owe(self.seconds(len(counts), max(counts.values())) + verified_s)
        return counts

    def _promises_more(self, seq_id: int, count: int, found: Mapping[int, Sequence[float]]) -> bool:
        """Whether this number of drafts usually bring more tokens than those that the host found promise."""
        if not (chances := found.get(seq_id)):
            return True
        return sum(self._turn.acceptance.usual_survivals(seq_id, count)) > sum(chances)

    def learn(self, seq_id: int, num_drafts: int, came: Sequence[int]) -> None:
        """Notes that this number of drafts were verified, and which tokens came: the drafts that held, and one behind
        them."""
        if not came or not num_drafts:
            return
        num_held = min(len(came) - 1, num_drafts)
        guesses = (*came[:num_held], NO_TOKEN)[:num_drafts]
        self._turn.learn(seq_id, Proposal(guesses, (1.0,) * len(guesses)), came)
        if (doubt := self._turn.take_doubt()) is not None:
            self.doubt = doubt
            logger.warning(doubt)
