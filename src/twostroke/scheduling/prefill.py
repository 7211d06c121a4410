"""What is particular to prefill: chunks of known tokens, as large as budget and KV allow, and their prompt logprobs."""

from __future__ import annotations

from twostroke.core.sequence import Sequence, SequenceState
from twostroke.core.step import PrefillChunk
from twostroke.kv.ledger import KVLedger
from twostroke.scheduling.admission import Admission
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.pace import PrefillPace
from twostroke.scheduling.plan import StepPlan


class PrefillPlanner:
    def __init__(
        self, config: SchedulerConfig, ledger: KVLedger, admission: Admission, pace: PrefillPace | None = None
    ) -> None:
        self.chunk_limit = config.chunk_limit
        self._ledger = ledger
        self._admission = admission
        self._pace = pace

    def fill(self, plan: StepPlan, now_s: float) -> None:
        """Prefills already begun come first, then new sequences, while the step has tokens left, and, beside running
        streams, seconds."""
        if self._pace is None:
            self._add_chunks(plan, now_s)
            return
        allowed_s = plan.seconds_left = self._seconds_beside_streams(self._pace, plan)
        self._add_chunks(plan, now_s)
        spent_s = 0.0 if allowed_s is None or plan.seconds_left is None else allowed_s - max(0.0, plan.seconds_left)
        self._pace.remember(plan.num_prefill_tokens, spent_s)

    def _seconds_beside_streams(self, pace: PrefillPace, plan: StepPlan) -> float | None:
        """None: there are none, or nobody waits."""
        waiting = self._admission.waiting
        num_waiting = len(plan.prefilling) + len(waiting)
        if not num_waiting or not len(plan):
            return None
        left = sum(sequence.prefill_len - sequence.next_position for sequence in plan.prefilling)
        return pace.seconds_for_prefill(plan.decodes, num_waiting, left + waiting.num_prompt_tokens)

    def _add_chunks(self, plan: StepPlan, now_s: float) -> None:
        for sequence in plan.prefilling:
            if plan.is_full:
                break
            if sequence.state is SequenceState.RUNNING:  # else it was preempted on the way
                self._add_chunk(plan, sequence, now_s)
        while not plan.is_full and self._has_room(plan):
            admitted = self._admission.admit(plan)
            if admitted is None:
                return
            self._add_chunk(plan, admitted, now_s, is_new=True)
        self._admission.note_full()

    def _has_room(self, plan: StepPlan) -> bool:
        if self._pace is None or plan.seconds_left is None:
            return True
        return self._pace.has_room(plan.seconds_left, len(plan.decodes), plan.num_prefill_tokens)

    def _add_chunk(self, plan: StepPlan, sequence: Sequence, now_s: float, *, is_new: bool = False) -> None:
        """`is_new`: its row is opened by this step, so that it has work in it whatever the pace says: were the step to
        fail, it must be among those that fail with it."""
        start = sequence.next_position
        if not self._admission.make_room(plan, sequence, start + 1):
            return  # only older sequences hold what it needs: it sits this step out
        end = min(
            start + plan.tokens_left,
            start + self.chunk_limit,
            sequence.prefill_len,
            self._ledger.room(sequence),
        )
        if self._pace is not None and plan.seconds_left is not None:
            num_decodes, num_planned = len(plan.decodes), plan.num_prefill_tokens
            paced = self._pace.chunk_tokens(
                plan.seconds_left, start, end - start, num_decodes, num_planned, may_wait=not is_new
            )
            is_cut = paced < end - start
            plan.seconds_left = 0.0 if is_cut else plan.seconds_left - self._pace.seconds(start, paced)
            end = start + paced
            if paced == 0:
                return
        chunk = prefill_chunk(sequence, start, end)
        grants = self._ledger.reserve(sequence, chunk.end)
        assert grants is not None  # `end` lies within the room
        plan.add_chunk(sequence, chunk, grants)
        timing = sequence.timing
        timing.prefill_chunks += 1
        timing.recomputed_tokens += max(0, min(chunk.end, sequence.high_water) - start)
        if timing.scheduled_s is None:
            timing.scheduled_s = now_s


def prefill_chunk(sequence: Sequence, start: int, end: int) -> PrefillChunk:
    """The chunk from `start` to `end`, or to where prompt logprobs begin to be wanted. Sample 0 reports them, each
    position once: those launched before a preemption were reported then."""
    wanted = sequence.request.sampling.prompt_logprobs if sequence.sample_index == 0 else None
    last_reporting = sequence.prompt_len - 1  # the prompt's last position has no next prompt token
    if wanted is not None and sequence.high_water < last_reporting and start < last_reporting:
        if start < sequence.high_water:
            end, wanted = min(end, sequence.high_water), None
    else:
        wanted = None
    follows = wanted is not None and end < sequence.prompt_len
    return PrefillChunk(
        sequence.seq_id,
        start,
        tuple(sequence.tokens[start:end]),
        samples=end == sequence.prefill_len,
        prompt_logprobs=wanted,
        next_token_id=sequence.tokens[end] if follows else None,
    )
