"""What is particular to decode: one slot a running stream in every step, and when a stream is over."""

from __future__ import annotations

from twostroke.core.sequence import FinishReason, Phase, Sequence, SequenceState
from twostroke.core.step import DecodeSlot
from twostroke.kv.ledger import KVLedger
from twostroke.scheduling.admission import Admission
from twostroke.scheduling.plan import StepPlan


class DecodePlanner:
    def __init__(self, ledger: KVLedger, admission: Admission) -> None:
        self._ledger = ledger
        self._admission = admission

    def fill(self, plan: StepPlan) -> None:
        """A slot for every stream that may still grow, the oldest first: preemption takes the youngest, so it never
        takes one that already has a slot in this step."""
        for sequence in self._admission.running:
            if sequence.state is not SequenceState.RUNNING or not wants_slot(sequence):
                continue
            position = sequence.next_position
            grants = self._ledger.reserve(sequence, position + 1)
            if grants is None and self._admission.make_room(plan, sequence, position + 1):
                grants = self._ledger.reserve(sequence, position + 1)
            if grants is not None:  # else only older ones hold what it needs: it sits this step out
                plan.add_slot(sequence, DecodeSlot(sequence.seq_id, position), grants)


def wants_slot(sequence: Sequence) -> bool:
    """A slot at `next_position` yields the token after it. Tokens in flight count: with a step launched ahead, the
    host does not know the last token yet, only that there will be one."""
    return sequence.phase is Phase.DECODE and sequence.next_position + 1 < sequence.max_total_tokens


def finish_reason(sequence: Sequence) -> FinishReason | None:
    """Whether the token just appended ends the answer."""
    request = sequence.request
    if sequence.tokens[-1] in request.stop_ids and sequence.num_output >= request.sampling.min_tokens:
        return FinishReason.STOP
    if len(sequence.tokens) >= sequence.max_total_tokens:
        return FinishReason.LENGTH
    return None
