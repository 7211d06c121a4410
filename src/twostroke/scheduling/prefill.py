"""What is particular to prefill: chunks of known tokens, as large as budget and KV allow, and their prompt logprobs."""

from __future__ import annotations

from math import inf

from twostroke.core.sequence import Phase, Sequence, SequenceState
from twostroke.core.step import PrefillChunk
from twostroke.kv.ledger import KVLedger
from twostroke.scheduling.admission import Admission, Candidate
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.pace import Pace, Room, Unpaced
from twostroke.scheduling.plan import StepPlan
from twostroke.scheduling.policies.policy import Policy
from twostroke.scheduling.promises import Promises


class PrefillPlanner:
    def __init__(
        self,
        config: SchedulerConfig,
        ledger: KVLedger,
        admission: Admission,
        policy: Policy,
        promises: Promises,
        pace: Pace | None = None,
    ) -> None:
        self._chunk_limit = self._config_limit = config.chunk_limit
        self._max_tokens = config.max_tokens_per_step
        self._ledger = ledger
        self._admission = admission
        self._policy = policy
        self._promises = promises
        self._reads_whole = config.whole_prompts
        paces = policy.paces and not self._reads_whole  # a pace would cut prompts into chunks
        self._pace = pace if pace is not None and paces else Unpaced()

    def limit_chunks(self, max_chunk_tokens: int | None) -> None:
        """See `Scheduler.limit_chunks`."""
        if max_chunk_tokens is not None and max_chunk_tokens < 1:
            raise ValueError(f"max_chunk_tokens must be at least 1, not {max_chunk_tokens}")
        self._chunk_limit = min(max_chunk_tokens or self._config_limit, self._config_limit)

    def fill(self, plan: StepPlan, now_s: float) -> None:
        """Adds chunks of prompts, begun ones and new ones in the policy's order, while the step has tokens left and the
        pace allows more. A sequence whose blocks are still being loaded waits for them, unless there is nothing else to
        do."""
        self._fill(plan, now_s)
        if len(plan):
            return
        for sequence in self._admission.arriving():
            num_tokens = sequence.prefill_len - sequence.next_position
            room = self._pace.open(plan.decodes, 1, num_tokens, plan.tokens_left, inf)
            self._add_chunk(plan, room, sequence, now_s, is_new=True)
            if len(plan):
                return

    def _fill(self, plan: StepPlan, now_s: float) -> None:
        room = self._open(plan)
        is_refused = False
        while not plan.is_full and not room.is_full:
            begun = self._first_begun(plan, now_s)
            candidate = None if is_refused else self._candidate(plan, begun, now_s)
            is_refused = is_refused or (candidate is None and begun is None)
            if candidate is not None:
                if not self._goes_on(plan, room, candidate.sequence, candidate.match.num_tokens):
                    break
                self._admission.admit(plan, candidate)
                if self._admission.is_arriving(candidate.sequence):
                    continue
                self._add_chunk(plan, room, candidate.sequence, now_s, is_new=True)
            elif begun is not None:
                if not self._goes_on(plan, room, begun, begun.next_position):
                    break
                plan.prefilling.remove(begun)
                self._add_chunk(plan, room, begun, now_s)
            else:
                return  # admission has noted what is waited for
        self._admission.note_full()

    def _open(self, plan: StepPlan) -> Room:
        begun, waiting = plan.prefilling, self._admission.waiting
        num_tokens = waiting.num_prompt_tokens + sum(one.prefill_len - one.next_position for one in begun)
        promised_s = self._promises.tightest_itl_s(plan.sequences.values()) if num_tokens else inf
        self._admission.step_limit_s = self._pace.limit_s(promised_s)
        room = self._pace.open(plan.decodes, len(begun) + len(waiting), num_tokens, plan.tokens_left, promised_s)
        if num_tokens:
            contexts = [slot.position + 1 for slot in plan.decodes]
            self._promises.forecast.note_streams(contexts, plan.tokens_left, room.allowed_s)
        return room

    def note_streams(self) -> None:
        """Tells the forecast which streams write now, if nobody reads or waits. Otherwise the last step's plan has told
        it."""
        running = list(self._admission.running)
        if len(self._admission.waiting) or any(one.phase is Phase.PREFILL for one in running):
            return
        limit_s = self._pace.limit_s(self._promises.tightest_itl_s(running))
        tokens_left = self._max_tokens - len(running)
        self._promises.forecast.note_streams([one.next_position + 1 for one in running], tokens_left, limit_s)

    def _first_begun(self, plan: StepPlan, now_s: float) -> Sequence | None:
        """Returns the first of the sequences whose reading was begun and that have no work in this step yet."""
        first: Sequence | None = None
        for sequence in plan.prefilling:
            if sequence.state is not SequenceState.RUNNING or self._admission.is_arriving(sequence):
                continue  # preempted on the way, or its blocks are not there yet
            if first is None or self._policy.goes_before(sequence, first, now_s):
                first = sequence
        return first

    def _candidate(self, plan: StepPlan, begun: Sequence | None, now_s: float) -> Candidate | None:
        """Returns the waiting sequence that is to be read now, if it fits."""
        while (head := self._admission.first(plan)) is not None:
            if begun is not None and not self._policy.goes_before(head, begun, now_s):
                return None
            candidate = self._admission.fitting(head)
            if candidate is not None or not self._admission.is_fetching(head):
                return candidate
        return None

    def _goes_on(self, plan: StepPlan, room: Room, sequence: Sequence, start: int) -> bool:
        num_tokens, end = self._most(plan, start, len(sequence.tokens)), len(sequence.tokens)
        if self._reads_whole and start + num_tokens < end:
            return False
        share = self._policy.step_share(sequence)
        return room.goes_on(start, num_tokens, samples=start + num_tokens == end, share=share)

    def _most(self, plan: StepPlan, start: int, end: int) -> int:
        """Returns how many of a sequence's tokens from `start` to `end` one step may take."""
        return min(plan.tokens_left, self._chunk_limit, end - start)

    def _add_chunk(self, plan: StepPlan, room: Room, sequence: Sequence, now_s: float, *, is_new: bool = False) -> None:
        """Adds a chunk of this sequence, if there is room. `is_new` means that this step opens its row. Then it gets
        work whatever the pace says: if the step fails, it must be among those that fail with it."""
        start = sequence.next_position
        end = sequence.prefill_len if self._reads_whole else start + 1
        if not self._admission.make_room(plan, sequence, end):
            return  # only older sequences hold what it needs: it has no chunk in this step
        limit = min(self._most(plan, start, sequence.prefill_len), self._ledger.room(sequence) - start)
        if (states := self._ledger.states) is not None:
            limit = states.chunk_end(sequence, start, start + limit) - start
        samples, share = start + limit == sequence.prefill_len, self._policy.step_share(sequence)
        taken = room.take(start, limit, samples=samples, may_wait=not is_new, share=share)
        if not taken:
            return
        if states is not None and taken < limit:
            taken = states.chunk_end(sequence, start, start + taken) - start
        chunk = prefill_chunk(sequence, start, start + taken)
        grants = self._ledger.reserve(sequence, chunk.end)
        assert grants is not None  # it lies within the ledger's room
        self._admission.open_row(plan, sequence)
        plan.add_chunk(sequence, chunk, grants)
        seconds = self._promises.forecast.prefill_s(start, chunk.end)
        plan.reading_s += seconds
        if chunk.end == sequence.prefill_len:
            self._note_due(room, sequence, now_s)
        self._policy.note_reading(sequence, seconds, now_s)
        timing = sequence.timing
        timing.prefill_chunks += 1
        timing.recomputed_tokens += max(0, min(chunk.end, sequence.high_water) - start)
        if timing.scheduled_s is None:
            timing.scheduled_s = now_s

    def _note_due(self, room: Room, sequence: Sequence, now_s: float) -> None:
        """Tells the room when the first token of this prompt, which ends in this step, is due. The step may have to
        wait for one in flight."""
        promise = sequence.timing.promise
        if promise is None or promise.ttft_s is None or sequence.num_output:
            return
        left_s = sequence.request.asked_s + promise.ttft_s - now_s
        room.note_due(left_s - self._promises.forecast.reading_step_s.value, left_s)


def prefill_chunk(sequence: Sequence, start: int, end: int) -> PrefillChunk:
    """Returns the chunk from `start` to `end`, or to where prompt logprobs begin to be wanted. Sample 0 reports them,
    each position once: positions that were launched before a preemption were reported then."""
    wanted = sequence.request.sampling.prompt_logprobs if sequence.sample_index == 0 else None
    last_reporting = sequence.prompt_len - 1  # the prompt's last position has no next prompt token
    if wanted is not None and sequence.high_water < last_reporting and start < last_reporting:
        if start < sequence.high_water:
            end, wanted = min(end, sequence.high_water), None
    else:
        wanted = None
    follows = wanted is not None and end < sequence.prompt_len
    is_last, pools = end == sequence.prefill_len, sequence.request.wants_vector
    return PrefillChunk(
        sequence.seq_id,
        start,
        tuple(sequence.tokens[start:end]),
        samples=is_last and not pools,
        prompt_logprobs=wanted,
        next_token_id=sequence.tokens[end] if follows else None,
        pools=is_last and pools,
    )
