"""A sample's seconds by cause, in two accounts: before its first token, and after. What was measured is split by what
the yardstick says each part should cost; the parts of an account add up to its whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.core.step_record import ChunkRecord, StepRecord, StepTotals
from twostroke.core.timing import SequenceTiming
from twostroke.cost.floor import StepWork, decode_run_floor_s, prefill_floor_s
from twostroke.explain.facts import EngineFacts, Yardstick
from twostroke.explain.timeline import away_spans, prefill_chunks


@dataclass(frozen=True, slots=True)
class StartAccount:
    """Arrival to first token; of a prompt that another engine was to read, from the arrival there."""

    whole_s: float
    queue_there_s: float
    """In the queue of the engine that read it."""
    read_there_s: float
    """What that engine took to read it, where its KV was of use."""
    vain_s: float
    """The same, where it was not."""
    handoff_s: float
    """On the way from there to here, and waiting here for its KV."""
    slots_s: float
    gaps_s: float
    """Until steps were short enough for one more stream."""
    blocks_s: float
    """For want of KV: in the queue, and preempted before the first token."""
    prompts_s: float
    """Behind older work: in the queue, and in steps that held none of its chunks."""
    beside_s: float
    """In steps of its own, what other prompts and streams took of them."""
    others_s: float
    """What other programs took of the cores while its own tokens were read."""
    own_s: float
    """What its own tokens took."""
    floor_s: float
    others_share: float
    """Of the cores' time in its steps, what went to other programs."""

    @property
    def lost_s(self) -> float:
        return self.whole_s - self.own_s - self.read_there_s

    @property
    def reading_s(self) -> float:
        """On both engines."""
        return self.own_s + self.read_there_s


@dataclass(frozen=True, slots=True)
class StreamAccount:
    """First token to last token."""

    whole_s: float
    num_tokens: int
    """After the first."""
    takeover_s: float
    """Of a first token that came with its request, until the second: the handoff of its KV, the queue here, and what
    was left to read."""
    away_s: float
    """Preempted, until the next token."""
    interference_s: float
    """What chunks of other prompts added to the steps it was in."""
    batch_s: float
    """What other streams added to them."""
    host_s: float
    """Between steps: choosing, telling, and whatever else kept the backend idle."""
    others_s: float
    """What other programs took of the cores while its own tokens were written."""
    alone_s: float
    """What it takes alone."""
    floor_s: float
    mean_batch: float
    mean_context: float
    step_s: float
    """The backend's seconds of a step without prefill."""
    steps: StepTotals
    """All from its first token to its last."""
    context_share: float
    """Of `alone_s`, what reading its context takes."""

    @property
    def lost_s(self) -> float:
        return self.whole_s - self.alone_s


def start_account(timing: SequenceTiming, facts: EngineFacts, yardstick: Yardstick) -> StartAccount | None:
    if timing.first_came:
        return _start_elsewhere(timing, facts)
    if timing.ttft_s is None or timing.queue_s is None or timing.prefill_s is None or timing.first_token_s is None:
        return None
    first_token_s, queue = timing.first_token_s, timing.queue
    chunks = prefill_chunks(timing)
    own_s = beside_s = 0.0
    for chunk in chunks:
        step_s = chunk.step.done_s - chunk.step.began_s
        share = min(1.0, yardstick.ratio(chunk_work(chunk), to=_step_work(chunk)))
        own_s += step_s * share
        beside_s += step_s * (1.0 - share)
    if not chunks:
        own_s = timing.prefill_s
    away_s = sum(end_s - start_s for start_s, end_s in away_spans(timing) if end_s <= first_token_s)
    own_s += queue.sibling_s  # another sample of the request read the same prompt
    handed_s = timing.elsewhere_s
    if timing.handoff is None or not timing.handoff.took_s:
        own_s += queue.tiers_s  # its KV was read from disk
    else:
        handed_s += queue.tiers_s
    waited_s = queue.slots_s + queue.gaps_s + queue.blocks_s + away_s
    rest_s = timing.ttft_s - handed_s - waited_s - beside_s - own_s
    share = _others_before_first_token(timing, chunks)
    queue_there_s, read_there_s, was_of_use = _there(timing)
    return StartAccount(
        whole_s=timing.ttft_s,
        queue_there_s=queue_there_s,
        read_there_s=read_there_s if was_of_use else 0.0,
        vain_s=0.0 if was_of_use else read_there_s,
        handoff_s=max(0.0, handed_s - queue_there_s - read_there_s),
        slots_s=queue.slots_s,
        gaps_s=queue.gaps_s,
        blocks_s=queue.blocks_s + away_s,
        prompts_s=max(0.0, rest_s),
        beside_s=beside_s,
        others_s=own_s * share,
        own_s=own_s * (1.0 - share),
        floor_s=_start_floor_s(timing, facts, read_there_s),
        others_share=share,
    )


def _start_elsewhere(timing: SequenceTiming, facts: EngineFacts) -> StartAccount:
    """Of a first token that came with its request: it waited for nothing here."""
    queue_there_s, read_there_s, _ = _there(timing)
    whole_s = timing.ttft_s or 0.0
    floor_s = min(read_there_s, prefill_floor_s(facts.shape, 0, timing.prompt_tokens, facts.ceilings))
    handoff_s = max(0.0, whole_s - queue_there_s - read_there_s)
    return StartAccount(
        whole_s,
        queue_there_s,
        read_there_s,
        vain_s=0.0,
        handoff_s=handoff_s,
        slots_s=0.0,
        gaps_s=0.0,
        blocks_s=0.0,
        prompts_s=0.0,
        beside_s=0.0,
        others_s=0.0,
        own_s=0.0,
        floor_s=floor_s,
        others_share=0.0,
    )


