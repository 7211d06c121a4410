"""A replica of a simulated fleet: the engine's loop of `planner/simulate.py`, which also says how far each prompt is
read, takes KV that was computed elsewhere, and tells the signals that a server tells. What a router knows of it is kept
beside it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from twostroke.cluster.demand import LevelSignals, Signals, fitting_streams
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import Sequence
from twostroke.core.step import Step
from twostroke.core.step_record import StepTotals
from twostroke.cost.floor import StepWork
from twostroke.planner.simulate import Replica, ReplicaSpec
from twostroke.scheduling.advance import SequenceAdvance

if TYPE_CHECKING:
    from twostroke.planner.fleet.journey import Journey

Role = Literal["prefill", "decode"]
"""Of two pools; where there is one, all are of the pool that writes, and read too."""
LEAST_SPAN_S = 1.0
ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


class Reading(NamedTuple):
    """A chunk of a prompt came back."""

    moment_s: float
    request_id: str
    num_tokens: int
    """That are computed, those found in the cache among them."""
    scheduled_s: float
    is_read: bool


class FleetReplica(Replica):
    def __init__(self, spec: ReplicaSpec) -> None:
        super().__init__(spec)
        self.spec = spec
        self.readings: list[Reading] = []
        """Since somebody took them."""
        self._totals = StepTotals()
        self._uncounted: deque[tuple[float, float, bool]] = deque()
        """Steps that are not in the totals yet: when each ends, its seconds, whether it reads."""
        self._num_carried = 0

    def _take_in(self, step: Step, seconds: float, now_s: float, num_tokens: int = 1) -> list[SequenceAdvance]:
        advances = super()._take_in(step, seconds, now_s, num_tokens)
        if step.prefills:
            for advance in advances:
                if advance.prefill_computed is not None:
                    sequence = advance.sequence
                    scheduled_s, name = sequence.timing.scheduled_s or now_s, sequence.request.request_id
                    is_read = sequence.num_output == 1 and bool(advance.sampled)
                    self.readings.append(Reading(now_s, name, advance.prefill_computed, scheduled_s, is_read))
        return advances

    def _launch(self, work: StepWork, newcomers_s: float = 0.0) -> tuple[float, float]:
        self._count_until(self.now_s)
        seconds, ends_s = super()._launch(work, newcomers_s)
        self._uncounted.append((ends_s, seconds, bool(work.chunks)))
        return seconds, ends_s

    def _count_until(self, moment_s: float) -> None:
        while self._uncounted and self._uncounted[0][0] <= moment_s:
            _, seconds, reads = self._uncounted.popleft()
            totals = self._totals
            self._totals = totals._replace(
                steps=totals.steps + 1,
                compute_s=totals.compute_s + seconds,
                decode_only_steps=totals.decode_only_steps + (not reads),
                decode_only_s=totals.decode_only_s + (0.0 if reads else seconds),
            )

    def totals_at(self, moment_s: float) -> StepTotals:
        """Of the steps that are over then. Of one that reads as much as has passed of it: with long chunks the share of
        the time that goes into reading would else be chance."""
        self._count_until(moment_s)
        passed_s = sum(max(0.0, moment_s - ends_s + seconds) for ends_s, seconds, reads in self._uncounted if reads)
        return self._totals._replace(compute_s=self._totals.compute_s + passed_s)

    def num_held(self, request: Request) -> int:
        """Tokens of its prompt whose KV is here."""
        carrier, ledger = self._carrier(request), self.scheduler.ledger
        num_held = ledger.match(carrier).num_tokens
        ledger.retire(carrier)
        return num_held

    def take_kv(self, request: Request, num_tokens: int) -> bool:
        """KV of its prompt's first tokens, full blocks, came from elsewhere: they are found like any prefix. False:
        there is no room for them, and it is read here."""
        self.settle()
        ledger = self.scheduler.ledger
        carrier = self._carrier(request)
        match = ledger.match(carrier)
        has_room = True
        if num_tokens > match.num_tokens:
            ledger.begin(carrier, match)
            chunk = self.spec.scheduler.chunk_limit
            for end in (*range(match.num_tokens + chunk, num_tokens, chunk), num_tokens):  # a window moves on meanwhile
                has_room = ledger.reserve(carrier, end) is not None
                if not has_room:
                    break
                carrier.num_computed = end  # by another engine; no scheduler knows the carrier
                if ledger.states is not None and end == num_tokens:
                    tuple(ledger.states.of_chunk(carrier, end))  # its states came along: they are kept like a snapshot
                ledger.commit(carrier)
            ledger.release(carrier)
        ledger.retire(carrier)
        return has_room

    def _carrier(self, request: Request) -> Sequence:
        """A sequence that no scheduler knows, by whose tokens blocks are named."""
        self._num_carried += 1
        return Sequence(-self._num_carried, leased(request), 0, len(request.prompt_token_ids) + 1)

    def signals(self, steps: StepTotals, span_s: float) -> Signals:
        """As a server's `/autoscale` has them. `steps`: those of so long."""
        self.settle()
        counts, spec = self.scheduler.counts(), self.spec
        running = [one.next_position for one in self.scheduler.unfinished() if one.num_output]
        num_used, num_blocks = 0, 0
        for group in counts.blocks:
            num_used, num_blocks = num_used + group.used, num_blocks + group.free + group.cached + group.used
        levels = tuple(
            LevelSignals(
                name=level.name,
                waiting=level.waiting,
                running=level.running,
                prefill_backlog_s=level.prefill_backlog_s,
                ttft_s=spec.levels.named(level.name).ttft_s,
                itl_s=spec.levels.named(level.name).itl_s,
                ttft_headroom_s=level.ttft_headroom_s,
                itl_headroom_s=level.itl_headroom_s,
            )
            for level in counts.levels
        )
        length = max(1, sum(running) // max(1, len(running)))

        def step_s(number: int) -> float:
            return spec.step_seconds(StepWork(contexts=[length] * number))

        return Signals(
            waiting=counts.waiting,
            running_prefill=counts.running_prefill,
            running_decode=counts.running_decode,
            max_running=spec.scheduler.max_running,
            prefill_backlog_s=counts.prefill_backlog_s,
            prefill_busy=min(1.0, steps.reading_s / span_s) if span_s >= LEAST_SPAN_S else None,
            kv_occupancy=num_used / max(1, num_blocks),
            kv_full_s=counts.kv_full_s,
            stream_step_s=steps.stream_step_s,
            alone_step_s=step_s(1) if running else None,
            fitting_streams=fitting_streams(levels, spec.scheduler.max_running, step_s) if running else None,
            levels=levels,
        )


@dataclass(slots=True, eq=False)
class Member:
    number: int
    role: Role
    replica: FleetReplica
    began_s: float = 0.0
    ready_s: float = 0.0
    """From when on it takes requests: it loads until then."""
    ended_s: float | None = None
    is_draining: bool = False
    journeys: dict[str, Journey] = field(default_factory=dict)
    """Sent to it and not over, by request."""
    backlog_s: float = 0.0
    """Predicted, of the prompts sent to it that it has not read."""
    kv_tokens: int = 0
    """Of the prompts sent to it, that are not over."""
    link_free_s: float = 0.0
    """Until then its link moves what it was given."""
    marks: list[tuple[float, StepTotals]] = field(default_factory=list)
    """Where its totals stood, over the last minute."""

    def takes(self, now_s: float) -> bool:
        return self.ended_s is None and not self.is_draining and self.ready_s <= now_s

    def signals(self, now_s: float, window_s: float) -> Signals:
        if not self.marks:
            self.marks.append((max(self.ready_s, self.began_s), StepTotals()))
        while len(self.marks) > 1 and self.marks[1][0] <= now_s - window_s:
            self.marks.pop(0)
        began_s, before = self.marks[0]
        totals = self.replica.totals_at(now_s)
        self.marks.append((now_s, totals))
        return self.replica.signals(totals.since(before), now_s - began_s)


def one_token(request: Request) -> Request:
    """What a replica that reads is asked for: the prompt, and one token, which is thrown away."""
    return replace(leased(request), sampling=ONE_TOKEN)


def leased(request: Request) -> Request:
    """Read to be handed over: with a state at the end of its last whole block, where the model has states."""
    return replace(request, lease_id=request.request_id)
