"""What a scheduler has in hand, as numbers, for whoever watches."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.sequence import Phase
from twostroke.kv.ledger import KVLedger
from twostroke.scheduling.admission import Admission


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """The blocks of one KV group; free, cached and used make up the whole."""

    free: int
    cached: int
    used: int


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


def counts_of(admission: Admission, ledger: KVLedger, steps_in_flight: int) -> SchedulerCounts:
    num_prefill = sum(sequence.phase is Phase.PREFILL for sequence in admission.running)
    return SchedulerCounts(
        waiting=len(admission.waiting),
        running_prefill=num_prefill,
        running_decode=len(admission.running) - num_prefill,
        prefill_backlog_tokens=sum(
            max(0, sequence.prefill_len - sequence.next_position)
            for queue in (admission.waiting, admission.running)
            for sequence in queue
        ),
        steps_in_flight=steps_in_flight,
        preemptions=admission.num_preemptions,
        prefix_hit_tokens=admission.prefix_hit_tokens,
        prefix_lookup_tokens=admission.prefix_lookup_tokens,
        blocks=tuple(GroupCounts(p.num_free, p.num_cached, p.num_referenced) for p in ledger.pools),
    )
