"""Decides who runs: it admits waiting sequences in their turn, and preempts running ones when KV runs out, or when
somebody has fewer of the running slots than others.

A sequence is let in if it is expected to fit until it ends, by the lengths that answers were measured to have. If that
was wrong, a younger sequence loses its KV: one that is not made late by it and costs least to compute again. Tokens
that were emitted are kept.

Progress: an accepted request fits in the pools alone, and alone it is always let in. A sequence that needs blocks takes
them from younger ones only, so the oldest running sequence is never preempted. The first in line is never passed by one
that could run in its place, and the policy's order lets only finitely many go before one that waits. So the oldest
comes to an end, each running sequence becomes the oldest, and each waiting one becomes the first. A sequence that gives
its slot away has written a number of tokens since it last did, so that ends, too."""

from __future__ import annotations

import math
from itertools import islice
from operator import add
from typing import NamedTuple

from twostroke.core.sequence import Phase, Sequence, SequenceState
from twostroke.core.timing import NO_TIERS, TierTokens
from twostroke.cost.floor import StepWork
from twostroke.kv.ledger import KVLedger
from twostroke.kv.matching import PrefixMatch
from twostroke.kv.recall import load_seconds, tier_tokens
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.forecast import Forecast
from twostroke.scheduling.gaps import Gaps
from twostroke.scheduling.growth import Growth
from twostroke.scheduling.line import Line
from twostroke.scheduling.plan import StepPlan
from twostroke.scheduling.policies.policy import Policy
from twostroke.scheduling.queue import Rank, RankedQueue
from twostroke.scheduling.shares import Shares
from twostroke.scheduling.token_limit import TokenLimit
from twostroke.scheduling.victims import loss
from twostroke.scheduling.waits import Wait, WaitClock

MOST_VICTIMS = 16
"""How many of the youngest sequences are looked at when one has to give up its KV."""


class Candidate(NamedTuple):
    """A sequence that may be let in next, and what the prefix cache has of it."""

    sequence: Sequence
    match: PrefixMatch


