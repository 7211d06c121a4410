"""One sample's time from end to end, as spans that follow each other without a gap: queue, each prefill chunk, steps of
others in between, decode, preemption, delivery."""

from __future__ import annotations

from dataclasses import dataclass
from operator import sub

from twostroke.core.handoff import HandoffRecord
from twostroke.core.step_record import ChunkRecord
from twostroke.core.timing import QueueRecord, SequenceTiming
from twostroke.explain import wording
from twostroke.explain.handoff import moved

LEAST_S = 1e-6


@dataclass(frozen=True, slots=True)
class Span:
    kind: str
    """`reception`, `queue`, `prefill`, `others`, `decode`, `preempted` or `delivery`; of a prompt that another engine
    read, `queue there`, `prefill there`, `way` and `handoff`, too."""
    start_s: float
    """Seconds since the engine had the request; what lies before is negative."""
    seconds: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a server adds, on the engine's clock."""

    received_s: float
    """When the first byte of the request was there."""
    handed_over_s: float
    """When the last of the answer was written to the client's connection, or about to be."""


def prefill_chunks(timing: SequenceTiming) -> list[ChunkRecord]:
    """The chunks that led to the first token that was drawn here; later ones bring a preempted sample back."""
    drawn_s = timing.drawn_s
    return [chunk for chunk in timing.chunks if drawn_s is None or chunk.step.done_s <= drawn_s]


def away_spans(timing: SequenceTiming) -> list[tuple[float, float]]:
    """From each preemption to the next token, or before the first token to the next chunk: when nothing moved on."""
    signs_of_life_s = sorted([*timing.token_times_s, *(chunk.step.began_s for chunk in prefill_chunks(timing))])
    end_s = timing.finished_s if timing.finished_s is not None else max(signs_of_life_s, default=0.0)
    spans: list[tuple[float, float]] = []
    for lost_s in timing.preempted_s:
        if spans and lost_s < spans[-1][1]:
            continue  # it was not back yet
        spans.append((lost_s, next((time_s for time_s in signs_of_life_s if time_s > lost_s), end_s)))
    return [(start_s, end_s) for start_s, end_s in spans if end_s > start_s]


def timeline(timing: SequenceTiming, delivery: Delivery | None = None) -> tuple[Span, ...]:
    line = _Line(timing.arrival_s)
    if timing.gave_way == timing.preemptions:
        line.away_note = "it gave its slot to a request that had none, and went on later"
    if delivery is not None and delivery.received_s < timing.arrival_s:
        note = "the body, its chat template, tokenizing"
        line.spans.append(
            Span("reception", delivery.received_s - timing.arrival_s, line.until(delivery.received_s), note)
        )
    if timing.handoff is not None:
        _add_handoff(line, timing, timing.handoff)
    end_s = timing.finished_s if timing.finished_s is not None else timing.arrival_s
    line.add("queue", end_s if timing.scheduled_s is None else timing.scheduled_s, queue_note(timing.queue))
    away = away_spans(timing)
    if timing.scheduled_s is not None:
        _add_prefill(line, timing, away, timing.drawn_s or end_s)
    if timing.first_token_s is not None:
        _add_decode(line, timing, away)
    if delivery is not None:
        line.add(
            "delivery", delivery.handed_over_s, "the last token: to text, to the server, to the client's connection"
        )
    return tuple(line.spans)


class _Line:
    """Spans, each from where the one before ended."""

    def __init__(self, origin_s: float) -> None:
        self._origin_s = self.now_s = origin_s
        self.spans: list[Span] = []
        self.away_note = "its KV went to older requests, and was computed again"

    def until(self, earlier_s: float) -> float:
        return self._origin_s - earlier_s

    def add(self, kind: str, end_s: float, note: str = "") -> None:
        if end_s - self.now_s >= LEAST_S:
            self.spans.append(Span(kind, self.now_s - self._origin_s, end_s - self.now_s, note))
            self.now_s = end_s


