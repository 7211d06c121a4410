"""Slow to start or slow to stream, why, how far from the floor, and what would have helped most: a sentence each for
what came before a sample's first token and after it, and of the two the one that cost more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from twostroke.core.timing import SequenceTiming
from twostroke.explain import changes, elsewhere, speculation, wording
from twostroke.explain.account import (
    StartAccount,
    StreamAccount,
    start_account,
    stream_account,
    stream_floor_s,
    tokens_read_there,
)
from twostroke.explain.changes import Change
from twostroke.explain.facts import EngineFacts, Yardstick
from twostroke.explain.promise import promise_kept
from twostroke.explain.timeline import prefill_chunks

HELD_UP = 0.2
"""The share of a request's time that has to be lost before the verdict is about what was lost."""
MATTERS = 0.3
"""The share of a phase from which on a part of it is its cause."""
WORTH_A_WORD = 0.1
"""The share of the cores that other programs have to take to be named."""
FAR = 5.0
"""A request this many times above its floor is called slow, even where nobody is to blame."""


class Cause(Enum):
    QUEUE = "queue"
    KV_PRESSURE = "kv_pressure"
    NOISY_NEIGHBOUR = "noisy_neighbour"
    CACHE_MISS = "cache_miss"
    PREFILL_COMPUTE = "prefill_compute"
    BATCH_SIZE = "batch_size"
    CONTEXT_LENGTH = "context_length"
    HOST = "host"
    OTHER_PROGRAMS = "other_programs"
    DECODE_COMPUTE = "decode_compute"
    HANDOFF = "handoff"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One phase's cause, in a sentence."""

    cause: Cause
    seconds: float
    """What the phase took."""
    lost_s: float
    """What the cause took of it beyond what the sample takes alone; of a cache miss, what a hit would have saved."""
    floor_s: float
    what: str
    change: Change | None

    @property
    def sentence(self) -> str:
        return self.what if self.change is None else f"{self.what}; {self.change.text}"


@dataclass(frozen=True, slots=True)
class Verdict:
    sentence: str
    cause: Cause
    slow_to: str | None
    """`start`, `stream`, or None where nothing held it up."""
    start: Finding | None
    stream: Finding | None
    promise: str | None = None
    """What its class promised, what was kept, and who took the time where it was not; None: it promises nothing."""

    @property
    def change(self) -> Change | None:
        chosen = self.start if self.slow_to == "start" else self.stream if self.slow_to == "stream" else None
        return None if chosen is None else chosen.change


def verdict(timing: SequenceTiming, facts: EngineFacts, yardstick: Yardstick) -> Verdict:
    start, stream = start_account(timing, facts, yardstick), stream_account(timing, facts, yardstick)
    found = _found(timing, facts, yardstick, start, stream)
    return replace(found, promise=promise_kept(timing, start, stream))


def _found(
    timing: SequenceTiming,
    facts: EngineFacts,
    yardstick: Yardstick,
    start: StartAccount | None,
    stream: StreamAccount | None,
) -> Verdict:
    if start is None:
        return Verdict(_without_token(timing), Cause.UNKNOWN, None, None, None)
    start_finding = find_start(timing, facts, yardstick, start)
    if stream is not None:
        stream_finding: Finding | None = find_stream(timing, facts, yardstick, stream)
    else:
        stream_finding = _plain_stream(timing, facts)
    total_s = start.whole_s + (timing.stream_s or 0.0)
    found = [("start", start_finding)] + ([("stream", stream_finding)] if stream_finding is not None else [])
    slow_to, finding = max(found, key=lambda pair: pair[1].lost_s)
    if finding.lost_s < HELD_UP * total_s:
        slow_to, finding = max(found, key=lambda pair: pair[1].seconds)
        if finding.cause in (Cause.DECODE_COMPUTE, Cause.PREFILL_COMPUTE) and not finding.change:
            share = start.others_share if stream is None else stream.steps.others_share
            sentence = _unhindered(timing, start_finding, stream_finding, finding, share)
            return Verdict(sentence, finding.cause, None, start_finding, stream_finding)
    sentence = f"slow to {slow_to}: {finding.sentence}"
    return Verdict(sentence, finding.cause, slow_to, start_finding, stream_finding)


def _without_token(timing: SequenceTiming) -> str:
    end_s = timing.finished_s
    if end_s is None:
        return "it ended before its first token"
    where = "in the queue" if timing.scheduled_s is None else "while its prompt was read"
    there = f" ({wording.seconds(timing.elsewhere_s)} of it at another engine)" if timing.elsewhere_s else ""
    return f"it ended before its first token, after {wording.seconds(end_s - timing.asked_s)}{there}, {where}"


