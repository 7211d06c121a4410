"""In the engine's process, while somebody watches: each step as a short event, arrivals and admissions, and now and
then the map of KV blocks. It is made when watching begins and dropped when it ends, so nobody else pays for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from itertools import zip_longest
from typing import NamedTuple

from twostroke.core.request import Request
from twostroke.core.sequence import Sequence, SequenceState
from twostroke.core.service_level import DEFAULT_LEVEL
from twostroke.core.step import Step, StepResult
from twostroke.core.tier_report import TierReport
from twostroke.core.timing import SequenceTiming
from twostroke.cost.floor import work_of
from twostroke.engine.engine import Engine
from twostroke.engine.tiers import tier_report
from twostroke.server import watch_events as w

DIGITS = 6
"""To microseconds: more would be bytes, and no news."""
TOLD_EVERY_S = 0.05
"""Steps that follow fast are told together, this often at most: each message wakes the API's process, and pages are
written to no more often than that."""
MAP_EVERY_S = 0.25
MAX_RUNS = 2000
"""Of a map, in all its groups together: about 40 kB of JSON. KV in more pieces than that is told in coarser ones."""
MAP_SHARE = 0.01
"""Of the engine's time, what looking at its blocks may take: a map of a hundred thousand is made less often."""


class _Launched(NamedTuple):
    predicted_s: float | None
    preempted: list[int]
    """Who had lost its KV before it."""
    leaves: tuple[int, ...]
    """Whose rows it closes."""
    reads: bool
    """It holds a chunk, and may take much longer than the step before."""


class StepWatch:
    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._clock = clock
        self._events: list[w.EngineEvent] = []
        self._rows: dict[int, Sequence] = {}
        """Who has a row in the backend."""
        self._launched: dict[int, _Launched] = {}
        """By step."""
        self._told_s = 0.0
        self._is_urgent = False
        self._map: tuple[object, ...] = ()
        self._map_due_s = 0.0
        self._has_moved = True
        for sequence in engine.scheduler.unfinished():
            self._arrived(sequence)
            if sequence.timing.scheduled_s is not None:
                self._admitted(sequence)
            if sequence.state is SequenceState.RUNNING:
                self._rows[sequence.seq_id] = sequence

    @property
    def map_due_in_s(self) -> float | None:
        """Seconds until the next map; None: the last one is still true."""
        return max(0.0, self._map_due_s - self._clock()) if self._has_moved else None

    def take(self, *, is_asked_again: bool = False) -> list[w.EngineEvent]:
        """What happened since it was last told, with a map where one is due. `is_asked_again`: once the oldest step in
        flight is back, so that some may wait for it."""
        if self._has_moved and self._clock() >= self._map_due_s:
            self._take_map()
        if not self._events or (is_asked_again and self._may_wait()):
            return []
        events, self._events = self._events, []
        self._told_s, self._is_urgent = self._clock(), False
        return events

    def _may_wait(self) -> bool:
        """Not arrivals: a request's end may follow at once, and nobody would know whose it is."""
        if self._is_urgent or not self._launched:
            return False
        next_step, asked_s = self._launched[min(self._launched)], self._clock()
        if next_step.reads:
            if next_step.predicted_s is None:
                return False
            asked_s += next_step.predicted_s
        return asked_s < self._told_s + TOLD_EVERY_S

    # What the loop tells

    def added(self, request: Request) -> None:
        for sequence in self._engine.scheduler.unfinished(request.request_id):
            self._arrived(sequence)

    def released(self) -> None:
        """Blocks may have come free without a step."""
        self._has_moved = True

    def launched(self, step: Step, predicted_s: float | None) -> None:
        preempted = [seq_id for seq_id in step.leaves if seq_id in self._rows and not self._rows[seq_id].is_finished]
        for join in step.joins:
            for sequence in self._engine.scheduler.unfinished(join.request.request_id):
                if sequence.seq_id == join.seq_id:
                    self._rows[join.seq_id] = sequence
                    if not sequence.timing.preemptions:
                        self._admitted(sequence)
        self._launched[step.step_id] = _Launched(predicted_s, preempted, step.leaves, bool(step.prefills))

    def came_back(self, step: Step, result: StepResult) -> None:
        """Once its results were applied."""
        record = self._engine.step_log.last
        if record is None:
            return
        predicted_s, preempted, _, _ = self._launched.get(step.step_id, _Launched(None, [], (), False))
        cost = self._engine.step_cost
        if cost is not None and predicted_s is not None and step.has_drafts:
            predicted_s = cost.seconds(work_of(step, result.drafted))  # with the drafts that were computed in the end
        waiting, running = self._engine.scheduler.line_lengths
        self._events.append(
            w.Stepped(
                id=step.step_id,
                began_s=round(record.began_s, DIGITS),
                done_s=round(record.done_s, DIGITS),
                compute_s=round(result.compute_s, DIGITS),
                drafting_s=round(result.drafting_s, DIGITS),
                predicted_s=None if predicted_s is None else round(predicted_s, DIGITS),
                chunks=[self._chunk(chunk.seq_id, chunk.start, len(chunk.token_ids)) for chunk in step.prefills],
                slots=self._slots(step, result, record.done_s),
                preempted=preempted,
                waiting=waiting,
                running=running,
            )
        )
        self._has_moved = True
        for step_id in [one for one in self._launched if one <= step.step_id]:  # one before it failed, if any is left
            self._close_rows(self._launched.pop(step_id).leaves)

    def _close_rows(self, leaves: tuple[int, ...]) -> None:
        """Not before the step that closed them is back: one before it may have brought their last tokens."""
        for seq_id in leaves:
            sequence = self._rows.get(seq_id)
            if sequence is not None and sequence.state is not SequenceState.RUNNING:  # else it is back already
                del self._rows[seq_id]

    # What becomes of it

    def _chunk(self, seq_id: int, start: int, num_tokens: int) -> w.Chunk:
        sequence = self._rows.get(seq_id)
        return seq_id, start, num_tokens, start + num_tokens if sequence is None else sequence.prefill_len

    def _slots(self, step: Step, result: StepResult, done_s: float) -> list[w.Slot]:
        rows, sampled, drafted = self._rows, result.sampled, result.drafted
        slots = []
        for seq_id, position, _ in step.decodes:
            computed = drafted[seq_id].num_drafts if seq_id in drafted else 0
            held, context, sequence = len(sampled.get(seq_id, ())) - 1, position + 1, rows.get(seq_id)
            if sequence is None or (sequence.timing.finished_s or done_s) < done_s:
                held = -1  # it had ended before this step came back
            elif held >= 0:
                context = len(sequence.tokens) - held - 1  # the slot itself says the most that it might have been
            slots.append((seq_id, context, computed, held))
        return slots

    def _arrived(self, sequence: Sequence) -> None:
        self._is_urgent, request = True, sequence.request
        self._events.append(
            w.Arrived(
                r=sequence.seq_id,
                id=request.request_id,
                at_s=round(request.arrival_s, DIGITS),
                prompt_tokens=sequence.prompt_len,
                max_tokens=request.sampling.max_tokens,
                level=request.service_level or DEFAULT_LEVEL,
                sample=sequence.sample_index,
            )
        )

    def _admitted(self, sequence: Sequence) -> None:
        timing = sequence.timing
        broke = None if timing.prefix is None else w.Break(*timing.prefix)
        at_s = timing.scheduled_s if timing.scheduled_s is not None else self._clock()
        self._events.append(
            w.Admitted(sequence.seq_id, round(at_s, DIGITS), timing.cached_tokens, _tiers_of(timing), broke)
        )

    def _take_map(self) -> None:
        began_s = self._clock()
        ledger, counts = self._engine.scheduler.ledger, self._engine.scheduler.counts()
        seen = runs, slots, tiers = ledger.block_runs(), ledger.slot_runs(), _tiers_told(tier_report(counts))
        self._has_moved = any(run.state == "moving" for group in slots for run in group)  # it arrives without a step
        if seen != self._map:
            self._map = seen
            looked_up = counts.prefix_lookup_tokens
            hit_rate = counts.prefix_hit_tokens / looked_up if looked_up else None
            groups = _groups_told(runs, slots)
            self._events.append(w.KVMap(round(began_s, DIGITS), groups, hit_rate, tiers))
        now_s = self._clock()
        self._map_due_s = now_s + max(MAP_EVERY_S, (now_s - began_s) / MAP_SHARE)