def _add_handoff(line: _Line, timing: SequenceTiming, record: HandoffRecord) -> None:
    """What the other engine did, and the way from there, as far as it is known, lie right before what this one did."""
    here_s = line.spans[0].start_s if line.spans else 0.0
    before_s = min(here_s, record.read_s - timing.elsewhere_s)  # with the way goes what receiving it took
    read_s, where = max(0.0, record.read_s - record.queue_s), f"on {record.peer or 'another engine'}"
    early = f"; {record.early_bytes / 1e6:.1f} MB of KV came over early" if record.early_bytes else ""
    there = [
        Span("queue there", before_s - record.read_s, record.queue_s, where),
        Span("prefill there", before_s - read_s, read_s, where + early),
        Span("way", before_s, here_s - before_s, "the router, from there to here"),
    ]
    line.spans[:0] = [span for span in there if span.seconds >= LEAST_S]
    latest_s = timing.scheduled_s if timing.scheduled_s is not None else timing.finished_s
    came_s = timing.arrival_s + record.took_s
    came_s = came_s if latest_s is None else min(came_s, latest_s)
    note = f"not taken: {record.why_not}" if record.why_not is not None else moved(record)
    line.add("handoff", came_s, f"{note}; the first token was told before" if timing.first_came else note)


def _add_prefill(line: _Line, timing: SequenceTiming, away: list[tuple[float, float]], end_s: float) -> None:
    chunks = prefill_chunks(timing)
    if not chunks:
        line.add("prefill", end_s)
    for number, chunk in enumerate(chunks, 1):
        _add_away(line, away, chunk.step.began_s)
        line.add(
            "others", chunk.step.began_s, "steps with no chunk of this prompt" if number > 1 else "a step in flight"
        )
        line.add("prefill", chunk.step.done_s, _chunk_note(number, len(chunks), chunk))
    _add_away(line, away, end_s)
    line.add("others", end_s)


def _add_decode(line: _Line, timing: SequenceTiming, away: list[tuple[float, float]]) -> None:
    end_s = timing.token_times_s[-1]
    _add_away(line, away, end_s, "decode", timing.token_times_s)
    line.add("decode", end_s, _decode_note(timing.token_times_s, line.now_s, end_s))
    if timing.finished_s is not None:
        _add_away(line, away, timing.finished_s, "decode", timing.token_times_s)


def _decode_note(times_s: list[float], start_s: float, end_s: float) -> str:
    written_s = [time_s for time_s in times_s if start_s <= time_s <= end_s]
    gaps_s = list(map(sub, written_s[1:], written_s))
    longest = f", the longest gap {wording.seconds(max(gaps_s))}" if len(gaps_s) > 1 else ""
    return f"{wording.count(len(gaps_s), 'token')}{longest}"


def _add_away(
    line: _Line,
    away: list[tuple[float, float]],
    before_s: float,
    meanwhile: str = "others",
    times_s: list[float] | None = None,
) -> None:
    """The preemptions that ended by then, and what lay before each."""
    for lost_s, back_s in away:
        if line.now_s <= lost_s and back_s <= before_s:
            line.add(meanwhile, lost_s, _decode_note(times_s, line.now_s, lost_s) if times_s else "")
            line.add("preempted", back_s, line.away_note)


def queue_note(queue: QueueRecord) -> str:
    reasons = (
        (queue.slots_s, f"all {queue.running_limit} running slots were taken"),
        (queue.gaps_s, "one more stream would have made steps longer than promised"),
        (queue.blocks_s, "KV had no room"),
        (queue.prompts_s, "steps were full of older work"),
        (queue.sibling_s, "another sample was reading the same prompt"),
        (queue.tiers_s, "KV was coming from disk or another engine"),
    )
    parts = [f"{text} for {wording.seconds(waited_s)}" for waited_s, text in reasons if waited_s >= LEAST_S]
    if queue.ahead:
        parts.append(f"{queue.ahead} ahead of it")
    return ", ".join(parts)


def _chunk_note(number: int, of: int, chunk: ChunkRecord) -> str:
    step = chunk.step
    note = f"chunk {number} of {of}: " if of > 1 else ""
    note += f"tokens {chunk.start:,} to {chunk.start + chunk.num_tokens - 1:,}"
    if others := step.prefill_tokens - chunk.num_tokens:
        note += f", beside {wording.count(others, 'token')} of other prompts"
    if step.num_decodes:
        note += f", beside {wording.count(step.num_decodes, 'stream')}"
    return note
