"""Calls drafters, so that whatever one does, nobody else notices. A drafter that raises or returns something invalid
loses its turn, and in time all turns. Knows nothing of streams or of what pays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from twostroke.speculation.drafter import NOTHING, Ask, Proposal
from twostroke.speculation.turn import MAX_FAULTS, Turn

logger = logging.getLogger("twostroke.speculation")


class Guard:
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.faults: list[str] = []
        """What went wrong, a sentence each, the latest last: the first fault of each drafter, and that it is asked no
        more."""

    def call(self, turn: Turn, act: Callable[[], object]) -> object:
        """Returns what `act` returns, or None if it raised."""
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

    def follow(self, turn: Turn, act: Callable[[], object]) -> None:
        """Tells a drafter of a pass, and counts the time apart from its other work between turns: reading along with a
        prompt takes as long as the prompt does."""
        spent_s = turn.spent_s
        self.call(turn, act)
        turn.followed(turn.spent_s - spent_s)
        turn.spent_s = spent_s

    def proposals(self, turn: Turn, asks: list[Ask]) -> list[Proposal]:
        """Returns one proposal for each ask. An invalid one counts as none."""
        nothing = [NOTHING] * len(asks)
        if not asks:
            return nothing
        num_faults = turn.num_faults
        found = self.call(turn, partial(turn.drafter.propose, asks))
        took_s, turn.spent_s = turn.spent_s, 0.0
        if not isinstance(found, list) or len(found) != len(asks):
            turn.proposed(max(ask.most for ask in asks), took_s)
            if turn.num_faults == num_faults:  # else it raised, which was told already
                self._fault(turn, "returned no proposal for each stream")
            return nothing
        sound = [self._sound(turn, ask, proposal) for ask, proposal in zip(asks, found, strict=True)]
        if None not in sound:
            turn.num_faults = 0
        kept = [proposal or NOTHING for proposal in sound]
        turn.proposed(max(len(proposal.token_ids) for proposal in kept), took_s)
        return kept

    def tell(self, fault: str) -> None:
        self.faults.append(fault)
        logger.warning(fault)

    def _fault(self, turn: Turn, what: str) -> None:
        turn.num_faults += 1
        turn.num_faults_in_all += 1
        if not turn.is_told:
            turn.is_told = True
            self.tell(f"the drafter {turn.drafter.name} {what}")
        if turn.num_faults == MAX_FAULTS:
            self.tell(f"the drafter {turn.drafter.name} is asked no more")

    def _sound(self, turn: Turn, ask: Ask, proposal: object) -> Proposal | None:
        """Returns the proposal, cut to what was asked for. None means that it is invalid."""
        try:
            said: Any = proposal
            token_ids, chances = tuple(said[0][: ask.most]), tuple(map(float, said[1][: ask.most]))
            if len(token_ids) == len(chances) and all(
                isinstance(token, int) and 0 <= token < self._vocab_size and 0.0 <= chance <= 1.0
                for token, chance in zip(token_ids, chances, strict=True)
            ):
                return Proposal(token_ids, chances)
        except Exception:  # looking at an invalid value may raise anything
            pass
        self._fault(turn, f"returned what are no tokens: {_shown(proposal)}")
        return None


def _shown(value: object) -> str:
    """Returns a few words on a value of any kind."""
    try:
        return f"{value!s:.80}"
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"
