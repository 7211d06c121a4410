"""How much prompt reading this engine left to the engines that write, and so how long a prompt that is left now would
wait there. Knows of a writer only what was sent to it."""

from __future__ import annotations

from collections import OrderedDict

from twostroke.scheduling.staying import GAP_GROWTH

READING_SHARE = 1.0 - 1.0 / GAP_GROWTH
"""The share of a writer's time that may go to prompts. The mean gap of its streams then grows GAP_GROWTH times."""
MOST_WRITERS = 256


class SentWork:
    """The work that was sent to each writer, by its name. If routers give no names, nobody knows how many writers there
    are, and all count as one."""

    def __init__(self, most_writers: int = MOST_WRITERS) -> None:
        self._most_writers = most_writers
        self._over_s: OrderedDict[str, float] = OrderedDict()  # by writer: when it should have read what was sent to it

    def ahead_s(self, writer: str, now_s: float) -> float:
        """Returns the seconds until this writer should have read what was sent to it."""
        return max(0.0, self._over_s.get(writer, now_s) - now_s)

    def note(self, writer: str, seconds: float, now_s: float) -> None:
        """Notes that a prompt was sent there which takes that many seconds to read, if nothing else runs."""
        self._over_s[writer] = now_s + self.ahead_s(writer, now_s) + seconds / READING_SHARE
        self._over_s.move_to_end(writer)
        while len(self._over_s) > self._most_writers:
            self._over_s.popitem(last=False)
