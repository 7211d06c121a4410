"""Prompt and output lookup. It finds where the last few tokens of a stream stood before in the same stream, and guesses
what followed them there. This is suffix lookup in one text alone: nothing is kept of a request that ended, and no other
is looked at."""

from __future__ import annotations

from twostroke.speculation.suffix import SuffixDrafter


class NgramDrafter(SuffixDrafter):
    name = "ngram"
    covers = ()

    def __init__(self) -> None:
        super().__init__(shares=False)
