"""Prompt and output lookup: where the last few tokens of a stream stood before in the same stream, what followed them
is the guess. Knows one stream at a time; an edit of a text that the prompt holds is where it shines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.core.request import Request
from twostroke.speculation.drafter import NOTHING, Ask, Proposal

LENGTHS = (8, 5, 3)
"""Of the last tokens, how many must have stood there before: the longest is tried first."""
CHANCES = (0.9, 0.8, 0.5)
"""What a guess found by each is worth at first; what comes of them is learnt."""
TOKENS_A_TURN = 4096
"""A long prompt is looked at in pieces, so that no step waits for it."""


@dataclass(slots=True)
class _Stream:
    tokens: list[int]
    num_indexed: int = 0
    """Of the tokens, how many have ended an n-gram that is in the index."""
    index: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Where the latest of each n-gram ended: the token there follows it."""


class NgramDrafter:
    name = "ngram"

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}

    def open(self, seq_id: int, request: Request, token_ids: Sequence[int]) -> None:
        self._streams[seq_id] = _Stream(list(token_ids))

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._streams[seq_id].tokens += token_ids

    def close(self, seq_id: int) -> None:
        self._streams.pop(seq_id, None)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [self._proposal(self._streams[seq_id], most) for seq_id, most in asks]

    def _proposal(self, stream: _Stream, most: int) -> Proposal:
        tokens, end = stream.tokens, len(stream.tokens)
        self._look(stream, min(end, stream.num_indexed + TOKENS_A_TURN))
        if stream.num_indexed < end - 1:
            return NOTHING  # the rest of a long prompt is looked at in the next turns
        for length, chance in zip(LENGTHS, CHANCES, strict=True):
            found = stream.index.get(tuple(tokens[end - length :])) if end >= length else None
            if found is not None:
                guess = tuple(tokens[found : found + most])
                # A repetition goes on: what follows the end of what is known is its own beginning.
                while 0 < len(guess) < most:
                    guess += guess[: most - len(guess)]
                return Proposal(guess, (chance,) * len(guess))
        return NOTHING

    def _look(self, stream: _Stream, end: int) -> None:
        """Index what ends before `end`, but for the last token: nothing follows it yet."""
        tokens, index = stream.tokens, stream.index
        for place in range(stream.num_indexed + 1, end):
            for length in LENGTHS:
                if place >= length:
                    index[tuple(tokens[place - length : place])] = place
            stream.num_indexed = place