class Admission:
    def __init__(
        self, config: SchedulerConfig, ledger: KVLedger, policy: Policy, forecast: Forecast, gaps: Gaps
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._policy = policy
        self._forecast = forecast
        self.gaps = gaps
        self.growth = Growth(config, ledger)
        self.total_tokens = TokenLimit(config, ledger.max_total_tokens).total_tokens
        self._first_samples: dict[int, Sequence] = {}  # by sequence id, for siblings that wait for their prompt
        self._shares = Shares()
        self.waiting = Line(policy, self._shares)
        self.running = RankedQueue[Sequence]()
        self.waits = WaitClock()
        self.rows_to_close: list[int] = []
        self._arriving: dict[int, float] = {}  # let in without a row yet: when their blocks should be there
        self.step_limit_s = math.inf
        """Seconds that a step beside the present streams may take. Infinite means that there is no limit."""
        self._held_back = False
        self.num_preemptions = 0
        self.prefix_hit_tokens = 0
        self.prefix_lookup_tokens = 0
        self.tier_hit_tokens = NO_TIERS

    def enqueue(self, samples: list[Sequence]) -> None:
        if not len(self.running):  # nothing is left of what was waited for
            self.waits.tick(max(self.waits.now_s, samples[0].request.arrival_s))
        num_running, running_limit = len(self.running), self._config.running_limit
        free_blocks = tuple([pool.num_available for pool in self._ledger.pools])
        for sequence in samples:
            num_tokens, num_waiting = self.waiting.num_prompt_tokens, len(self.waiting)
            self._policy.enter(sequence)
            ahead = self.waiting.add(sequence)
            record = sequence.timing.queue
            record.ahead, record.ahead_tokens = ahead, num_tokens * ahead // max(1, num_waiting)
            record.running, record.running_limit, record.free_blocks = num_running, running_limit, free_blocks
            self.waits.begin(sequence)
            if sequence is not samples[0]:
                self._first_samples[sequence.seq_id] = samples[0]
        if self._ledger.handing is not None:
            self._ledger.handing.fetch(samples[0])
        tiers = self._ledger.tiers
        if tiers is not None and tiers.disk is not None:
            self._ledger.recall(samples[0], self._ledger.match(samples[0]))  # the disk is read while it waits

    def ahead_of(self, newcomer: Sequence) -> tuple[float, int]:
        """Returns the predicted seconds of reading that go before it, and how many waiting sequences do. Of its own
        flow these are all that rank before it and may still be in time. Of every other flow it is as much as its own
        has, for flows take turns."""
        flow, rank, now_s = self._policy.flow(newcomer), self._policy.rank(newcomer), self.waits.now_s
        own_s, own, others = 0.0, 0, dict[str, tuple[float, int]]()
        reading = [(one, 0) for one in self.running if one.phase is Phase.PREFILL]
        for sequence, waits in (*reading, *((one, 1) for one in self.waiting)):
            seconds, other = self._forecast.reading_s(sequence), self._policy.flow(sequence)
            if other != flow:
                before_s, before = others.get(other, (0.0, 0))
                others[other] = before_s + seconds, before + waits
            elif self._policy.rank(sequence) < rank and self._policy.lost_s(sequence) >= now_s:
                own_s, own = own_s + seconds, own + waits
        most_s, most = own_s + self._forecast.reading_s(newcomer), own + 1
        for before_s, before in others.values():
            own_s, own = own_s + min(before_s, most_s), own + min(before, most)
        return own_s, own

    @property
    def num_slots(self) -> int:
        return self._config.running_limit

    @property
    def num_free_slots(self) -> int:
        return self._config.running_limit - len(self.running)

    @property
    def is_taken(self) -> bool:
        """Whether every running slot is taken."""
        return len(self.running) >= self._config.running_limit

    @property
    def may_admit(self) -> bool:
        """Whether somebody waits who, as far as is known, needs only a step: no slot, no blocks and no sibling."""
        return len(self.waiting) > 0 and not self.is_taken and self.waits.last_reason in (Wait.STEP, Wait.PROMPTS)

    # Waiting to running

    def first(self, plan: StepPlan) -> Sequence | None:
        """Returns the first in line, if there is a slot for it."""
        if plan.has_preempted or self.is_taken:
            self.waits.reason = Wait.BLOCKS if plan.has_preempted else Wait.SLOTS
            return None
        self._held_back = False
        head = self.waiting.first(self._is_eligible, self.waits.now_s, self._may_begin)
        if head is None:
            self.waits.reason = self._why_nobody()
        return head

    def _may_begin(self, flow: str) -> bool:
        """Whether a flow may begin another request. If its streams take more of a step than its share, it leaves the
        rest to other flows that have work, so that these can be read in time. It then waits for its own streams alone,
        and those end."""
        share = self._policy.share(flow)
        if share >= 1.0 or self.step_limit_s == math.inf:
            return True
        running = [(one.next_position + 1, self._policy.flow(one) == flow) for one in self.running]
        contexts, others = [length for length, _ in running], [length for length, is_own in running if not is_own]
        if len(others) == len(contexts):
            return True
        step_seconds = self._forecast.step_seconds
        taken_s = step_seconds(StepWork(contexts=contexts)) - step_seconds(StepWork(contexts=others))
        may_begin = taken_s < share * self.step_limit_s
        self._held_back = self._held_back or not may_begin
        return may_begin

    def fitting(self, head: Sequence) -> Candidate | None:
        """Returns the first in line with what the cache has of it, if streams keep their gaps with it, there is KV for
        it, and it need not wait for the disk."""
        if self.gaps.holds(head, self.running, self.waits.now_s, self.waiting):
            self.waits.reason = Wait.GAPS
            return None
        match = self._ledger.match(head)
        if self._is_short(head, match):
            return None
        recalled = self._ledger.recall(head, match)
        if recalled is None or (recalled.loads and self._is_short(head, recalled)):
            return None
        return Candidate(head, recalled)

    def is_fetching(self, sequence: Sequence) -> bool:
        """Whether its blocks are on their way from disk. Others may then pass it."""
        tiers = self._ledger.tiers
        return tiers is not None and tiers.is_fetching(sequence.seq_id)

    def _is_short(self, head: Sequence, match: PrefixMatch) -> bool:
        """Whether the first in line does not fit in KV now."""
        short = self.shortage(head, match)
        if any(short):
            self.waits.refuse(head, short)
        return any(short)

    def shortage(self, newcomer: Sequence, match: PrefixMatch, num_samples: int = 1) -> tuple[int, ...]:
        """Returns how many blocks of each group are missing to let it in, or all of its samples."""
        if not len(self.running):  # alone it may always run: it fits, if need be in chunks as small as the room
            return ()
        return self.growth.shortage(newcomer, match, self.running, num_samples)

    def admit(self, plan: StepPlan, candidate: Candidate) -> None:
        """Lets a sequence in: it gets its matched blocks and a row, and no work yet."""
        head, match = candidate
        self.gaps.let_in(head, self.running)
        self.running.add(head, self._rank_behind_others(head, self.waiting.take(head, self.waits.now_s)))
        self._shares.add(head)
        self._first_samples.pop(head.seq_id, None)
        tiers_used = tier_tokens(match, self._ledger.layout.block_size)
        self._ledger.begin(head, match)
        head.state = SequenceState.RUNNING
        head.num_computed = match.num_tokens
        head.prefill_len = len(head.tokens)
        if head.timing.preemptions == 0:
            head.timing.cached_tokens = match.num_tokens
            head.timing.tier_tokens = tiers_used
            self.tier_hit_tokens = TierTokens(*map(add, self.tier_hit_tokens, tiers_used))
            head.timing.prefix = self._ledger.prefix_break(head, match)
            self.waits.end(head)
            self.prefix_hit_tokens += match.num_tokens
            self.prefix_lookup_tokens += head.prompt_len
        tiers = self._ledger.tiers
        if tiers is not None:
            tiers.let_in(head.seq_id)
            tiers.totals.recomputed_tokens += match.num_passed_by
            if match.loads and len(plan):  # its blocks come while this step computes for others
                self._arriving[head.seq_id] = self.waits.now_s + load_seconds(tiers, match)
                return
        plan.add_join(head)

    def is_arriving(self, sequence: Sequence) -> bool:
        """Whether its blocks are being loaded, and it has no row yet."""
        tiers, due_s = self._ledger.tiers, self._arriving.get(sequence.seq_id)
        return due_s is not None and due_s > self.waits.now_s and tiers is not None and not tiers.is_quiet

    def arriving(self) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.seq_id in self._arriving]

    def open_row(self, plan: StepPlan, sequence: Sequence) -> None:
        """Opens the row of a sequence that has work in this step, if that was put off."""
        if self._arriving.pop(sequence.seq_id, None) is not None:
            plan.add_join(sequence)

    def _why_nobody(self) -> Wait:
        tiers = self._ledger.tiers
        if tiers is not None and tiers.num_fetching:
            return Wait.TIERS
        if not len(self.waiting):
            return Wait.STEP
        return Wait.SLOTS if self._held_back else Wait.SIBLING

    def _rank_behind_others(self, sequence: Sequence, rank: Rank) -> Rank:
        """Returns the rank that a sequence runs with. Between flows the one that was let in first is the older, so that
        no priority takes another tenant's KV."""
        flow, running = self._policy.flow(sequence), self.running
        others = (running.rank(other) for other in running if self._policy.flow(other) != flow)
        youngest = max(others, default=rank)
        return rank if rank >= youngest else (youngest[0], youngest[1], youngest[2] + 1, sequence.seq_id)

    def note_full(self) -> None:
        """Notes that a step has no tokens or seconds left for those who still wait."""
        self.waits.reason = Wait.SLOTS if self.is_taken else Wait.PROMPTS

    def _is_eligible(self, sequence: Sequence) -> bool:
        """Whether it may be let in. Sample 0 computes the prompt for its siblings, and a preempted sequence waits for
        its tokens in flight. Others may pass a sequence that is not eligible, but not forever: both conditions end by
        themselves."""
        tiers = self._ledger.tiers
        if sequence.num_in_flight or (tiers is not None and tiers.is_fetching(sequence.seq_id)):
            return False
        first = self._first_samples.get(sequence.seq_id)
        return first is None or first.num_output > 0 or first.is_finished

    # Running to waiting

    def make_way(self) -> None:
        """If the first in line waits for a slot, or for shorter steps, one of those who hold several slots gives
        way."""
        if (sequence := self.who_gives_way()) is not None:
            self._pause(sequence)
            sequence.timing.gave_way += 1
            self.waiting.give_way(sequence, self.waits.now_s)

    def who_gives_way(self) -> Sequence | None:
        if not len(self.waiting) or not (self.is_taken or self.gaps.may_hold):
            return None
        head = self.waiting.first(self._is_eligible, self.waits.now_s)
        if head is None or not (self.is_taken or self.gaps.holds(head, self.running, self.waits.now_s, self.waiting)):
            return None
        return self.who_makes_way_for(head)

    def who_makes_way_for(self, head: Sequence) -> Sequence | None:
        """Returns who would give way to it, if it were first in line and found no slot."""
        return self._shares.who_gives_way(head, reversed(self.running)) if self._policy.calls_take_turns else None

    def num_making_way_for(self, head: Sequence, number: int) -> int:
        """Returns how many of this many slots, which it and its siblings want one after another, others would give
        them."""
        if self.who_makes_way_for(head) is None:
            return 0
        return self._shares.num_giving_way(head, number)

    def make_room(self, plan: StepPlan, sequence: Sequence, end: int) -> bool:
        """Makes room for blocks of `sequence` up to `end`, if need be by preempting younger ones. Returns False if only
        older ones, or such as have work in this step, could give way."""
        while self._ledger.room(sequence) < end:
            victim = self._victim(plan, sequence)
            if victim is None:
                return False
            self._preempt(victim)
            plan.has_preempted = True
        return True

    def _victim(self, plan: StepPlan, sequence: Sequence) -> Sequence | None:
        """Returns whom to preempt: of the youngest, all of them younger than this one, one that is not made late by it
        and costs least to compute again."""
        rank = self.running.rank(sequence)
        younger = (one for one in reversed(self.running) if self.running.rank(one) > rank and one not in plan)
        looked_at = list(islice(younger, MOST_VICTIMS))
        if len(looked_at) < 2:
            return next(iter(looked_at), None)
        return min(looked_at, key=lambda one: loss(one, self._forecast, self._ledger, self.waits.now_s))

    def _preempt(self, sequence: Sequence) -> None:
        rank = self.running.rank(sequence)
        self._pause(sequence)
        self.waiting.resume(sequence, rank)

    def without_blocks(self, seq_ids: set[int]) -> list[Sequence]:
        """Deals with sequences whose blocks were never loaded. Those without work in flight have computed nothing with
        them, and begin again. The others are returned: what comes back for them is wrong."""
        harmed = [sequence for sequence in self.running if sequence.seq_id in seq_ids]
        for sequence in harmed:
            if not sequence.num_in_flight:
                self._preempt(sequence)
        return [sequence for sequence in harmed if sequence.num_in_flight]

    def _pause(self, sequence: Sequence) -> None:
        """Stops a sequence so that it waits again. Its blocks go and its tokens stay: it is computed again later, from
        what the prefix index still has. Tokens in flight will arrive and be kept."""
        self.stop_running(sequence)
        sequence.state = SequenceState.WAITING
        sequence.high_water = max(sequence.high_water, sequence.least_next_position)
        sequence.num_computed = 0
        sequence.timing.preemptions += 1
        sequence.timing.preempted_s.append(self.waits.now_s)
        self.num_preemptions += 1
        self.growth.has_overrun = True

    def stop_running(self, sequence: Sequence, *, tainted: bool = False) -> None:
        self.running.remove(sequence)
        self.gaps.forget(sequence.seq_id)
        self._shares.remove(sequence)
        self._ledger.release(sequence, tainted=tainted)
        if self._arriving.pop(sequence.seq_id, None) is None:
            self.rows_to_close.append(sequence.seq_id)

    def retire(self, sequence: Sequence, *, tainted: bool = False) -> None:
        """Forgets a sequence that is finished, wherever it was."""
        self._policy.leave(sequence)
        if sequence.state is SequenceState.RUNNING:
            self.stop_running(sequence, tainted=tainted)
        else:
            self.waiting.drop(sequence)
            self._first_samples.pop(sequence.seq_id, None)
            self.waits.end(sequence)
            if tainted:
                self._ledger.taint(sequence)
        if self._ledger.tiers is not None:
            self._ledger.tiers.let_in(sequence.seq_id)

    def take_over(self, before: Admission) -> None:
        """Takes over what another Admission has counted, and the rows that it left to close. Nobody waits or runs in
        either."""
        self.rows_to_close += before.rows_to_close
        self.num_preemptions, self.tier_hit_tokens = before.num_preemptions, before.tier_hit_tokens
        self.growth.has_overrun = before.growth.has_overrun
        self.prefix_hit_tokens, self.prefix_lookup_tokens = before.prefix_hit_tokens, before.prefix_lookup_tokens
