"""The steps that came back, as short records: a ring of the latest, and sums over all. Some microseconds a step,
nothing a token. Knows no sequence."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from operator import attrgetter, itemgetter, sub

from twostroke.core.step import Step, StepResult
from twostroke.core.step_record import StepRecord, StepTotals
from twostroke.core.timing import SequenceTiming

KEPT_STEPS = 4096

_position = itemgetter(1)  # of a DecodeSlot
_done_s = attrgetter("done_s")


class StepLog:
    def __init__(self, size: int = KEPT_STEPS) -> None:
        self.records: deque[StepRecord] = deque(maxlen=size)

    @property
    def last(self) -> StepRecord | None:
        return self.records[-1] if self.records else None

    def add(self, step: Step, launched_s: float, done_s: float, result: StepResult) -> StepRecord:
        before = self.last
        began_s = launched_s if before is None else max(launched_s, before.done_s)
        totals = StepTotals() if before is None else before.totals
        decodes, prefills = step.decodes, step.prefills
        num_decodes = len(decodes)
        context_tokens = sum(map(_position, decodes)) + num_decodes
        prefill_tokens = 0
        for chunk in prefills:
            prefill_tokens += len(chunk.token_ids)
        is_decode_only = not prefills
        compute_s = result.compute_s
        computed = held = 0
        for seq_id, drafted in result.drafted.items():
            computed += drafted.num_drafts
            held += max(0, len(result.sampled.get(seq_id, ())) - 1)
        record = StepRecord(
            began_s,
            done_s,
            compute_s,
            prefill_tokens,
            len(prefills),
            num_decodes,
            context_tokens,
            StepTotals(
                totals.steps + 1,
                totals.compute_s + compute_s,
                totals.prefill_tokens + prefill_tokens,
                totals.decode_slots + num_decodes,
                totals.context_tokens + context_tokens,
                totals.decode_only_steps + is_decode_only,
                totals.decode_only_s + (compute_s if is_decode_only else 0.0),
                totals.others_s + result.others_share * compute_s,
                totals.drafts_computed + computed,
                totals.drafts_held + held,
            ),
        )
        self.records.append(record)
        return record

    def close(self, timing: SequenceTiming) -> None:
        """A sample ended: note what it is to remember of the steps."""
        timing.step_last = self.last
        times_s = timing.token_times_s
        if len(times_s) < 2:
            return
        gaps_s = list(map(sub, times_s[1:], times_s))
        ended_s = times_s[1 + gaps_s.index(max(gaps_s))]
        place = bisect_left(self.records, ended_s, key=_done_s)
        if place < len(self.records) and self.records[place].done_s == ended_s:
            timing.step_after_gap = self.records[place]
