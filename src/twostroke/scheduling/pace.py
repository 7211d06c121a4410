"""Decides how much of the waiting prompts a step reads. Beside running streams it is as much as their promises allow.
It ends a step before the next prompt if the prompts that are read already gain more by having their first token now.
All by the cost model's predictions of whole steps. Knows costs; knows nothing of queues or blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Protocol

from twostroke.core.step import DecodeSlot, Step
from twostroke.cost.floor import StepWork, work_of

LEAST_TOKENS = 64
"""How many tokens a step with running streams may always prefill. Prompts must move on, however tight the target is."""
CROWD = 8.0
"""If the waiting prompts times this number are more than the streams, streams give way."""
FEW_WAITING, BURST = 4, 32.0
"""Waiting prompts beyond the first few came in a burst, and each of them counts for this many."""
LONG_WAIT = 4.0
"""A step that reads prompts for this many times the target belongs to a burst. Chance arrivals hardly ever cause
one."""
ROUND_TOKENS = 128
"""If the pace cuts a prompt, the tokens of the step, decodes included, are a multiple of this. Matrix products and
captured graphs run best with few different sizes."""
ROUND_TOKENS_UNPACED = 16
"""The same multiple on a backend that has no target of its own, such as the CPU's. It is also how many tokens always
move there: reading a token takes longer, and 64 of them would take several promised gaps."""
SMALL_ROUNDS = 4
"""If the tokens that always move would break a promised gap by themselves, a round is divided into this many parts, and
as many parts move as the gap has room for."""
PROMISED_SHARE = 0.9
"""The share of a promised gap that a step may take by prediction. Predictions are off, and a gap is a little longer
than a step."""
LOST_SHARE = 0.03
"""A step ends behind a prompt only if reading the next one in a step of its own costs no more than this share of it, or
if the next one would make the prompt late."""


class Room:
    """The room for prompts in one step while it is planned. This class gives them whatever the step's token budget
    allows."""

    is_full = False
    allowed_s = inf
    """Seconds that the step may take."""

    def goes_on(self, start: int, num_tokens: int, *, samples: bool, share: float = 1.0) -> bool:
        """Whether a chunk of another prompt belongs in this step. `samples` means that the chunk's last token is the
        prompt's last. `share` is the part of the step beside decodes that prompts may take with this chunk."""
        return True

    def take(self, start: int, num_tokens: int, *, samples: bool, may_wait: bool = True, share: float = 1.0) -> int:
        """Returns how many tokens of a chunk to take into the step. If they are less than all, the step is full. They
        are 0 only for a prompt that may wait, and never for the first of a step."""
        return num_tokens

    def note_due(self, least_s: float, most_s: float) -> None:
        """Notes that the first token of a prompt that ends in this step is due between `least_s` and `most_s` from the
        start of the step. Nobody knows how long the step waits for the one in flight."""


class Pace(Protocol):
    def open(
        self,
        decodes: Sequence[DecodeSlot],
        num_waiting: int,
        waiting_tokens: int,
        max_tokens: int,
        promised_s: float = inf,
    ) -> Room:
        """Returns the room for prompts in a step with these decodes. `num_waiting` prompts wait to be read, with
        `waiting_tokens` in all; `max_tokens` of them fit into its budget. `promised_s` is the shortest gap that a
        stream was promised."""

    def limit_s(self, promised_s: float) -> float:
        """Returns the seconds that a step with streams may take, if no crowd of prompts waits."""


class Unpaced:
    """A pace that limits nothing: prompts fill every step."""

    def open(
        self,
        decodes: Sequence[DecodeSlot],
        num_waiting: int,
        waiting_tokens: int,
        max_tokens: int,
        promised_s: float = inf,
    ) -> Room:
        return Room()

    def limit_s(self, promised_s: float) -> float:
        return inf