def tokens_read_there(timing: SequenceTiming) -> int:
    """Of its prompt, those that another engine read for its first token, or whose KV spared it here."""
    if timing.first_came:
        return timing.prompt_tokens
    return min(timing.cached_tokens, timing.tier_tokens.peer)


def _there(timing: SequenceTiming) -> tuple[float, float, bool]:
    """In the queue of the engine that read it, reading there, and whether that was of use."""
    record = timing.handoff
    if record is None:  # it ended before that was known
        return 0.0, 0.0, False
    return record.queue_s, max(0.0, record.read_s - record.queue_s), record.why_not is None


def _start_floor_s(timing: SequenceTiming, facts: EngineFacts, read_there_s: float) -> float:
    """Of what was read here, and there: but no more than that took, since how much was cached there is not known."""
    cached, there = timing.cached_tokens, tokens_read_there(timing)
    floor_s = prefill_floor_s(facts.shape, cached, timing.prompt_tokens - cached, facts.ceilings)
    return floor_s + min(read_there_s, prefill_floor_s(facts.shape, cached - there, there, facts.ceilings))


def _others_before_first_token(timing: SequenceTiming, chunks: Sequence[ChunkRecord]) -> float:
    if not chunks:
        return 0.0
    before = StepTotals() if timing.step_before is None else timing.step_before.totals
    return chunks[-1].step.totals.since(before).others_share


def chunk_work(chunk: ChunkRecord, *, samples: int = 0) -> StepWork:
    return StepWork(chunks=((chunk.start, chunk.num_tokens),), num_sampling_chunks=samples)


def _step_work(chunk: ChunkRecord) -> StepWork:
    """All that the chunk's step held; of other prompts only the number of tokens is known."""
    step, chunks = chunk.step, [(chunk.start, chunk.num_tokens)]
    if others := step.prefill_tokens - chunk.num_tokens:
        chunks.append((0, others))
    return StepWork(chunks=tuple(chunks), contexts=_contexts(step))


def _contexts(step: StepRecord) -> list[int]:
    return [step.context_tokens // step.num_decodes] * step.num_decodes if step.num_decodes else []


def stream_account(timing: SequenceTiming, facts: EngineFacts, yardstick: Yardstick) -> StreamAccount | None:
    """None below two tokens, or where no step was recorded."""
    chunks, last, drawn_s = prefill_chunks(timing), timing.step_last, timing.drawn_s
    if timing.stream_s is None or len(timing.token_times_s) < 2 or not chunks or last is None or drawn_s is None:
        return None
    num_tokens, whole_s = len(timing.token_times_s) - 1, timing.stream_s
    takeover_s = drawn_s - timing.token_times_s[0]
    steps = last.totals.since(chunks[-1].step.totals)
    if steps.steps < 1 or steps.decode_slots < 1 or whole_s <= 0.0:
        return None
    rest_s = whole_s - takeover_s
    away_s = min(rest_s, sum(end_s - max(start_s, drawn_s) for start_s, end_s in _away_late(timing, drawn_s)))
    present = 1.0 - away_s / rest_s if rest_s > 0.0 else 1.0  # steps while it was away are not its own
    mean_batch = steps.decode_slots / steps.steps
    context = round(timing.prompt_tokens + num_tokens / 2)
    others_context = round(steps.context_tokens / steps.decode_slots)
    batch = StepWork(contexts=[context] + [others_context] * (round(mean_batch) - 1))
    alone = StepWork(contexts=[context])
    step_s = _decode_step_s(steps, batch, yardstick)
    compute_s = min(rest_s - away_s, steps.compute_s * present)
    interference_s = min(compute_s, max(0.0, steps.mixed_s - steps.mixed_steps * step_s) * present)
    alone_share = min(1.0, yardstick.ratio(alone, to=batch))
    decodes_s = compute_s - interference_s
    return StreamAccount(
        whole_s=whole_s,
        num_tokens=num_tokens,
        takeover_s=takeover_s,
        away_s=away_s,
        interference_s=interference_s,
        batch_s=decodes_s * (1.0 - alone_share),
        host_s=rest_s - away_s - compute_s,
        others_s=decodes_s * alone_share * steps.others_share,
        alone_s=decodes_s * alone_share * (1.0 - steps.others_share),
        floor_s=stream_floor_s(timing, facts),
        mean_batch=mean_batch,
        mean_context=context,
        step_s=step_s,
        steps=steps,
        context_share=max(0.0, 1.0 - yardstick.ratio(StepWork(contexts=[1]), to=alone)),
    )


def stream_floor_s(timing: SequenceTiming, facts: EngineFacts) -> float:
    """Of all tokens after the first, in as many steps as they took."""
    num_tokens = len(timing.token_times_s) - 1
    return decode_run_floor_s(
        facts.shape, timing.prompt_tokens + 1, num_tokens, facts.ceilings, num_steps=timing.decode_steps
    )


def _away_late(timing: SequenceTiming, drawn_s: float) -> list[tuple[float, float]]:
    return [span for span in away_spans(timing) if span[1] > drawn_s]


def _decode_step_s(steps: StepTotals, batch: StepWork, yardstick: Yardstick) -> float:
    """The mean of its steps without prefill; where there was none, what those with prefill would have taken."""
    if steps.decode_only_steps:
        return steps.decode_only_s / steps.decode_only_steps
    tokens = round(steps.prefill_tokens / steps.mixed_steps)
    mixed = StepWork(chunks=((0, tokens),), contexts=batch.contexts)
    return steps.mixed_s / steps.mixed_steps * yardstick.ratio(batch, to=mixed)
