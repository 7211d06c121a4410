"""What a drafter on the device takes, timed at start: in steps it is a part of a graph, and no clock sees it there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from twostroke.backends.cuda.graphs import GraphCache

REPEATS = 5
TIMED_STREAMS, TIMED_WIDTH = (1, 8, 32, 128, 512), 3
"""What drafts take is measured at start: of this many streams, two drafts each."""
Draft = Callable[[torch.Tensor, int, torch.Tensor], None]
"""`DeviceDrafter.draft`."""


class DraftClock:
    """Knows nothing where there are no events: on a host, what a draft takes is 0."""

    def __init__(self, graphs: GraphCache) -> None:
        self._graphs = graphs
        self._known: dict[int, float] = {}

    def time_all(self, draft: Draft, padding_row: int, device: torch.device) -> None:
        """On the padding row, which keeps no state; it is the last."""
        nobodys = torch.full((padding_row * TIMED_WIDTH,), padding_row, dtype=torch.int32, device=device)
        drafts = torch.zeros(padding_row + 1, TIMED_WIDTH, dtype=torch.int32, device=device)
        for count in dict.fromkeys(min(count, padding_row) for count in TIMED_STREAMS):
            self.time(count, TIMED_WIDTH - 1, partial(draft, nobodys[: count * TIMED_WIDTH], TIMED_WIDTH, drafts))

    def time(self, num_streams: int, num_drafts: int, work: Callable[[], None]) -> None:
        """`work` makes this many drafts of each stream; it must be harmless."""
        key = ("drafts alone", num_streams)
        self._graphs.prepare(key, work, work)
        if not torch.cuda.is_available():
            return
        found = []
        for _ in range(REPEATS):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            self._graphs.run(key, work)
            ended.record()
            ended.synchronize()
            found.append(began.elapsed_time(ended) / 1e3)
        self._known[num_streams] = median(found) / num_drafts

    def a_draft_s(self, num_streams: int) -> float:
        """On the line between the numbers that were timed."""
        if not self._known:
            return 0.0
        below = max((count for count in self._known if count <= num_streams), default=min(self._known))
        above = min((count for count in self._known if count >= num_streams), default=max(self._known))
        first, last = self._known[below], self._known[above]
        return first if above == below else first + (last - first) * (num_streams - below) / (above - below)
