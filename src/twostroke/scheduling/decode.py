"""What is particular to decode: one slot a running stream in every step, and when a stream is over."""

from __future__ import annotations

from twostroke.core.sequence import FinishReason, Sequence, SequenceState
from twostroke.kv.ledger import KVLedger
from twostroke.scheduling.admission import Admission
from twostroke.scheduling.plan import StepPlan


class DecodePlanner:
    def __init__(self, ledger: KVLedger, admission: Admission) -> None:
        self._ledger = ledger
        self._admission = admission

    def fill(self, plan: StepPlan) -> None:
        """A slot for every stream that may still grow, the oldest first: preemption takes the youngest, so it never
        takes one that already has a slot in this step. Those that still read are noted for the prefill planner.

        A slot at `next_position` yields the token after it. Tokens in flight count: with a step launched ahead, the
        host does not know the last token yet, only that there will be one."""
        reserve = self._ledger.reserve
        for sequence in self._admission.running:
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted a moment ago
            position = sequence.num_computed + sequence.num_in_flight  # `next_position`, for every stream in every step
            if position < sequence.prefill_len:
                plan.prefilling.append(sequence)
                continue
            if position + 1 >= sequence.max_total_tokens:
                continue
            grants = reserve(sequence, position + 1)
            if grants is None and self._admission.make_room(plan, sequence, position + 1):
                grants = reserve(sequence, position + 1)
            if grants is not None:  # else only older ones hold what it needs: it sits this step out
                plan.add_slot(sequence, position, grants)


def finish_reason(sequence: Sequence) -> FinishReason | None:
    """Whether the token just appended ends the answer."""
    tokens = sequence.tokens
    if tokens[-1] in sequence.stop_ids and sequence.num_output >= sequence.request.sampling.min_tokens:
        return FinishReason.STOP
    if len(tokens) >= sequence.max_total_tokens:
        return FinishReason.LENGTH
    return None
