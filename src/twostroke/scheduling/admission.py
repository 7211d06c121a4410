"""Who runs: admission of waiting sequences in their turn, and preemption of running ones when KV runs out, or when
somebody has none of the running slots.

Progress: what is accepted fits the pools alone; the oldest running sequence is never preempted; the first in line is
never passed by one that could run in its place. So whoever runs comes to an end, and whoever waits becomes the first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from twostroke.core.errors import BadRequestError
from twostroke.core.request import Request
from twostroke.core.sequence import Sequence, SequenceState
from twostroke.core.setting import shown
from twostroke.kv.ledger import KVLedger, PrefixMatch
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.line import Line
from twostroke.scheduling.plan import StepPlan
from twostroke.scheduling.queue import Rank, RankedQueue
from twostroke.scheduling.shares import Shares
from twostroke.scheduling.waits import Wait, WaitClock


class Candidate(NamedTuple):
    """Who may be let in next, and what the prefix cache has of it."""

    sequence: Sequence
    match: PrefixMatch


class Admission:
    def __init__(self, config: SchedulerConfig, ledger: KVLedger) -> None:
        self._config = config
        self._ledger = ledger
        self._token_limit, self._limited_by = config.max_context, f"max_context is {config.max_context}"
        pool_limit = ledger.max_total_tokens
        if pool_limit is not None and pool_limit < config.max_context:
            self._token_limit, self._limited_by = pool_limit, f"the KV cache has room for {pool_limit}"
        pools = zip(ledger.layout.groups, ledger.pools, strict=True)  # states do not grow: they need no reserve
        self._watermarks = [0 if g.is_state else math.ceil(pool.num_blocks * config.kv_watermark) for g, pool in pools]
        self._first_samples: dict[int, Sequence] = {}  # by sequence id, for siblings that wait for their prompt
        self._shares = Shares()
        self.waiting = Line(config.priority_aging_s, self._shares)
        self.running = RankedQueue[Sequence]()
        self.waits = WaitClock()
        self.rows_to_close: list[int] = []
        self.num_preemptions = 0
        self.prefix_hit_tokens = 0
        self.prefix_lookup_tokens = 0

    def total_tokens(self, request: Request) -> int:
        """Prompt plus output, at most; raises for what could never finish."""
        prompt_len, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        limit, where = self._token_limit, self._limited_by
        if prompt_len >= limit:
            raise BadRequestError(
                f"the prompt has {prompt_len} tokens, and {where} tokens, of which one at least is for the answer"
            )
        if max_tokens is None:
            return limit
        if prompt_len + max_tokens > limit:
            raise BadRequestError(
                f"the prompt's {prompt_len} tokens and max_tokens {shown(max_tokens)} make "
                f"{shown(prompt_len + max_tokens)} tokens, and {where}"
            )
        return prompt_len + max_tokens

    def enqueue(self, samples: list[Sequence]) -> None:
        if not len(self.running):  # whatever was waited for is over
            self.waits.tick(max(self.waits.now_s, samples[0].request.arrival_s))
        num_running, running_limit = len(self.running), self._config.running_limit
        free_blocks = tuple([pool.num_available for pool in self._ledger.pools])
        for sequence in samples:
            num_tokens, num_waiting = self.waiting.num_prompt_tokens, len(self.waiting)
            ahead = self.waiting.add(sequence)
            record = sequence.timing.queue
            record.ahead, record.ahead_tokens = ahead, num_tokens * ahead // max(1, num_waiting)
            record.running, record.running_limit, record.free_blocks = num_running, running_limit, free_blocks
            self.waits.begin(sequence)
            if sequence is not samples[0]:
                self._first_samples[sequence.seq_id] = samples[0]

    @property
    def is_taken(self) -> bool:
        """Whether every running slot is."""
        return len(self.running) >= self._config.running_limit

    @property
    def may_admit(self) -> bool:
        """Whether somebody waits, as far as is known for nothing but a step: not for a slot, blocks or a sibling."""
        return len(self.waiting) > 0 and not self.is_taken and self.waits.last_reason in (Wait.STEP, Wait.PROMPTS)

    # Waiting to running

    def next(self, plan: StepPlan) -> Candidate | None:
        """The first in line, if it may be let in."""
        if plan.has_preempted or self.is_taken:
            self.waits.reason = Wait.BLOCKS if plan.has_preempted else Wait.SLOTS
            return None
        head = self.waiting.first(self._is_eligible)
        if head is None:
            self.waits.reason = Wait.SIBLING if len(self.waiting) else Wait.STEP
            return None
        match = self._ledger.match(head)
        target = min(len(head.tokens) + 1, head.max_total_tokens - 1)
        # Alone, it always may: it fits, if need be by chunks as small as the room.
        if len(self.running):
            short = self._ledger.shortage(match, target, self._config.chunk_limit, self._spare_blocks())
            if any(short):
                self.waits.refuse(head, short)
                return None
        return Candidate(head, match)

    def admit(self, plan: StepPlan, candidate: Candidate) -> None:
        """Let it in: it is given its matched blocks and a row, and no work yet."""
        head, match = candidate
        self.running.add(head, self._rank_behind_others(head, self.waiting.take(head, self.waits.now_s)))
        self._shares.add(head)
        self._first_samples.pop(head.seq_id, None)
        self._ledger.begin(head, match)
        head.state = SequenceState.RUNNING
        head.num_computed = match.num_tokens
        head.prefill_len = len(head.tokens)
        if head.timing.preemptions == 0:
            head.timing.cached_tokens = match.num_tokens
            head.timing.prefix = self._ledger.prefix_break(head, match)
            self.waits.end(head)
            self.prefix_hit_tokens += match.num_tokens
            self.prefix_lookup_tokens += head.prompt_len
        plan.add_join(head)

    def _rank_behind_others(self, sequence: Sequence, rank: Rank) -> Rank:
        """Between tenants whoever was let in first is the older: no priority takes another tenant's KV."""
        tenant, running = sequence.request.tenant, self.running
        others = (running.rank(other) for other in running if other.request.tenant != tenant)
        youngest = max(others, default=rank)
        return rank if rank >= youngest else (youngest[0], youngest[1] + 1, sequence.seq_id)

    def note_full(self) -> None:
        """A step has no tokens or seconds left for whoever still waits."""
        self.waits.reason = Wait.SLOTS if self.is_taken else Wait.PROMPTS

    def _is_eligible(self, sequence: Sequence) -> bool:
        """Sample 0 computes the prompt for its siblings; a preempted sequence first learns what it has in flight.
        Whoever is not eligible may be passed, but not forever: both conditions end by themselves."""
        if sequence.num_in_flight:
            return False
        first = self._first_samples.get(sequence.seq_id)
        return first is None or first.num_output > 0 or first.is_finished

    def _spare_blocks(self) -> list[int]:
        """One a group: what admission must leave free: the watermark, and what running prefills still have to take."""
        spare = list(self._watermarks)
        for sequence in self.running:
            if sequence.num_computed + sequence.num_in_flight < sequence.prefill_len:
                target = min(sequence.prefill_len + 1, sequence.max_total_tokens - 1)
                ahead = self._ledger.blocks_to_come(sequence, target, self._config.chunk_limit)
                spare = [left + more for left, more in zip(spare, ahead, strict=True)]
        return spare

    # Running to waiting

    def make_way(self) -> None:
        """Where all slots are taken and whoever is first in line has none, one of those who hold several gives way."""
        if (sequence := self.who_gives_way()) is not None:
            self._pause(sequence)
            sequence.timing.gave_way += 1
            self.waiting.give_way(sequence, self.waits.now_s)

    def who_gives_way(self) -> Sequence | None:
        if not len(self.waiting) or not self.is_taken:
            return None
        head = self.waiting.first(self._is_eligible)
        return None if head is None else self._shares.who_gives_way(head, reversed(self.running))

    def make_room(self, plan: StepPlan, sequence: Sequence, end: int) -> bool:
        """Blocks for `sequence` up to `end`, if need be by preempting younger ones, the youngest first. False: only
        older ones, or such as have work in this step, could give way."""
        while self._ledger.room(sequence) < end:
            victim = self._youngest(plan)
            if victim is None or self.running.rank(victim) <= self.running.rank(sequence):
                return False
            self._preempt(victim)
            plan.has_preempted = True
        return True

    def _youngest(self, plan: StepPlan) -> Sequence | None:
        return next((sequence for sequence in reversed(self.running) if sequence not in plan), None)

    def _preempt(self, sequence: Sequence) -> None:
        rank = self.running.rank(sequence)
        self._pause(sequence)
        self.waiting.resume(sequence, rank)

    def _pause(self, sequence: Sequence) -> None:
        """Its blocks go, its tokens stay: it is computed again later, from what the prefix index still has. Tokens in
        flight will arrive and be kept."""
        self.stop_running(sequence)
        sequence.state = SequenceState.WAITING
        sequence.high_water = max(sequence.high_water, sequence.least_next_position)
        sequence.num_computed = 0
        sequence.timing.preemptions += 1
        sequence.timing.preempted_s.append(self.waits.now_s)
        self.num_preemptions += 1

    def stop_running(self, sequence: Sequence, *, tainted: bool = False) -> None:
        self.running.remove(sequence)
        self._shares.remove(sequence)
        self._ledger.release(sequence, tainted=tainted)
        self.rows_to_close.append(sequence.seq_id)

    def retire(self, sequence: Sequence, *, tainted: bool = False) -> None:
        """Forget a sequence that is finished, wherever it was."""
        if sequence.state is SequenceState.RUNNING:
            self.stop_running(sequence, tainted=tainted)
        else:
            self.waiting.drop(sequence)
            self._first_samples.pop(sequence.seq_id, None)
            self.waits.end(sequence)
        self._ledger.retire(sequence)
