"""What a policy is: it says who goes before whom, among those that wait and those whose prompts are being read, and is
told of every second that somebody took. Which of them fit is admission's to say, how long a step lasts the pace's."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from twostroke.core.sequence import Sequence
from twostroke.core.service_level import ServiceLevels
from twostroke.scheduling.forecast import Forecast
from twostroke.scheduling.queue import Rank


class Policy:
    """Each replaces what it does differently; all have a rank."""

    name = ""
    paces = True
    """Steps with streams are as short as these were promised; else prompts fill the step's token budget."""
    calls_take_turns = True
    """Of a flow, the calls that came in with several prompts or samples let the others go in between, and whoever holds
    many slots gives one to somebody who has none."""

    def __init__(self, forecast: Forecast, priority_aging_s: float, levels: ServiceLevels) -> None:
        self._forecast = forecast
        self._aging_s = priority_aging_s
        self._weights = {level.name: level.weight for level in levels.levels}

    def flow(self, sequence: Sequence) -> str:
        """All of a flow wait behind each other; flows take turns."""
        return ""

    def in_turn(self, flows: Iterable[str]) -> Iterable[str]:
        """The one whose turn it is first."""
        return flows

    def share(self, flow: str) -> float:
        """Of what a step's streams may take, what one flow's may: so much, while others have work too."""
        return 1.0

    def step_share(self, sequence: Sequence) -> float:
        """Of what decodes leave of a step's seconds, what prompts may take with this one."""
        return 1.0

    def rank(self, sequence: Sequence, since_s: float = -inf) -> Rank:
        """Within a flow, lower goes first. It must not change while a sequence waits, and of all that may still come
        only finitely many may be below it, so that none starves. `since_s`: when its call's turn began."""
        raise NotImplementedError

    def lost_s(self, sequence: Sequence) -> float:
        """From when on what it was promised cannot be kept: it yields to those for whom it can."""
        return inf

    def reads_lost(self, flow: str) -> bool:
        """Whether it is the turn of one of the flow's lost ones."""
        return False

    def goes_before(self, one: Sequence, other: Sequence, now_s: float) -> bool:
        """Whether a prompt is read before another whose reading was begun, and which would go first otherwise."""
        return False

    @property
    def counts_writing(self) -> bool:
        """Whether it wants to be told what streams take."""
        return False

    # What it is told

    def enter(self, sequence: Sequence) -> None:
        """It waits from now on."""

    def leave(self, sequence: Sequence) -> None:
        """It is over."""

    def note_passed(self, flow: str) -> None:
        """Somebody goes first whose promise can be kept, and somebody lost waits for it."""

    def note_reading(self, sequence: Sequence, seconds: float, now_s: float) -> None:
        """A chunk of it goes into a step, and is predicted to take this long."""

    def note_writing(self, sequences: list[Sequence], seconds: float) -> None:
        """The streams of a step took this long together, beside what it read."""
