"""Prompt and output lookup: where the last few tokens of a stream stood before in the same stream, what followed them
is the guess. Suffix lookup of one text alone: nothing is kept of a request that ended, and no other is looked at."""

from __future__ import annotations

from twostroke.speculation.suffix import SuffixDrafter


class NgramDrafter(SuffixDrafter):
    name = "ngram"
    covers = ()

    def __init__(self) -> None:
        super().__init__(shares=False)