def _unhindered(
    timing: SequenceTiming, start: Finding, stream: Finding | None, longer: Finding, others_share: float
) -> str:
    total_s = start.seconds + (stream.seconds if stream is not None else 0.0)
    floor_s = start.floor_s + (stream.floor_s if stream is not None else 0.0)
    if total_s > FAR * floor_s > 0.0:
        text = f"nothing in the engine held it up, and still it took {wording.seconds(total_s)}"
        text += f", {wording.times(total_s / floor_s)} the least this machine can take"
        taken = f"other programs took {others_share:.0%} of the cores"
        text += f" ({taken})" if others_share >= WORTH_A_WORD else " (the backend's own speed)"
    else:
        text = f"nothing held it up: {wording.seconds(total_s)} in all"
        text += f", {wording.times(total_s / floor_s)} the least this machine can take" if floor_s > 0.0 else ""
    share = longer.seconds / total_s
    if longer is start:
        there = tokens_read_there(timing)
        here = 0 if timing.first_came else timing.prompt_tokens - timing.cached_tokens
        computed = wording.count(here + there, "token")
        where = f", {there:,} of them on {elsewhere.reader(timing)}" if there else ""
        return f"{text}; {share:.0%} of it went into reading {computed}{where}"
    num_tokens = len(timing.token_times_s)
    each = wording.seconds(timing.tpot_s or 0.0)
    text += f"; {share:.0%} of it went into writing {wording.count(num_tokens, 'token')}, {each} each"
    drafts = speculation.outcome(timing, longer.seconds)
    return text if drafts is None else f"{text}; {drafts}"


def _plain_stream(timing: SequenceTiming, facts: EngineFacts) -> Finding | None:
    """Where no steps were recorded, the times alone; None: there was one token, or none."""
    if timing.tpot_s is None or timing.stream_s is None:
        return None
    floor_s, a_token = stream_floor_s(timing, facts), f"{wording.seconds(timing.tpot_s)} a token"
    if timing.first_came and len(timing.token_times_s) == 2:
        what = f"{wording.seconds(timing.stream_s)} after its first token went into {elsewhere.TAKEOVER}"
        return Finding(Cause.HANDOFF, timing.stream_s, timing.stream_s, floor_s, what, None)
    return Finding(Cause.DECODE_COMPUTE, timing.stream_s, 0.0, floor_s, a_token, None)


# Before the first token


def find_start(timing: SequenceTiming, facts: EngineFacts, yardstick: Yardstick, account: StartAccount) -> Finding:
    parts: list[tuple[float, Callable[[], tuple[Cause, str, Change | None]]]] = [
        (account.slots_s, lambda: _no_slot(timing, facts, yardstick, account)),
        (account.gaps_s, lambda: _long_steps(timing, account)),
        (account.blocks_s, lambda: _no_blocks(timing, facts, account)),
        (account.prompts_s + account.beside_s, lambda: _neighbours(timing, yardstick, account)),
        (account.others_s, lambda: _others_at_the_start(account)),
        (account.queue_there_s, lambda: _there(Cause.QUEUE, elsewhere.queue_there(timing, account), account)),
        (account.vain_s, lambda: _there(Cause.HANDOFF, elsewhere.read_in_vain(timing, account), account)),
        (account.handoff_s, lambda: _there(Cause.HANDOFF, elsewhere.handed_over(timing, account), account)),
    ]
    lost_s, explain = max(parts, key=lambda part: part[0])
    if lost_s < account.reading_s:
        return _reading(timing, facts, yardstick, account)
    cause, what, change = explain()
    return Finding(cause, account.whole_s, lost_s, account.floor_s, what + _start_floor(account), change)


def _before(seconds: float, account: StartAccount) -> str:
    return f"{wording.part(seconds, account.whole_s)} before its first token"


def _start_floor(account: StartAccount) -> str:
    return f"; the floor is {wording.seconds(account.floor_s)}" if account.floor_s > 0.0 else ""


def _there(cause: Cause, part: elsewhere.Part, account: StartAccount) -> tuple[Cause, str, Change | None]:
    return cause, f"{_before(part.seconds, account)} went into {part.what}", None


def _no_slot(
    timing: SequenceTiming, facts: EngineFacts, yardstick: Yardstick, account: StartAccount
) -> tuple[Cause, str, Change | None]:
    queue = timing.queue
    ahead = f", {wording.count(queue.ahead, 'request')} ahead of it" if queue.ahead else ""
    taken = f"{queue.running_limit} of {queue.running_limit} running slots were taken{ahead}"
    what = f"{_before(account.slots_s, account)} went into the queue ({taken})"
    return Cause.QUEUE, what, changes.more_slots(timing, facts, account, yardstick)


