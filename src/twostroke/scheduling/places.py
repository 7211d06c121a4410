"""When whoever comes finds a place to write in: a slot, blocks of KV, and steps short enough for the gaps that were
promised. All samples of a request are looked at: each has a first token of its own. Forecasts; changes nothing."""

from __future__ import annotations

from math import ceil

from twostroke.core.sequence import Sequence
from twostroke.cost.floor import StepWork
from twostroke.kv.ledger import KVLedger
from twostroke.scheduling.admission import Admission
from twostroke.scheduling.forecast import Forecast


class Places:
    def __init__(self, ledger: KVLedger, forecast: Forecast, admission: Admission) -> None:
        self._ledger = ledger
        self._forecast = forecast
        self._admission = admission

    def first_token_s(self, newcomer: Sequence, num_samples: int = 1) -> float:
        """From now to the first token of the last of its samples."""
        admission, forecast = self._admission, self._forecast
        at_a_time = self._at_a_time(newcomer, num_samples)
        ahead_s, ahead = admission.ahead_of(newcomer)
        given = 0 if ahead else admission.num_making_way_for(newcomer, at_a_time)
        waiting = ahead + at_a_time - given
        num_slots_short = max(0, waiting - admission.num_free_slots)
        own_s = self._reading_s(newcomer, num_samples)
        in_line_s = forecast.first_token_s(ahead_s, own_s, num_slots_short)
        has_ends = forecast.between_ends_s.value > 0.0
        room_s = self._room_s(newcomer, at_a_time, 0 if has_ends else num_slots_short)
        if waiting:
            room_s = max(
                room_s, admission.gaps.wait_s(newcomer, waiting - 1, admission.running, admission.growth.more_tokens)
            )
        if room_s:
            in_line_s = max(in_line_s, room_s + forecast.first_token_s(0.0, own_s))
        steps_s = max(0, given - 1) * forecast.step_s.value  # one a step gives way
        return in_line_s + steps_s + self._rounds_s(newcomer, num_samples, at_a_time)

    def alone_s(self, newcomer: Sequence, num_samples: int = 1) -> float:
        """The same with nobody there but its own samples."""
        at_a_time = self._at_a_time(newcomer, num_samples)
        return self._reading_s(newcomer, num_samples) + self._rounds_s(newcomer, num_samples, at_a_time)

    def _reading_s(self, newcomer: Sequence, num_samples: int) -> float:
        """Sample 0 reads the prompt for all but its last token, which each of the others reads behind it."""
        reading_s, num_others = self._forecast.reading_s(newcomer), num_samples - 1
        if not num_others:
            return reading_s
        return reading_s + self._forecast.step_seconds(
            StepWork(((newcomer.prompt_len - 1, 1),) * num_others, num_others)
        )

    def _at_a_time(self, newcomer: Sequence, num_samples: int) -> int:
        """How many of its samples may write at a time, with nobody else there."""
        if num_samples == 1:
            return 1
        admission = self._admission
        most = min(num_samples, admission.num_slots, admission.gaps.most_alike(newcomer, num_samples))
        end = min(newcomer.prompt_len + admission.growth.more_tokens(newcomer), newcomer.max_total_tokens - 1)
        return max(1, min(most, self._ledger.ahead.most_samples(newcomer.prompt_len, end)))

    def _rounds_s(self, newcomer: Sequence, num_samples: int, at_a_time: int) -> float:
        """For its last samples, until the first of them have ended in whose place they write."""
        num_rounds = ceil(num_samples / at_a_time) - 1
        if not num_rounds:
            return 0.0
        num_steps = num_rounds * self._admission.growth.more_tokens(newcomer)
        return num_steps * self._forecast.step_seconds(StepWork(contexts=[newcomer.prompt_len + 1] * at_a_time))

    def _room_s(self, newcomer: Sequence, num_samples: int, num_slots_short: int) -> float:
        """Until enough of those who run have ended for slots and blocks: by what each of them will still write, a token
        a step."""
        match = self._ledger.match(newcomer)
        short = max(self._admission.shortage(newcomer, match, num_samples), default=0)
        if short <= 0 and num_slots_short <= 0:
            return 0.0
        ends = sorted((self._admission.growth.more_tokens(one), one.seq_id, one) for one in self._admission.running)
        num_steps = 0
        for num_steps, _, one in ends:
            num_slots_short -= 1
            short -= self._ledger.layout.blocks_for(len(one.tokens) + num_steps - one.timing.cached_tokens)
            if short <= 0 and num_slots_short <= 0:
                break
        contexts = [one.next_position + 1 for one in self._admission.running]
        return num_steps * self._forecast.step_seconds(StepWork(contexts=contexts))
