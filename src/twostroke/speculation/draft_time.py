"""How long a drafter takes for its proposals, learnt from those it made. One part is for being asked, the other for
each token in a row. Old experience fades, and the first time counts for little: much is prepared then."""

from __future__ import annotations

FADES = 0.8
FIRST_WEIGHT = 0.05
KNOWN_AFTER = 2
MOST_AT_ONCE = 4.0
"""A proposal that took longer than this many times the prediction counts as that long. Something else held it up, or it
will be seen again."""


class DraftTime:
    def __init__(self) -> None:
        self._num_seen = 0
        self._weight = self._tokens = self._squares = self._seconds = self._products = 0.0

    @property
    def is_known(self) -> bool:
        return self._num_seen >= KNOWN_AFTER

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Notes the seconds of one proposal. `num_tokens` is the length of the longest one."""
        weight = 1.0 if self._num_seen else FIRST_WEIGHT
        if self.is_known:
            seconds = min(seconds, MOST_AT_ONCE * self.seconds(num_tokens))
        self._num_seen += 1
        self._weight = FADES * self._weight + weight
        self._tokens = FADES * self._tokens + weight * num_tokens
        self._squares = FADES * self._squares + weight * num_tokens * num_tokens
        self._seconds = FADES * self._seconds + weight * seconds
        self._products = FADES * self._products + weight * num_tokens * seconds

    def seconds(self, num_tokens: int) -> float:
        """Returns the predicted seconds for that many tokens in a row. They lie on the line through what was seen,
        which neither falls nor begins below 0. If all proposals were equally long, each token took an equal share."""
        if not self._weight:
            return 0.0
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - tokens * tokens
        a_token_s = seconds / tokens if tokens else 0.0
        if spread > 1e-3:
            slope = (self._products / self._weight - tokens * seconds) / spread
            a_token_s = min(max(slope, 0.0), a_token_s)
        return max(0.0, seconds + a_token_s * (num_tokens - tokens))