def _long_steps(timing: SequenceTiming, account: StartAccount) -> tuple[Cause, str, Change | None]:
    ahead = f", {wording.count(timing.queue.ahead, 'request')} ahead of it" if timing.queue.ahead else ""
    what = f"{_before(account.gaps_s, account)} went into the queue (one more stream would have made steps longer than"
    return Cause.QUEUE, f"{what} was promised{ahead})", None


def _no_blocks(timing: SequenceTiming, facts: EngineFacts, account: StartAccount) -> tuple[Cause, str, Change | None]:
    what = f"{_before(account.blocks_s, account)} went into waiting for KV space"
    queue = timing.queue
    if any(queue.short_blocks):
        short = max(queue.short_blocks)
        what += f" (its prompt lacked {wording.count(short, 'block')} of {facts.block_size} tokens)"
        return Cause.KV_PRESSURE, what, changes.room_in_kv(timing, facts, account)
    if timing.preempted_s:
        if timing.gave_way == timing.preemptions:
            what = f"{_before(account.blocks_s, account)} went into giving way to requests that had no running slot"
            return Cause.QUEUE, f"{what} ({wording.often(timing.gave_way)})", None
        what += f" (preempted {wording.often(len(timing.preempted_s))})"
        return Cause.KV_PRESSURE, what, changes.room_to_stay(timing, facts, account.blocks_s)
    return Cause.KV_PRESSURE, what, None


def _neighbours(
    timing: SequenceTiming, yardstick: Yardstick, account: StartAccount
) -> tuple[Cause, str, Change | None]:
    chunks, before = prefill_chunks(timing), timing.step_before
    read = streams = 0
    if chunks:
        last = chunks[-1].step
        own = sum(chunk.num_tokens for chunk in chunks)
        read = last.totals.prefill_tokens - (before.totals.prefill_tokens if before is not None else 0) - own
        streams = last.num_decodes
    what = f"{_before(account.prompts_s + account.beside_s, account)} went into other requests' work"
    did = [f"{wording.count(read, 'token')} of their prompts"] if read > 0 else []
    did += [f"{wording.count(streams, 'stream')} beside it"] if streams else []
    if did:
        what += f" ({', '.join(did)})"
    return Cause.NOISY_NEIGHBOUR, what, changes.first_in_line(timing, account, yardstick)


def _others_at_the_start(account: StartAccount) -> tuple[Cause, str, Change | None]:
    what = f"other programs took {account.others_share:.0%} of the cores while its prompt was read"
    return Cause.OTHER_PROGRAMS, what, changes.cores_to_itself(account.whole_s, account.others_s)


def _reading(timing: SequenceTiming, facts: EngineFacts, yardstick: Yardstick, account: StartAccount) -> Finding:
    if timing.first_came or account.read_there_s > account.own_s:
        _, what, change = _there(Cause.PREFILL_COMPUTE, elsewhere.read_there(timing, account), account)
        return Finding(Cause.PREFILL_COMPUTE, account.whole_s, 0.0, account.floor_s, what, change)
    computed = timing.prompt_tokens - timing.cached_tokens
    what = f"{_before(account.own_s, account)} went into reading {wording.count(computed, 'token')}"
    kept = changes.kept_prefix(timing, account, yardstick)
    if kept is not None and kept.gain_s >= MATTERS * account.whole_s and timing.prefix is not None:
        broken = timing.prefix
        if broken.kind == "evicted":
            what += f", {broken.tokens:,} of which had been cached from token {broken.token_index:,} on, and evicted"
        elif broken.kind == "state":
            what += f", {broken.tokens:,} of which are cached from token {broken.token_index:,} on, all but their state"
        else:
            what += f" because token {broken.token_index:,} differs from an earlier prompt"
            what += f" (of the tokens after it {broken.tokens:,} are the same)"
        return Finding(Cause.CACHE_MISS, account.whole_s, kept.gain_s, account.floor_s, what, kept)
    if timing.cached_tokens:
        what += f" ({timing.cached_tokens:,} more were cached{timing.tier_tokens.words})"
    if account.floor_s > 0.0:
        what += f", {wording.times(account.own_s / account.floor_s)} the floor"
    change = changes.shorter_prompt(timing, facts, account, yardstick)
    return Finding(Cause.PREFILL_COMPUTE, account.whole_s, 0.0, account.floor_s, what, change)


# After it


