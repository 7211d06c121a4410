"""Prompt and output lookup: where the last few tokens of a stream stood before in the same stream, what followed them
is the guess. Suffix lookup of one text alone: nothing is kept of a request that ended, and no other is looked at."""

from __future__ import annotations

from collections.abc import Hashable

from twostroke.core.request import Request
from twostroke.speculation.suffix import SuffixDrafter


class NgramDrafter(SuffixDrafter):
    name = "ngram"
    covers = ()

    def _key(self, seq_id: int, request: Request) -> Hashable:
        return seq_id

    def close(self, seq_id: int) -> None:
        text = self._streams.get(seq_id)
        super().close(seq_id)
        if text is not None and text.number in self._closed:
            self._drop(text.number)
