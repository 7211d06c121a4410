"""Turns queues, budget and ledger into frozen Steps. Only `apply` advances a Sequence. It may run ahead of the results:
what is launched counts as in flight, and nothing reads a token that is still being sampled. What differs between the
phases is in prefill.py and decode.py; admission.py decides who runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Series

from twostroke.core.errors import BadRequestError, PromiseError
from twostroke.core.kv_layout import KVLayout
from twostroke.core.request import Request
from twostroke.core.sequence import FinishReason, Sequence, SequenceState
from twostroke.core.service_level import ServiceLevels
from twostroke.core.step import DecodeSlot, PrefillChunk, SampledToken, Step, StepResult
from twostroke.core.step_record import ChunkRecord, StepRecord
from twostroke.kv.ledger import KVLedger
from twostroke.scheduling.admission import Admission
from twostroke.scheduling.advance import NO_TOKEN, TOO_MANY_TOKENS, Launched, SequenceAdvance, chunk_fault, land
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.counts import SchedulerCounts, counts_of
from twostroke.scheduling.decode import DecodePlanner, TextEnds, finish_reason, until_over
from twostroke.scheduling.drafted import forget_dropped, note_drafts
from twostroke.scheduling.forecast import Forecast, StepError, StepSeconds, exactly
from twostroke.scheduling.gaps import Gaps
from twostroke.scheduling.newcomers import Newcomers, samples_of
from twostroke.scheduling.pace import Pace
from twostroke.scheduling.plan import Drafting, StepPlan
from twostroke.scheduling.policies import DEFAULT_POLICY, policy_named
from twostroke.scheduling.prefill import PrefillPlanner
from twostroke.scheduling.promises import Promises
from twostroke.scheduling.readings import Readings
from twostroke.scheduling.staying import Staying


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        layout: KVLayout,
        *,
        ledger: KVLedger | None = None,
        pace: Pace | None = None,
        drafting: Drafting | None = None,
        max_drafts: int | None = None,
        policy: str = DEFAULT_POLICY,
        levels: ServiceLevels | None = None,
        step_seconds: StepSeconds | None = None,
        step_error: StepError = exactly,
        staying: Staying | None = None,
    ) -> None:
        """`pace`: how much prefill a step may hold; None: as much as its token budget. `drafting`: decides what is
        drafted for streams; None: nothing. `max_drafts`: the most drafts that the backend takes in a slot; None: any
        number. `policy`: the name of the rule that decides who is next. `levels`: the classes of requests; None: one,
        without a promise. `step_seconds`: predicts a step's seconds; None: nobody can. `step_error`: how far off
        predictions were on average. `staying`: decides which prompts are left to the engine that writes the answer;
        None: each is read here."""
        self.config = config
        self._staying = staying
        self._forecast = Forecast(step_seconds, step_error)
        self.ledger = ledger or KVLedger(
            layout, prefix_caching=config.prefix_caching, snapshot_tokens=config.snapshot_tokens
        )
        self._pace, self._max_drafts = pace, max_drafts
        self._readings = Readings()
        self._join(policy, levels or ServiceLevels(), drafting)
        self._launched: deque[Launched] = deque()  # oldest first: results arrive in launch order
        self._samples: dict[str, list[Sequence]] = {}  # unfinished ones, by request
        self._stuck: frozenset[int] = frozenset()  # in the last result: sequences whose error spoilt no KV
        self._next_seq_id = 0
        self._next_step_id = 0
        self._now_s = 0.0

    def _join(self, policy: str, levels: ServiceLevels, drafting: Drafting | None) -> None:
        config, ledger = self.config, self.ledger
        self._promises = Promises(levels, self._forecast, config.max_tokens_per_step)
        self._policy = policy_named(policy, self._forecast, config.priority_aging_s, levels)
        gaps = Gaps(self._promises, self._forecast, holds=self._policy.paces)
        self._admission = Admission(config, ledger, self._policy, self._forecast, gaps)
        self._decodes = DecodePlanner(ledger, self._admission, drafting, self._max_drafts)
        self._prefills = PrefillPlanner(config, ledger, self._admission, self._policy, self._promises, self._pace)
        self._newcomers = Newcomers(
            ledger, self._forecast, self._promises, self._admission, self._prefills, self._staying
        )

    # In and out

    def add(self, request: Request, text_ends: TextEnds | None = None) -> list[Sequence]:
        """Queues a request and returns a Sequence for each sample. They are finished already if the prompt is left to
        another engine, or if a first token from there ended the answer. Raises BadRequestError for what could never
        finish, and PromiseError for what would be late, if its class refuses that."""
        if request.request_id in self._samples:
            raise BadRequestError(f"the request id {request.request_id!r} is in use by a request that is not finished")
        level = self._promises.levels.named(request.service_level)
        max_total_tokens = self._admission.total_tokens(request)
        samples = samples_of(request, self._next_seq_id, max_total_tokens)
        self._next_seq_id += len(samples)
        try:
            waits_here = self._newcomers.let_in(level, samples, text_ends)
        except PromiseError:
            self._forget(*samples)
            raise
        if not waits_here:
            self._forget(*samples)
            return samples
        self._samples[request.request_id] = list(samples)
        self._admission.enqueue(samples)
        self._readings.begin(samples)
        return samples

    def _forget(self, *sequences: Sequence) -> None:
        """Drops what was kept of sequences that are over, or were never let in."""
        for sequence in sequences:
            self._readings.end(sequence)
            self.ledger.retire(sequence)
            self._forecast.forget(sequence)

    def abort(self, request_id: str, now_s: float | None = None) -> list[Sequence]:
        """Ends every unfinished sample of a request, at any moment, and returns them. An unknown id is no error."""
        ended = list(self._samples.get(request_id, ()))
        for sequence in ended:
            self.finish(sequence, FinishReason.ABORT, now_s=now_s)
        return ended

    def finish(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None, now_s: float | None = None
    ) -> bool:
        """Ends a sequence now, and drops what is in flight for it. Returns False if it had already ended."""
        if sequence.is_finished:
            return False
        if sequence.state is SequenceState.RUNNING:
            self._forecast.note_end(self._now_s if now_s is None else now_s)
        if went_well := reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._admission.growth.note_length(sequence)
        if sequence.request.lease_id:
            sequence.handoff = self.ledger.hand_on(sequence, went_well=went_well)
        self._admission.retire(sequence, tainted=reason is FinishReason.ERROR and sequence.seq_id not in self._stuck)
        self._forget(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        sequence.error = error
        sequence.timing.finished_s = self._now_s if now_s is None else now_s
        samples = self._samples[sequence.request.request_id]
        samples.remove(sequence)
        if not samples:
            del self._samples[sequence.request.request_id]
        if not self._samples:
            self._forecast.note_idle()
        return True

    @property
    def has_work(self) -> bool:
        """Whether a sequence is unfinished, or a launched step is not applied yet."""
        return bool(self._samples or self._launched)

    def counts(self) -> SchedulerCounts:
        levels, forecast = self._promises.levels, self._forecast
        return counts_of(self._admission, self.ledger, len(self._launched), levels, forecast, self._now_s)

    def unfinished(self, request_id: str | None = None) -> list[Sequence]:
        """Returns the samples of a request that have not ended. None means those of all requests."""
        if request_id is not None:
            return list(self._samples.get(request_id, ()))
        return [sequence for samples in self._samples.values() for sequence in samples]

    @property
    def line_lengths(self) -> tuple[int, int]:
        """How many sequences wait, and how many run."""
        return len(self._admission.waiting), len(self._admission.running)

    def steady_streams(self) -> list[Sequence]:
        """Returns all running sequences, if steps hold one slot of each and no more: nobody reads, nobody is at the end
        of its answer, and nobody who waits could join. Otherwise returns none."""
        return self._decodes.steady_streams()

    def settle_tiers(self) -> None:
        """Takes in what came from disk and from other engines, and ends leases that are over, without a step."""
        if self.ledger.tiers is not None:
            self.ledger.tiers.settle()

    def wait_for_tiers(self, timeout_s: float) -> None:
        """Waits until some blocks have come from disk that a sequence needs, or this long."""
        tiers = self.ledger.tiers
        if tiers is not None and tiers.num_fetching:
            tiers.wait(timeout_s)

    def clear_prefixes(self) -> None:
        """Forgets cached prefixes that no running sequence holds, at any moment."""
        self.ledger.clear_prefixes()

    def limit_chunks(self, max_chunk_tokens: int | None) -> None:
        """Limits chunks of prompts to that many tokens from the next step on. None means the config's limit, which
        always holds."""
        self._prefills.limit_chunks(max_chunk_tokens)

    def draft(self, drafting: Drafting | None) -> None:
        """Sets who decides what is drafted for streams, from the next step on. None means that nothing is drafted."""
        self._decodes.drafting = drafting

    def use_policy(self, policy: str, levels: ServiceLevels) -> tuple[str, ServiceLevels]:
        """Changes the policy and the promises, for a caller that compares policies on one engine. Allowed only while
        nobody waits or runs. Returns what held before."""
        if self.has_work:
            raise ValueError("a policy cannot change while requests wait or run")
        before, admission = (self._policy.name, self._promises.levels), self._admission
        self._join(policy, levels, self._decodes.drafting)
        self._admission.take_over(admission)
        return before

    def check(self) -> None:
        """Proves that no block is lost or shared wrongly. Raises ConservationError."""
        self.ledger.check(self._admission.running)

    # The loop

    def schedule(self, now_s: float) -> Step | None:
        """Returns the next step to launch. None means that a result or a request is needed first."""
        self._now_s = now_s
        if self.ledger.tiers is not None:
            self.ledger.tiers.settle()
        self._admission.waits.tick(now_s)
        self._forecast.note_kv(now_s, self.ledger.pools)
        self._admission.make_way()
        plan = StepPlan(self.config.max_tokens_per_step)
        self._decodes.fill(plan)
        self._prefills.fill(plan, now_s)
        if not len(plan):
            return None
        if self.ledger.states is not None:
            plan.take_snapshots(self.ledger.states)
        leaves, copies = tuple(self._admission.rows_to_close), self.ledger.copies(self._next_step_id)
        step = plan.freeze(self._next_step_id, leaves, self._decodes.drafting, copies)
        self._admission.rows_to_close.clear()
        self._next_step_id += 1
        self._launched.append(Launched(step, plan.sequences, plan.reading_s))
        return step

    def apply(
        self,
        step: Step,
        result: StepResult,
        now_s: float,
        record: StepRecord | None = None,
        text_ends: TextEnds | None = None,
    ) -> list[SequenceAdvance]:
        """Takes in the results of the oldest launched step. Sequences that read a chunk in it keep `record`."""
        launched = self._take(step, now_s)
        if self.ledger.tiers is not None:
            self.ledger.tiers.landed(step, result.compute_s)
        if result.step_id != step.step_id:
            raise ValueError(f"the result of step {result.step_id} was given for step {step.step_id}")
        sequences = launched.sequences
        self._stuck = result.stuck
        spoilt = (seq_id for seq_id in result.errors if seq_id not in result.stuck)
        self.ledger.taint_ended(sequences[seq_id] for seq_id in spoilt if seq_id in sequences)
        self._note_seconds(launched, result.compute_s)
        self._readings.note(step, sequences, result.compute_s)
        spared_s = note_drafts(step, result, sequences)
        advances = self._advance_slots(step.decodes, sequences, result, text_ends, spared_s)
        for chunk in step.prefills:
            advance = self._advance_chunk(sequences[chunk.seq_id], chunk, result, record)
            if advance is not None:
                advances.append(advance)
        return advances

    def _note_seconds(self, launched: Launched, compute_s: float) -> None:
        decodes, sequences = launched.step.decodes, launched.sequences
        self._forecast.note_step(compute_s, launched.reading_s, len(decodes))
        if decodes and self._policy.counts_writing:
            streams = [sequences[slot.seq_id] for slot in decodes]
            self._policy.note_writing(streams, max(0.0, compute_s - launched.reading_s))

    def fail(self, step: Step, message: str, now_s: float, *, launched: bool = True) -> list[SequenceAdvance]:
        """The backend raised on the oldest launched step: its sequences end with an error, and all others go on. If it
        was never `launched`, the backend has not seen its joins and leaves."""
        sequences = self._take(step, now_s).sequences
        advances = []
        lost: list[DecodeSlot | PrefillChunk] = [*step.decodes, *step.prefills]
        for work in lost:
            sequence = sequences[work.seq_id]
            land(sequence, work)
            if self.finish(sequence, FinishReason.ERROR, message):
                advances.append(SequenceAdvance(sequence, finished=True))
        unloaded = self._admission.without_blocks(self.ledger.copies_failed(step, launched=launched))
        for sequence in unloaded:
            self.finish(sequence, FinishReason.ERROR, message)
        advances += [SequenceAdvance(sequence, finished=True) for sequence in unloaded]
        if not launched:
            never_opened = {join.seq_id for join in step.joins}
            to_close = [seq_id for seq_id in self._admission.rows_to_close if seq_id not in never_opened]
            self._admission.rows_to_close[:] = [*step.leaves, *to_close]
        return advances

    def _take(self, step: Step, now_s: float) -> Launched:
        if not self._launched or self._launched[0].step.step_id != step.step_id:
            raise ValueError(f"step {step.step_id} is not the oldest launched step")
        self._now_s = now_s
        return self._launched.popleft()

    def _advance_slots(
        self,
        slots: Series[DecodeSlot],
        sequences: dict[int, Sequence],
        result: StepResult,
        text_ends: TextEnds | None,
        spared_s: float,
    ) -> list[SequenceAdvance]:
        """Advances decode slots. An engine spends most of its time between steps here, so the usual case of one token
        is written out, and repeats what `_take_in` does."""
        sampled, errors, compute_s, now_s = result.sampled, result.errors, result.compute_s, self._now_s
        commit = self.ledger.commit
        advances = []
        for slot in slots:
            seq_id, _, drafts = slot
            sequence = sequences[seq_id]
            if drafts is None:
                sequence.num_in_flight -= 1
            else:
                land(sequence, slot)
            state = sequence.state
            if state is SequenceState.FINISHED:
                continue  # it ended after this step was launched: its slot was wasted, no more
            timing, tokens = sequence.timing, sampled.get(seq_id)
            timing.decode_compute_s += compute_s
            if tokens is None or len(tokens) != 1 or seq_id in errors:
                error = errors.get(seq_id)
                advances.append(self._advance_slot(sequence, slot, tokens or (), error, text_ends, spared_s))
                continue
            if state is SequenceState.RUNNING:
                sequence.num_computed += 1
                commit(sequence)
            known, token_id = sequence.tokens, tokens[0][0]
            known.append(token_id)
            timing.token_times_s.append(now_s)
            may_end = token_id in sequence.stop_ids or len(known) >= sequence.max_total_tokens
            advances.append(SequenceAdvance(sequence, tokens, (), None, may_end and self._end_if_over(sequence)))
        return advances

    def _advance_slot(
        self,
        sequence: Sequence,
        slot: DecodeSlot,
        sampled: tuple[SampledToken, ...],
        error: str | None,
        text_ends: TextEnds | None,
        spared_s: float,
    ) -> SequenceAdvance:
        """Advances a slot of several tokens, none, or an error. `spared_s` was noted for each draft that held."""
        if len(sampled) > slot.num_queries:
            return self._advance_to_error(sequence, TOO_MANY_TOKENS)
        kept, is_over = until_over(sequence, sampled, text_ends)
        if slot.drafts is not None:
            forget_dropped(sequence, len(sampled) - len(kept), spared_s)
        finished = self._take_in(sequence, len(kept), kept)
        if not is_over and (error is not None or not sampled):
            finished = self.finish(sequence, FinishReason.ERROR, error or NO_TOKEN)
        return SequenceAdvance(sequence, kept, finished=finished)

    def _advance_chunk(
        self, sequence: Sequence, chunk: PrefillChunk, result: StepResult, record: StepRecord | None
    ) -> SequenceAdvance | None:
        num_tokens, seq_id = len(chunk.token_ids), chunk.seq_id
        land(sequence, chunk)
        if sequence.state is SequenceState.FINISHED:
            return None
        sequence.timing.prefill_compute_s += result.compute_s
        if record is not None:
            sequence.timing.chunks.append(ChunkRecord(chunk.start, num_tokens, record))
        if (error := chunk_fault(chunk, result)) is not None:
            return self._advance_to_error(sequence, error)
        sampled = result.sampled[seq_id] if chunk.samples else ()
        vector = result.vectors[seq_id] if chunk.pools else None
        if sampled or chunk.pools:
            self._readings.end(sequence)
        finished = self._take_in(sequence, num_tokens, sampled)
        computed = sequence.num_computed or None  # it was preempted meanwhile
        if chunk.pools:
            finished = self.finish(sequence, FinishReason.STOP)
        return SequenceAdvance(sequence, sampled, result.prompt_logprobs.get(seq_id, ()), computed, finished, vector)

    def _take_in(self, sequence: Sequence, num_tokens: int, sampled: tuple[SampledToken, ...]) -> bool:
        """Takes note that `num_tokens` more positions are computed and that these tokens follow. Returns True if the
        last of them ends the answer."""
        sequence.tokens += [token.token_id for token in sampled]
        sequence.timing.token_times_s += [self._now_s] * len(sampled)
        # If it does not run, it was preempted meanwhile: its KV is lost, its tokens are not.
        if sequence.state is SequenceState.RUNNING:
            sequence.num_computed += num_tokens
            self.ledger.commit(sequence)
        return bool(sampled) and self._end_if_over(sequence)

    def _advance_to_error(self, sequence: Sequence, error: str) -> SequenceAdvance:
        self.finish(sequence, FinishReason.ERROR, error)
        return SequenceAdvance(sequence, finished=True)

    def _end_if_over(self, sequence: Sequence) -> bool:
        reason = finish_reason(sequence, sequence.tokens[-1], len(sequence.tokens))
        return reason is not None and self.finish(sequence, reason)
