"""What a scheduler has in hand, as numbers, for whoever watches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from twostroke.core.sequence import Phase, Sequence
from twostroke.core.service_level import DEFAULT_LEVEL, ServiceLevels
from twostroke.core.timing import NO_TIERS, TierTokens
from twostroke.kv.ledger import KVLedger
from twostroke.kv.tiers.tiers import TierCounts
from twostroke.scheduling.admission import Admission
from twostroke.scheduling.forecast import Forecast


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """The blocks of one KV group; free, cached and used make up the whole."""

    free: int
    cached: int
    used: int


@dataclass(frozen=True, slots=True)
class LevelCounts:
    """What a class of requests has in hand, and how far its promises are from being broken."""

    name: str
    waiting: int = 0
    running: int = 0
    prefill_backlog_s: float = 0.0
    ttft_headroom_s: float | None = None
    """Promised less predicted, the least over those without a first token; below 0: it will be late. None: nobody
    waits for one, or nothing was promised."""
    itl_headroom_s: float | None = None
    """Promised less what a step takes of late, the least over its streams. None: likewise."""


@dataclass(frozen=True, slots=True)
class SchedulerCounts:
    waiting: int
    running_prefill: int
    running_decode: int
    prefill_backlog_tokens: int
    """Known tokens that no launched step covers yet, of those that wait and those that run."""
    steps_in_flight: int
    preemptions: int
    prefix_hit_tokens: int
    """Prompt tokens found in the prefix cache when first admitted, of `prefix_lookup_tokens`."""
    prefix_lookup_tokens: int
    blocks: tuple[GroupCounts, ...]
    tier_hit_tokens: TierTokens = NO_TIERS
    """Of `prefix_hit_tokens`, what came from host memory and from disk."""
    tiers: TierCounts | None = None
    prefill_backlog_s: float = 0.0
    """The same as `prefill_backlog_tokens` in predicted seconds, if nothing else were computed."""
    kv_full_s: float | None = None
    """Until KV is full, at its net growth of late; None: it is not filling."""
    levels: tuple[LevelCounts, ...] = ()
    """Every class, the default first."""


@dataclass(slots=True)
class _Tally:
    """A class while it is counted."""

    waiting: int = 0
    running: int = 0
    backlog_s: float = 0.0
    ttft_headroom_s: float = inf
    itl_headroom_s: float = inf

    def counts(self, name: str) -> LevelCounts:
        headrooms = [None if value == inf else value for value in (self.ttft_headroom_s, self.itl_headroom_s)]
        return LevelCounts(name, self.waiting, self.running, self.backlog_s, *headrooms)


@dataclass(slots=True)
class _Counting:
    """One walk over all sequences, those first that are read first."""

    forecast: Forecast
    now_s: float
    tallies: Mapping[str, _Tally]
    backlog_s: float = 0.0
    backlog_tokens: int = 0
    by_phase: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))

    def take(self, sequence: Sequence, *, runs: bool, num_slots_short: int = 0) -> None:
        promise = sequence.timing.promise
        tally = self.tallies[DEFAULT_LEVEL if promise is None else promise.level]
        tally.running += runs
        tally.waiting += not runs
        if runs:
            self.by_phase[sequence.phase] += 1
        left = max(0, sequence.prefill_len - sequence.next_position)
        own_s = self.forecast.reading_s(sequence) if left else 0.0
        if promise is not None and promise.ttft_s is not None and not sequence.num_output:
            predicted_s = self.forecast.first_token_s(self.backlog_s, own_s, num_slots_short)
            headroom_s = sequence.request.asked_s + promise.ttft_s - self.now_s - predicted_s
            tally.ttft_headroom_s = min(tally.ttft_headroom_s, headroom_s)
        if promise is not None and promise.itl_s is not None and sequence.num_output and runs:
            tally.itl_headroom_s = min(tally.itl_headroom_s, promise.itl_s - self.forecast.step_s.value)
        tally.backlog_s += own_s
        self.backlog_s += own_s
        self.backlog_tokens += left


def counts_of(
    admission: Admission,
    ledger: KVLedger,
    steps_in_flight: int,
    levels: ServiceLevels,
    forecast: Forecast,
    now_s: float,
) -> SchedulerCounts:
    counting = _Counting(forecast, now_s, {name: _Tally() for name in levels.names})
    for sequence in admission.running:
        counting.take(sequence, runs=True)
    num_free = admission.num_free_slots
    for place, sequence in enumerate(admission.waiting):
        counting.take(sequence, runs=False, num_slots_short=max(0, place + 1 - num_free))
    return SchedulerCounts(
        waiting=len(admission.waiting),
        running_prefill=counting.by_phase[Phase.PREFILL],
        running_decode=counting.by_phase[Phase.DECODE],
        prefill_backlog_tokens=counting.backlog_tokens,
        steps_in_flight=steps_in_flight,
        preemptions=admission.num_preemptions,
        prefix_hit_tokens=admission.prefix_hit_tokens,
        prefix_lookup_tokens=admission.prefix_lookup_tokens,
        blocks=tuple(GroupCounts(p.num_free, p.num_cached, p.num_referenced) for p in ledger.pools),
        tier_hit_tokens=admission.tier_hit_tokens,
        tiers=None if ledger.tiers is None else ledger.tiers.counts(),
        prefill_backlog_s=counting.backlog_s,
        kv_full_s=forecast.kv_full_s(now_s, ledger.pools),
        levels=tuple(tally.counts(name) for name, tally in counting.tallies.items()),
    )