def _groups_told(runs: Collection[Collection[w.Run]], slots: Collection[Collection[w.Run]]) -> list[w.GroupMap]:
    """`slots`: of as many groups, or of none."""
    most = max(1, MAX_RUNS // (len(runs) + len(slots)))
    told = [[coarser([(*run,) for run in group], most) for group in groups] for groups in (runs, slots)]
    return [w.GroupMap(blocks, host) for blocks, host in zip_longest(*told, fillvalue=[])]


def coarser(runs: list[w.Run], most: int) -> list[w.Run]:
    """As many runs at most. Neighbours are told as one, of the state and the holder that the most of their blocks have;
    the blocks that they cover stay the same."""
    if len(runs) <= most:
        return runs
    together = -(-len(runs) // most)
    return [_as_one(runs[at : at + together]) for at in range(0, len(runs), together)]


def _as_one(runs: list[w.Run]) -> w.Run:
    blocks: Counter[tuple[str, int]] = Counter()
    for _, length, state, holder in runs:
        blocks[state, holder] += length
    (state, holder), _ = blocks.most_common(1)[0]
    return runs[0][0], sum(length for _, length, _, _ in runs), state, holder


def _tiers_of(timing: SequenceTiming) -> dict[str, int]:
    """Empty: all that was cached was on the device."""
    tiers = timing.tier_tokens
    if not any(tiers):
        return {}
    return {"device": timing.cached_tokens - sum(tiers), **tiers._asdict()}


def _tiers_told(report: TierReport | None) -> list[w.Tier]:
    if report is None:
        return []
    return [w.Tier(name, report.bytes[name], most, report.blocks[name]) for name, most in report.limit_bytes.items()]
