"""From what the server knows to what the page is told: the greeting, a finished request, where a step's two phases lie
on the roofline. Pure functions."""

from __future__ import annotations

import time

from msgspec.structs import replace

from twostroke import __version__
from twostroke.core.events import TokenEvent
from twostroke.core.sequence import FinishReason
from twostroke.core.service_level import DEFAULT_LEVEL, Promise
from twostroke.core.timing import SequenceTiming
from twostroke.cost.floor import StepWork, step_bytes_read, step_multiply_adds
from twostroke.cost.roofline import ridge
from twostroke.cost.step_cost import StepCost
from twostroke.engine.floors import phase_floors
from twostroke.explain.account import start_account, stream_account
from twostroke.explain.explanation import Explainer
from twostroke.explain.facts import EngineFacts, Yardstick
from twostroke.server import watch_events as w
from twostroke.server.messages import Ready, Stats

MAX_TOKEN_TIMES = 4096


def hello(facts: Ready, model: str, state: str, page: w.PageMode) -> w.Hello:
    """To everybody: a viewer's own has its names, too."""
    engine = facts.engine
    ceilings, shape = engine.ceilings, engine.shape
    return w.Hello(
        version=__version__,
        model=model,
        backend=facts.backend,
        state=state,
        now_s=time.perf_counter(),
        block_size=engine.block_size,
        groups=[w.GroupShape(one.num_blocks, one.window, one.content, one.model) for one in facts.kv_groups],
        itl_target_s=engine.itl_target_s,
        max_running=engine.max_running,
        max_tokens_per_step=engine.max_tokens_per_step,
        max_context=facts.max_context,
        draft_methods=list(engine.draft_methods),
        ceilings=w.CeilingsTold(
            2 * ceilings.multiply_adds_per_s, ceilings.read_bytes_per_s, ridge(ceilings), ceilings.source
        ),
        shape=w.ShapeTold(facts.num_parameters, facts.weight_bytes, shape.kv_bytes_per_token),
        page=page,
        levels=[w.Level(level.name, level.ttft_s, level.itl_s, level.is_derived) for level in facts.levels],
    )


def fitted_cost(facts: Ready, stats: Stats | None) -> StepCost | None:
    """What the engine's own steps cost, by its last word."""
    return None if stats is None or stats.step_cost is None else StepCost(facts.engine.shape, *stats.step_cost)


def with_intensity(step: w.Stepped, facts: EngineFacts, cost: StepCost | None) -> w.Stepped:
    """The step with a point of each phase. Of a mixed step no clock tells the phases apart: its seconds are split in
    proportion to what each would take alone."""
    prefill = StepWork(
        chunks=tuple((start, count) for _, start, count, _ in step.chunks),
        num_sampling_chunks=sum(start + count == total for _, start, count, total in step.chunks),
    )
    queries = [1 + drafts for _, _, drafts, _ in step.slots]
    decode = StepWork(
        contexts=[context + drafts for _, context, drafts, _ in step.slots],
        queries=queries if max(queries, default=1) > 1 else (),
    )
    seconds = step.compute_s - step.drafting_s
    if seconds <= 0.0:
        return step
    if not step.chunks:  # most steps are such, and a phase alone has all of the time
        return replace(step, intensity=w.Intensity(None, _point(facts, decode, seconds)))
    yardstick = Yardstick(facts, cost)
    prefill_s = yardstick.seconds(prefill)
    decode_s = yardstick.seconds(decode) if step.slots else 0.0
    share = seconds / (prefill_s + decode_s) if prefill_s + decode_s > 0.0 else 0.0
    told = w.Intensity(_point(facts, prefill, prefill_s * share), _point(facts, decode, decode_s * share))
    split = (round(prefill_s * share, 6), round(decode_s * share, 6)) if step.slots else None
    return replace(step, intensity=told, split=split, chunk_shares=_chunk_shares(prefill, decode, yardstick))


def _chunk_shares(prefill: StepWork, decode: StepWork, yardstick: Yardstick) -> list[float]:
    """As `start_account` has it, so that a page can tell a request's interference before its end."""
    if len(prefill.chunks) + len(decode.contexts) < 2:
        return []
    whole = StepWork(chunks=prefill.chunks, contexts=decode.contexts, queries=decode.queries)
    return [round(min(1.0, yardstick.ratio(StepWork(chunks=(chunk,)), to=whole)), 4) for chunk in prefill.chunks]


def _point(facts: EngineFacts, work: StepWork, seconds: float) -> w.Point | None:
    if not work.num_tokens or seconds <= 0.0:
        return None
    flops = 2 * step_multiply_adds(facts.shape, work)
    return round(flops / step_bytes_read(facts.shape, work), 3), round(flops / seconds)


def ended(r: int, output: TokenEvent, facts: Ready, stats: Stats | None, cost: StepCost | None) -> w.Ended:
    """`output`: a sample's last."""
    timing = output.timing or SequenceTiming()
    reason = output.finish_reason or FinishReason.STOP
    doubt = None if stats is None else stats.step_cost_doubt
    explanation = Explainer(lambda: facts.engine, lambda: cost, lambda: doubt).explain(timing)
    prefill_interference_s, decode_interference_s = _interference(timing, facts.engine, cost)
    floors = phase_floors(facts.engine.shape, facts.engine.ceilings, timing)
    times_s, promise = timing.token_times_s, timing.promise or Promise(DEFAULT_LEVEL)
    return w.Ended(
        r=r,
        at_s=round(timing.finished_s if timing.finished_s is not None else time.perf_counter(), 6),  # as its last step
        reason=reason.value,
        error=reason is FinishReason.ERROR,
        prompt_tokens=timing.prompt_tokens,
        output_tokens=len(times_s),
        queue_s=timing.queue_s,
        prefill_s=timing.prefill_s,
        prefill_interference_s=prefill_interference_s,
        interference_s=prefill_interference_s + decode_interference_s,
        decode_s=timing.decode_s,
        ttft_s=timing.ttft_s,
        tpot_s=timing.tpot_s,
        prefill_floor_s=floors.prefill_s,
        decode_floor_s=floors.decode_s,
        cached_tokens=timing.cached_tokens,
        drafts_computed=timing.drafts_computed,
        drafts_held=timing.drafts_held,
        level=promise.level,
        promised_ttft_s=promise.ttft_s,
        promised_itl_s=promise.itl_s,
        kept_ttft=timing.kept_ttft,
        kept_itl=timing.kept_itl,
        verdict=explanation.verdict.sentence,
        cause=explanation.verdict.cause.value,
        spans=[(span.kind, span.start_s, span.seconds, span.note) for span in explanation.spans],
        token_times_s=[round(time_s, 6) for time_s in times_s[:MAX_TOKEN_TIMES]],
    )


def _interference(timing: SequenceTiming, facts: EngineFacts, cost: StepCost | None) -> tuple[float, float]:
    """What others' work took of its prefill and of its decode: steps that held none of its chunks, what shared a step
    with one; chunks of other prompts between its tokens."""
    yardstick = Yardstick(facts, cost)
    start, stream = start_account(timing, facts, yardstick), stream_account(timing, facts, yardstick)
    in_prefill_s = 0.0
    if start is not None and timing.prefill_s is not None and not timing.first_came:
        outside_s = timing.prefill_s - start.own_s - start.others_s - start.beside_s
        in_prefill_s = min(timing.prefill_s, max(0.0, outside_s) + start.beside_s)
    return in_prefill_s, 0.0 if stream is None else stream.interference_s
