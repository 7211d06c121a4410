"""What an engine that reads gave those that write to read: how long a prompt that is left now would wait there. Knows
no writer but by what was sent to it."""

from __future__ import annotations

from collections import OrderedDict

from twostroke.scheduling.staying import GAP_GROWTH

READING_SHARE = 1.0 - 1.0 / GAP_GROWTH
"""Of a writer's time, that may go to prompts: its streams' gaps grow GAP_GROWTH times in the mean then."""
MOST_WRITERS = 256


class SentWork:
    """Of each writer, by its name. Where routers give none, nobody knows how many there are: all count as one."""

    def __init__(self, most_writers: int = MOST_WRITERS) -> None:
        self._most_writers = most_writers
        self._over_s: OrderedDict[str, float] = OrderedDict()  # by writer: when what was sent there should be read

    def ahead_s(self, writer: str, now_s: float) -> float:
        """Until what was sent there should be read."""
        return max(0.0, self._over_s.get(writer, now_s) - now_s)

    def note(self, writer: str, seconds: float, now_s: float) -> None:
        """That much more to read, alone, is sent there."""
        self._over_s[writer] = now_s + self.ahead_s(writer, now_s) + seconds / READING_SHARE
        self._over_s.move_to_end(writer)
        while len(self._over_s) > self._most_writers:
            self._over_s.popitem(last=False)