class PrefillPace:
    def __init__(
        self,
        step_seconds: Callable[[StepWork], float],
        itl_target_s: float | None,
        round_tokens: int = ROUND_TOKENS,
    ) -> None:
        """`step_seconds` predicts a step's seconds, as `StepCost.seconds` does, and may learn meanwhile. `itl_target_s`
        is the gap that is aimed at if nothing shorter was promised. None means that there is no target."""
        if itl_target_s is not None and itl_target_s <= 0.0:
            raise ValueError(f"itl_target_s must be above 0, not {itl_target_s}")
        self.itl_target_s = inf if itl_target_s is None else itl_target_s
        self._round_tokens = round_tokens
        self._step_seconds = step_seconds
        self._last: PacedRoom | None = None  # the last step's room, if it had prompts beside streams

    def open(
        self,
        decodes: Sequence[DecodeSlot],
        num_waiting: int,
        waiting_tokens: int,
        max_tokens: int,
        promised_s: float = inf,
    ) -> Room:
        last, self._last = self._last, None
        if not num_waiting or self.itl_target_s == promised_s == inf:
            return Room()
        allowed_s = inf
        if decodes:
            allowed_s = self.allowed_s(len(decodes), num_waiting, waiting_tokens, last)
            allowed_s = min(allowed_s, PROMISED_SHARE * promised_s)
        work = work_of(Step(0, decodes=tuple(decodes)))
        max_tokens = min(waiting_tokens, max_tokens)
        room = PacedRoom(
            self._step_seconds, work, len(decodes), allowed_s, num_waiting, max_tokens, self._round_tokens, promised_s
        )
        self._last = room if decodes else None
        return room

    def limit_s(self, promised_s: float) -> float:
        return min(PROMISED_SHARE * promised_s, self.itl_target_s)

    def allowed_s(
        self, num_streams: int, num_waiting: int, waiting_tokens: int, last: PacedRoom | None = None
    ) -> float:
        """Returns the seconds that a step with streams may take. A stream waits for its next token, a prompt for its
        first. If the waiting prompts are more than an eighth of the streams, streams give way in proportion. Large
        chunks pay then, too, for a burst is read faster in few steps. Once streams have waited long for a burst, its
        last prompts are read in steps as long as before, not in many small ones."""
        crowd = max(CROWD * num_waiting, BURST * (num_waiting - FEW_WAITING))
        target_s = self.itl_target_s * max(1.0, crowd / max(1, num_streams))
        # What waits may be the rest of a burst only if its prompts, on average, fit into another step like the last. A
        # longer one would hold streams up for many steps, and is read at the usual pace.
        if last is None or waiting_tokens > num_waiting * last.full_tokens:
            return target_s
        return max(target_s, last.full_s) if last.full_s >= LONG_WAIT * self.itl_target_s else target_s


def pace_of(step_seconds: Callable[[StepWork], float], itl_target_ms: float | None) -> PrefillPace:
    """Returns an engine's pace. A backend without a target can take steps of any size, and only a promise cuts them."""
    if itl_target_ms is None:
        return PrefillPace(step_seconds, None, ROUND_TOKENS_UNPACED)
    return PrefillPace(step_seconds, itl_target_ms / 1e3)


