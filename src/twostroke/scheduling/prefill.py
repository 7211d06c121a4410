"""What is particular to prefill: chunks of known tokens, as large as budget and KV allow, and their prompt logprobs."""

from __future__ import annotations

from twostroke.core.sequence import Sequence, SequenceState
from twostroke.core.step import PrefillChunk
from twostroke.kv.ledger import KVLedger
from twostroke.scheduling.admission import Admission
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.pace import Pace, Room, Unpaced
from twostroke.scheduling.plan import StepPlan


class PrefillPlanner:
    def __init__(
        self, config: SchedulerConfig, ledger: KVLedger, admission: Admission, pace: Pace | None = None
    ) -> None:
        self.chunk_limit = config.chunk_limit
        self._ledger = ledger
        self._admission = admission
        self._pace = pace or Unpaced()

    def fill(self, plan: StepPlan, now_s: float) -> None:
        """Prefills already begun come first, then new sequences, while the step has tokens left and the pace goes
        on."""
        prefilling, waiting = plan.prefilling, self._admission.waiting
        left = sum(sequence.prefill_len - sequence.next_position for sequence in prefilling)
        num_tokens = left + waiting.num_prompt_tokens
        room = self._pace.open(plan.decodes, len(prefilling) + len(waiting), num_tokens, plan.tokens_left)
        for sequence in prefilling:
            if sequence.state is SequenceState.RUNNING:  # else it was preempted on the way
                if plan.is_full or not self._goes_on(plan, room, sequence.next_position, sequence.prefill_len):
                    break
                self._add_chunk(plan, room, sequence, now_s)
        while not plan.is_full and not room.is_full:
            candidate = self._admission.next(plan)
            if candidate is None:
                return
            if not self._goes_on(plan, room, candidate.match.num_tokens, len(candidate.sequence.tokens)):
                break
            self._admission.admit(plan, candidate)
            self._add_chunk(plan, room, candidate.sequence, now_s, is_new=True)
        self._admission.note_full()

    def _goes_on(self, plan: StepPlan, room: Room, start: int, end: int) -> bool:
        num_tokens = self._most(plan, start, end)
        return room.goes_on(start, num_tokens, samples=start + num_tokens == end)

    def _most(self, plan: StepPlan, start: int, end: int) -> int:
        """Of a sequence's tokens from `start` to `end`, those that one step may take."""
        return min(plan.tokens_left, self.chunk_limit, end - start)

    def _add_chunk(self, plan: StepPlan, room: Room, sequence: Sequence, now_s: float, *, is_new: bool = False) -> None:
        """`is_new`: its row is opened by this step, so that it has work in it whatever the pace says: were the step to
        fail, it must be among those that fail with it."""
        start = sequence.next_position
        if not self._admission.make_room(plan, sequence, start + 1):
            return  # only older sequences hold what it needs: it sits this step out
        limit = min(self._most(plan, start, sequence.prefill_len), self._ledger.room(sequence) - start)
        taken = room.take(start, limit, samples=start + limit == sequence.prefill_len, may_wait=not is_new)
        if not taken:
            return
        chunk = prefill_chunk(sequence, start, start + taken)
        grants = self._ledger.reserve(sequence, chunk.end)
        assert grants is not None  # it lies within the ledger's room
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
