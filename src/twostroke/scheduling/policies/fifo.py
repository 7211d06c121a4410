"""Requests in order of arrival, shifted by priority. A prompt once begun is read to its end, in chunks as large as the
step's token budget. What users were promised is not looked at: this is what the others are compared with."""

from __future__ import annotations

from math import inf

from twostroke.core.sequence import Sequence
from twostroke.scheduling.policies.policy import Policy
from twostroke.scheduling.queue import Rank, rank_from


class Fifo(Policy):
    name = "fifo"
    paces = False
    calls_take_turns = False

    def rank(self, sequence: Sequence, since_s: float = -inf) -> Rank:
        return rank_from(sequence, sequence.request.arrival_s, self._aging_s)