class PacedRoom(Room):
    def __init__(
        self,
        step_seconds: Callable[[StepWork], float],
        decodes: StepWork,
        num_streams: int,
        allowed_s: float,
        num_waiting: int,
        max_tokens: int,
        round_tokens: int,
        promised_s: float = inf,
    ) -> None:
        self._step_seconds = step_seconds
        self._promised_s = promised_s
        self._round_tokens = round_tokens
        self._work = self._decodes = decodes
        self._num_streams = num_streams
        self._num_tokens = decodes.num_tokens
        self.allowed_s = allowed_s
        self._num_waiting = num_waiting
        self._tokens_left = max_tokens
        self._left_out_s = 0.0
        self._due_s: list[tuple[float, float]] = []
        """When each prompt that ends in the step is due, at the earliest and at the latest."""
        self.full_tokens = 0
        """Prompt tokens in the step, and those that would have fitted, too."""

    @property
    def full_s(self) -> float:
        """Seconds that its streams wait for the step, or would wait if it had taken all that fits."""
        return min(self.allowed_s, self._step_seconds(self._work) + self._left_out_s)

    def goes_on(self, start: int, num_tokens: int, *, samples: bool, share: float = 1.0) -> bool:
        if self.is_full or not self._work.chunks:
            return not self.is_full
        needed = self._round_tokens - self._num_tokens % self._round_tokens
        allowed_s = self._allowed_with(share)
        if self._seconds_with(start, needed) > allowed_s or self._ends_here(start, num_tokens, samples, allowed_s):
            self.is_full = True
        return not self.is_full

    def _ends_here(self, start: int, num_tokens: int, samples: bool, allowed_s: float) -> bool:
        """Whether to end the step here, so that prompts that it reads to their ends get their first tokens without
        waiting for the next prompt. The next prompt then has a step of its own. That delays it, and all behind it, by
        what two steps cannot share and by a second round of decodes. If arithmetic is the bound, the first part is next
        to nothing. Streams are held up once more, too: so a prompt that could end in this step waits only for as many
        others as there are streams."""
        num_ending = self._work.num_sampling_chunks
        if not num_ending or (samples and num_ending < self._num_streams):
            return False
        num_tokens = max(1, self._tokens_within(start, num_tokens, allowed_s))
        so_far_s, together_s = self._step_seconds(self._work), self._seconds_with(start, num_tokens)
        own = StepWork(((start, num_tokens),), 1)
        lost_s = so_far_s + self._step_seconds(own) - together_s
        later_s = so_far_s + self._step_seconds(replace(self._decodes, chunks=own.chunks)) - together_s
        added_s, num_behind = together_s - so_far_s, self._num_waiting - len(self._work.chunks)
        makes_late = any(least_s < together_s and so_far_s <= most_s for least_s, most_s in self._due_s)
        if num_behind * later_s > num_ending * added_s or (lost_s > LOST_SHARE * so_far_s and not makes_late):
            return False
        self._left_out_s = added_s * self._tokens_left / num_tokens
        self.full_tokens += self._tokens_left
        return True

    def take(self, start: int, num_tokens: int, *, samples: bool, may_wait: bool = True, share: float = 1.0) -> int:
        fits = self._tokens_within(start, num_tokens, self._allowed_with(share))
        taken = num_tokens
        if fits < num_tokens:
            self.is_full = True
            taken = (self._num_tokens + fits) // self._round_tokens * self._round_tokens - self._num_tokens
            if self._work.chunks and may_wait:
                taken = max(0, taken)
            elif taken < (least := min(LEAST_TOKENS, self._round_tokens)):
                taken = fits if fits >= least else min(self._least(start, least), num_tokens)
        if taken > 0:
            self._work = self._with(start, taken, samples and taken == num_tokens)
            self._num_tokens += taken
            self._tokens_left -= taken
            self.full_tokens += taken
        return taken

    def _least(self, start: int, usual: int) -> int:
        """Returns how many tokens of a prompt always move, whatever its share: the usual number, or as many small
        rounds as a promised gap has room for. If it has room for none, small steps would not keep it either."""
        fits = self._tokens_within(start, usual, self._promised_s)
        small = self._round_tokens // SMALL_ROUNDS
        return fits // small * small or usual

    def _allowed_with(self, share: float) -> float:
        """Returns the seconds that the step may take if its prompts have only this share of what decodes leave. Decodes
        are in every step, whoever is read. A share of the whole step would often be less than decodes take, and nothing
        would be read."""
        if share == 1.0 or self.allowed_s == inf:
            return self.allowed_s
        decodes_s = self._step_seconds(self._decodes)
        return decodes_s + share * max(0.0, self.allowed_s - decodes_s)

    def note_due(self, least_s: float, most_s: float) -> None:
        self._due_s.append((least_s, most_s))

    def _tokens_within(self, start: int, limit: int, allowed_s: float) -> int:
        """Returns the length of the longest chunk from `start` on, up to `limit`, with which the step stays within its
        time."""
        if allowed_s == inf or self._seconds_with(start, limit) <= allowed_s:
            return limit
        return bisect_right(range(1, limit), allowed_s, key=lambda length: self._seconds_with(start, length))

    def _seconds_with(self, start: int, num_tokens: int) -> float:
        return self._step_seconds(self._with(start, num_tokens, True))

    def _with(self, start: int, num_tokens: int, samples: bool) -> StepWork:
        work = self._work
        return replace(
            work,
            chunks=(*work.chunks, (start, num_tokens)),
            num_sampling_chunks=work.num_sampling_chunks + samples,
        )
