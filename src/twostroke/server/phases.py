"""Where one answer's time went, as it is sent: queue, prefill, decode, the floor of each, and the verdict."""

from __future__ import annotations

import msgspec

from twostroke.core.timing import SequenceTiming
from twostroke.cost.step_cost import StepCost
from twostroke.engine.floors import phase_floors
from twostroke.explain.explanation import Explainer, Explanation
from twostroke.explain.handoff import handoff_sentence
from twostroke.explain.timeline import Delivery
from twostroke.server.messages import Ready, Stats


class PrefillTiming(msgspec.Struct, frozen=True):
    tokens: int
    """Read, that is: not found in the prefix cache."""
    cached_tokens: int
    chunks: int
    seconds: float | None
    tokens_per_s: float | None
    floor_s: float
    """The least this machine could have taken, alone."""
    cached_by_tier: dict[str, int] = {}
    """Of `cached_tokens`, by where they were found: `device`, `host` or `disk`; `peer`: in another engine."""


class SpeculationTiming(msgspec.Struct, frozen=True):
    """What drafts did for one answer."""

    steps: int
    """In which some were computed for it."""
    drafts_computed: int
    drafts_held: int
    """Of those, tokens that came without a step of their own."""
    tokens_per_step: float | None
    """Of all its tokens after the first."""
    gain_s: float
    """Against the predicted time of the same tokens one by one."""


class DecodeTiming(msgspec.Struct, frozen=True):
    tokens: int
    seconds: float | None
    tpot_s: float | None
    itl_p99_s: float | None
    tokens_per_s: float | None
    floor_s: float
    speculation: SpeculationTiming | None = None
    """None: no draft was computed."""


class Promised(msgspec.Struct, frozen=True):
    """By its class; None: nothing of that kind."""

    ttft_s: float | None
    itl_s: float | None


class Kept(msgspec.Struct, frozen=True):
    """None: nothing of that kind was promised."""

    ttft: bool | None
    itl: bool | None


class HandoffTiming(msgspec.Struct, frozen=True):
    """The prompt was read by another engine of the fleet."""

    read_by: str
    read_s: float
    """There, from the request's arrival; its queue included."""
    queue_s: float
    way_s: float
    """From there to here, as far as two clocks tell."""
    tokens: int
    """Whose KV arrived; 0: none, and the prompt was read here."""
    bytes: int
    seconds: float
    """Of the transfer, from the request for it on."""
    gb_per_s: float
    """Of what came in that time."""
    sentence: str = ""
    why_not: str | None = None
    """Where nothing arrived: why."""
    early_bytes: int = 0
    """Of `bytes`, what was here before it was asked for."""
    first_token: bool = False
    """Whether the first token of the answer came with the request, and was told before the KV was there."""


class Timing(msgspec.Struct, frozen=True):
    queue_s: float | None
    ttft_s: float | None
    total_s: float | None
    prefill: PrefillTiming
    decode: DecodeTiming
    preemptions: int
    verdict: str
    cause: str
    """Of `Cause`, in lower case."""
    service_level: str | None = None
    """The class it was served in; None: this engine has none."""
    promised: Promised | None = None
    kept: Kept | None = None
    promise: str | None = None
    """Both in a sentence, with who took the time where the promise was not kept; None: nothing was promised."""
    handoff: HandoffTiming | None = None
    """None: no other engine read the prompt."""


def explain(
    timing: SequenceTiming, facts: Ready, stats: Stats | None = None, delivery: Delivery | None = None
) -> Explanation:
    """`stats`: what the engine last said of itself: what its steps cost, or why it cannot tell."""
    cost = None if stats is None or stats.step_cost is None else StepCost(facts.engine.shape, *stats.step_cost)
    doubt = None if stats is None else stats.step_cost_doubt
    return Explainer(lambda: facts.engine, lambda: cost, lambda: doubt).explain(timing, delivery)


