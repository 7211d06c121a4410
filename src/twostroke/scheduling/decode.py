"""What is particular to decode: a slot for every running stream, its drafts, and the end of a stream."""

from __future__ import annotations

from collections.abc import Callable

from twostroke.core.sequence import FinishReason, Sequence, SequenceState
from twostroke.core.step import Drafts, SampledToken
from twostroke.kv.ledger import KVLedger
from twostroke.scheduling.admission import Admission
from twostroke.scheduling.plan import Drafting, StepPlan

TextEnds = Callable[[Sequence, int], bool]
"""Called with each token of an advance in turn. Returns whether the answer's text ends with this token."""


class DecodePlanner:
    def __init__(
        self, ledger: KVLedger, admission: Admission, drafting: Drafting | None = None, max_drafts: int | None = None
    ) -> None:
        self._ledger = ledger
        self._admission = admission
        self._max_drafts = max_drafts
        self.drafting = drafting

    def steady_streams(self) -> list[Sequence]:
        """See `Scheduler.steady_streams`."""
        may_join = len(self._admission.waiting) > 0 and not self._admission.is_taken
        if may_join or self._admission.who_gives_way() is not None:
            return []
        streams = list(self._admission.running)
        ready = [one for one in streams if one.prefill_len <= one.next_position < one.max_total_tokens - 1]
        return streams if len(ready) == len(streams) else []

    def fill(self, plan: StepPlan) -> None:
        """Adds a slot for every stream that may still grow, the oldest first: preemption takes the youngest, so it
        never takes one that already has a slot in this step. Streams that still read are noted for the prefill planner.

        A slot at `next_position` yields the token after it. Tokens in flight count: if a step was launched ahead, the
        host does not know the last token yet. It knows only that there will be one, and how many more there may be."""
        reserve, drafting = self._ledger.reserve, self.drafting
        if drafting is not None:
            streams = list(self._admission.running)
            # Drafts never take room or time from a prompt: while one is read, or may be, there are none.
            if self._admission.may_admit or any(one.next_position < one.prefill_len for one in streams):
                drafting = None
            else:
                drafting.begin(streams)
        spare = plan.tokens_left - len(self._admission.running)  # for drafts: each stream's own token goes first
        slot_limit = plan.tokens_left if self._max_drafts is None else self._max_drafts
        for sequence in self._admission.running:
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted a moment ago
            position = sequence.num_computed + sequence.num_in_flight  # `next_position`, for every stream in every step
            if position < sequence.prefill_len:
                plan.prefilling.append(sequence)
                continue
            if position + 1 >= sequence.max_total_tokens:
                continue  # its last tokens may be in flight
            if drafting is not None and (most := min(spare, slot_limit, sequence.max_total_tokens - 2 - position)) > 0:
                drafts = drafting.drafts(sequence, most)
                if drafts is not None and self._add_drafts(plan, sequence, position, drafts, most):
                    spare -= drafts.most
                    continue
            grants = reserve(sequence, position + 1)
            if grants is None and self._admission.make_room(plan, sequence, position + 1):
                grants = reserve(sequence, position + 1)
            if grants is not None:  # else only older sequences hold what it needs: it has no slot in this step
                plan.add_slot(sequence, position, grants)

    def _add_drafts(self, plan: StepPlan, sequence: Sequence, position: int, drafts: Drafts, most: int) -> bool:
        """Adds a slot with these drafts, unless blocks are short: nobody gives way for drafts. Returns whether it
        did."""
        assert 0 < drafts.most <= most
        grants = self._ledger.reserve(sequence, position + 1 + drafts.most)
        if grants is not None:
            plan.add_slot(sequence, position, grants, drafts)
        return grants is not None


def finish_reason(sequence: Sequence, token_id: int, num_tokens: int) -> FinishReason | None:
    """Whether a token ends the answer, if the sequence then has `num_tokens` tokens."""
    min_tokens = sequence.prompt_len + sequence.request.sampling.min_tokens
    if token_id in sequence.stop_ids and num_tokens >= min_tokens:
        return FinishReason.STOP
    if num_tokens >= sequence.max_total_tokens:
        return FinishReason.LENGTH
    return None


def until_over(
    sequence: Sequence, sampled: tuple[SampledToken, ...], text_ends: TextEnds | None
) -> tuple[tuple[SampledToken, ...], bool]:
    """Returns the tokens of an advance that count, and whether the answer is over with them. Tokens behind its end are
    dropped: they would not have come if tokens had come one by one."""
    if text_ends is None and not sequence.stop_ids and len(sequence.tokens) + len(sampled) < sequence.max_total_tokens:
        return sampled, False
    for count, (token_id, _) in enumerate(sampled, start=1):
        is_over = text_ends is not None and text_ends(sequence, token_id)
        if is_over or finish_reason(sequence, token_id, len(sequence.tokens) + count) is not None:
            return sampled[:count], True
    return sampled, False
