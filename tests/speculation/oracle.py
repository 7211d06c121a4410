"""A drafter that knows the answers, and spoils some of them: so drafts hold as often as a test wants."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.speculation.tiny import VOCAB_SIZE
from twostroke.core.request import Request
from twostroke.speculation.drafter import NOTHING, Ask, Proposal

Answers = Mapping[str, Sequence[Sequence[int]]]
"""Of each request, the tokens of its samples."""


@dataclass
class Oracle:
    answers: Answers
    chance: float = 0.8
    """Of each token to be left as it is."""
    seed: int = 0
    name: str = "oracle"
    _streams: dict[int, tuple[Request, list[int]]] = field(default_factory=dict)
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def open(self, seq_id: int, request: Request, token_ids: Sequence[int]) -> None:
        self._streams[seq_id] = (request, list(token_ids[len(request.prompt_token_ids) :]))

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._streams[seq_id][1].extend(token_ids)

    def close(self, seq_id: int) -> None:
        del self._streams[seq_id]

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [self._proposal(ask.seq_id, ask.most) for ask in asks]

    def _proposal(self, seq_id: int, most: int) -> Proposal:
        request, known = self._streams[seq_id]
        for answer in self.answers.get(request.request_id, ()):
            if list(answer[: len(known)]) == known:
                # What follows an answer's end is for the engine to drop.
                true = [*answer[len(known) :], *[self._rng.randrange(VOCAB_SIZE) for _ in range(most)]][:most]
                kept = [t if self._rng.random() < self.chance else self._rng.randrange(VOCAB_SIZE) for t in true]
                return Proposal(tuple(kept), (self.chance,) * len(kept))
        return NOTHING