def timing_report(timing: SequenceTiming, facts: Ready, explanation: Explanation | None = None) -> Timing:
    """`explanation`: the sample's, where it was made already."""
    verdict, promise = (explanation or explain(timing, facts)).verdict, timing.promise
    floors = phase_floors(facts.engine.shape, facts.engine.ceilings, timing)
    read, written = timing.prompt_tokens - timing.cached_tokens, len(timing.token_times_s)
    gaps_s = sorted(timing.itl_s)
    prefill = PrefillTiming(
        tokens=read,
        cached_tokens=timing.cached_tokens,
        chunks=timing.prefill_chunks,
        seconds=_rounded(timing.prefill_s),
        tokens_per_s=_rate(read, timing.prefill_s),
        floor_s=round(floors.prefill_s, 6),
        cached_by_tier=_by_tier(timing),
    )
    decode = DecodeTiming(
        tokens=written,
        seconds=_rounded(timing.decode_s),
        tpot_s=_rounded(timing.tpot_s),
        itl_p99_s=_rounded(gaps_s[int(0.99 * len(gaps_s))]) if gaps_s else None,
        tokens_per_s=_rate(timing.num_decoded, timing.decode_s),
        floor_s=round(floors.decode_s, 6),
        speculation=_speculation(timing),
    )
    return Timing(
        queue_s=_rounded(timing.queue_s),
        ttft_s=_rounded(timing.ttft_s),
        total_s=_rounded(timing.total_s),
        prefill=prefill,
        decode=decode,
        preemptions=timing.preemptions,
        verdict=verdict.sentence,
        cause=verdict.cause.value,
        service_level=None if promise is None else promise.level,
        promised=None if promise is None else Promised(promise.ttft_s, promise.itl_s),
        kept=None if promise is None else Kept(timing.kept_ttft, timing.kept_itl),
        promise=verdict.promise,
        handoff=_handoff(timing),
    )


def _handoff(timing: SequenceTiming) -> HandoffTiming | None:
    if (record := timing.handoff) is None:
        return None
    return HandoffTiming(
        read_by=record.peer,
        read_s=round(record.read_s, 6),
        queue_s=round(record.queue_s, 6),
        way_s=round(max(0.0, timing.elsewhere_s - record.read_s), 6),
        tokens=record.num_tokens,
        bytes=record.num_bytes,
        seconds=round(record.took_s, 6),
        gb_per_s=round(record.bytes_per_s / 1e9, 3),
        sentence=handoff_sentence(record, first_came=timing.first_came),
        why_not=record.why_not,
        early_bytes=record.early_bytes,
        first_token=timing.first_came,
    )


def _by_tier(timing: SequenceTiming) -> dict[str, int]:
    tiers = timing.tier_tokens
    found = {"device": timing.cached_tokens - sum(tiers), **tiers._asdict()}
    return {tier: tokens for tier, tokens in found.items() if tokens}


def _speculation(timing: SequenceTiming) -> SpeculationTiming | None:
    if not timing.draft_steps:
        return None
    a_step = timing.tokens_per_step
    return SpeculationTiming(
        steps=timing.draft_steps,
        drafts_computed=timing.drafts_computed,
        drafts_held=timing.drafts_held,
        tokens_per_step=None if a_step is None else round(a_step, 3),
        gain_s=round(timing.speculation_gain_s, 6),
    )


def server_timing(timing: SequenceTiming) -> str:
    """The header that browsers and proxies show: milliseconds a phase."""
    elsewhere_s = timing.elsewhere_s or None
    phases = (
        ("elsewhere", elsewhere_s),
        ("queue", timing.queue_s),
        ("prefill", timing.prefill_s),
        ("decode", timing.decode_s),
    )
    return ", ".join(f"{name};dur={seconds * 1e3:.1f}" for name, seconds in phases if seconds is not None)


def _rate(num_tokens: int, seconds: float | None) -> float | None:
    return round(num_tokens / seconds, 1) if seconds and num_tokens > 0 else None


def _rounded(seconds: float | None) -> float | None:
    """To microseconds: more digits would claim more than a clock knows."""
    return None if seconds is None else round(seconds, 6)