def find_stream(timing: SequenceTiming, facts: EngineFacts, yardstick: Yardstick, account: StreamAccount) -> Finding:
    parts: list[tuple[float, Callable[[], tuple[Cause, str, Change | None]]]] = [
        (account.takeover_s, lambda: _takeover(timing, account)),
        (account.away_s, lambda: _preempted(timing, facts, account)),
        (account.interference_s, lambda: _interference(timing, facts, account)),
        (account.batch_s, lambda: _batch(account, yardstick)),
        (account.host_s, lambda: _host(account)),
        (account.others_s, lambda: _others_after_it(account)),
    ]
    lost_s, explain = max(parts, key=lambda part: part[0])
    if lost_s >= MATTERS * account.whole_s:
        cause, what, change = explain()
    else:
        lost_s = 0.0
        cause, what, change = _writing(timing, facts, account, yardstick)
    if account.floor_s > 0.0:
        what += f"; in all {wording.times(account.whole_s / account.floor_s)} the floor"
    return Finding(cause, account.whole_s, lost_s, account.floor_s, what, change)


def _after(seconds: float, account: StreamAccount) -> str:
    return f"{wording.part(seconds, account.whole_s)} after its first token"


def _takeover(timing: SequenceTiming, account: StreamAccount) -> tuple[Cause, str, Change | None]:
    return Cause.HANDOFF, f"{_after(account.takeover_s, account)} went into {elsewhere.TAKEOVER}", None


def _preempted(timing: SequenceTiming, facts: EngineFacts, account: StreamAccount) -> tuple[Cause, str, Change | None]:
    again = f"preempted {wording.often(timing.preemptions)}"
    if timing.recomputed_tokens:
        again += f", {wording.count(timing.recomputed_tokens, 'token')} read again"
    if timing.gave_way == timing.preemptions:
        what = f"{_after(account.away_s, account)} went into giving way to requests that had no running slot ({again})"
        return Cause.QUEUE, what, None
    what = f"{_after(account.away_s, account)} went into getting back the KV it lost to older requests ({again})"
    return Cause.KV_PRESSURE, what, changes.room_to_stay(timing, facts, account.away_s)


def _interference(
    timing: SequenceTiming, facts: EngineFacts, account: StreamAccount
) -> tuple[Cause, str, Change | None]:
    steps = account.steps
    mixed, tokens = wording.count(steps.mixed_steps, "step"), wording.count(steps.prefill_tokens, "token")
    longest = f"the longest gap {wording.seconds(max(timing.itl_s))} instead of {wording.seconds(account.step_s)}"
    what = f"{_after(account.interference_s, account)} went into reading other prompts ({tokens} in {mixed}, {longest})"
    return Cause.NOISY_NEIGHBOUR, what, changes.smaller_chunks(timing, facts, account)


def _batch(account: StreamAccount, yardstick: Yardstick) -> tuple[Cause, str, Change | None]:
    alone_s = (account.whole_s - account.batch_s) / account.num_tokens
    what = (
        f"{wording.seconds(account.whole_s / account.num_tokens)} a token instead of about {wording.seconds(alone_s)}, "
        f"because {wording.count(account.mean_batch - 1, 'other stream')} shared its steps on average"
    )
    return Cause.BATCH_SIZE, what, changes.smaller_batch(account, yardstick)


def _host(account: StreamAccount) -> tuple[Cause, str, Change | None]:
    what = f"{_after(account.host_s, account)} the backend stood idle between steps (scheduling, text, the caller)"
    return Cause.HOST, what, None


def _others_after_it(account: StreamAccount) -> tuple[Cause, str, Change | None]:
    what = f"other programs took {account.steps.others_share:.0%} of the cores while it was written"
    change = changes.cores_to_itself(account.whole_s, account.others_s, account.num_tokens)
    return Cause.OTHER_PROGRAMS, what, change


def _writing(
    timing: SequenceTiming, facts: EngineFacts, account: StreamAccount, yardstick: Yardstick
) -> tuple[Cause, str, Change | None]:
    token_s = account.whole_s / account.num_tokens
    context_s = account.alone_s * account.context_share
    if context_s >= MATTERS * account.whole_s:
        what = (
            f"{wording.part(context_s / account.num_tokens, token_s)} a token went into reading its context of "
            f"about {wording.count(account.mean_context, 'token')}"
        )
        return Cause.CONTEXT_LENGTH, what, changes.smaller_kv(account, facts)
    weights = wording.size(facts.shape.weight_bytes_read(1))
    if speculation.helped_little(timing):
        held = f"{timing.drafts_held:,} of {timing.drafts_computed:,} drafts held"
        what = f"{timing.tokens_per_step:.1f} tokens a step were accepted ({held}), {wording.seconds(token_s)} a token"
        return Cause.DECODE_COMPUTE, what, speculation.better_drafter(timing, account, yardstick)
    what = f"{wording.seconds(token_s)} a token, each of which reads {weights} of weights"
    if timing.drafts_held:
        what = f"{wording.seconds(token_s)} a token; each step reads {weights} of weights"
    said = speculation.outcome(timing, account.whole_s) or speculation.why_none(timing, facts)
    return Cause.DECODE_COMPUTE, what if said is None else f"{what}; {said}", None
