"""The one change that would have helped most, for each cause, with what it would have gained: computed from what was
measured and the yardstick's ratios, or not said at all."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.timing import SequenceTiming
from twostroke.cost.floor import StepWork
from twostroke.explain import wording
from twostroke.explain.account import StartAccount, StreamAccount, chunk_work
from twostroke.explain.facts import EngineFacts, Yardstick
from twostroke.explain.timeline import prefill_chunks

LEAST_SHARE = 0.1
"""A change that gains less of its phase than this is not worth a word."""
SMOOTH = 2.5
"""How many times a step without prefill a gap may be and still feel smooth."""
LEAST_BUDGET = 64
"""Tokens of a step: below that, prompts hardly move."""
FEWER_TOKENS = 100
"""What a change of the prompt is told for: nobody cuts single tokens."""


@dataclass(frozen=True, slots=True)
class Change:
    text: str
    gain_s: float
    """Of the phase that was slow; of its longest gap where that is what it is about."""


def more_slots(
    timing: SequenceTiming, facts: EngineFacts, account: StartAccount, yardstick: Yardstick
) -> Change | None:
    """Slots for it and for those before it. They would have been read first, at the pace that it was read at."""
    queue = timing.queue
    wanted, prompts = queue.running + queue.ahead + 1, queue.ahead_tokens + timing.prompt_tokens
    blocks = -(-prompts // facts.block_size) + queue.ahead + 1  # of each one's last block some is empty
    if wanted <= queue.running_limit or any(blocks > free * 0.99 for free in queue.free_blocks):
        return None
    gain_s = account.slots_s - _reading_s(timing, account, yardstick, queue.ahead_tokens)
    if gain_s < LEAST_SHARE * account.whole_s:
        return None
    option = f"--max-running {wanted}"
    if wanted > facts.max_tokens_per_step:
        option += f" with --max-tokens-per-step {wanted}"
    return Change(f"{option} fits in KV and would have started it about {wording.seconds(gain_s)} sooner", gain_s)


def _reading_s(timing: SequenceTiming, account: StartAccount, yardstick: Yardstick, num_tokens: int) -> float:
    """What this many tokens of other prompts would have taken, at the pace of its own."""
    chunks = prefill_chunks(timing)
    if not chunks or num_tokens <= 0:
        return 0.0
    size = max(chunk.num_tokens for chunk in chunks)
    own = sum(yardstick.seconds(chunk_work(chunk)) for chunk in chunks)
    return account.own_s / own * yardstick.seconds(StepWork(chunks=((0, size),))) * num_tokens / size


def room_in_kv(timing: SequenceTiming, facts: EngineFacts, account: StartAccount) -> Change | None:
    """As many more blocks as it lacked when it was first in line."""
    queue = timing.queue
    if queue.refused_s is None or timing.scheduled_s is None or not any(queue.short_blocks):
        return None
    gain_s = timing.scheduled_s - queue.refused_s
    if gain_s < LEAST_SHARE * account.whole_s:
        return None
    text = f"{_more_memory(facts, queue.short_blocks)} would have let it in about {wording.seconds(gain_s)} sooner"
    return Change(text, gain_s)


def room_to_stay(timing: SequenceTiming, facts: EngineFacts, away_s: float) -> Change:
    """Room for its own KV on top of what there was: then it would not have been preempted."""
    num_tokens = timing.prompt_tokens + len(timing.token_times_s)
    own_blocks = -(-num_tokens // facts.block_size)
    text = f"{_more_memory(facts, (own_blocks,) * len(facts.num_blocks))} would have spared it about"
    return Change(f"{text} {wording.seconds(away_s)}", away_s)


def _more_memory(facts: EngineFacts, blocks: tuple[int, ...]) -> str:
    """Groups grow together, so the one that lacks most decides."""
    factor = max(more / held for more, held in zip(blocks, facts.num_blocks, strict=True))
    more_bytes = facts.kv_bytes * factor
    return f"--kv-memory {wording.size_option(facts.kv_bytes + more_bytes)} ({wording.size(more_bytes)} more)"


def first_in_line(timing: SequenceTiming, account: StartAccount, yardstick: Yardstick) -> Change | None:
    """A higher priority: it passes those that waited before it. What was being read already goes on."""
    gain_s = min(timing.queue.prompts_s, _reading_s(timing, account, yardstick, timing.queue.ahead_tokens))
    if not timing.queue.ahead or gain_s < LEAST_SHARE * account.whole_s:
        return None
    ahead = wording.count(timing.queue.ahead, "request")
    text = f"a lower `priority` number would have let it pass the {ahead} ahead of it"
    return Change(f"{text}, about {wording.seconds(gain_s)} sooner", gain_s)


def kept_prefix(timing: SequenceTiming, account: StartAccount, yardstick: Yardstick) -> Change | None:
    """A prompt whose prefix stays the same: what that would have saved of its own reading."""
    broken, chunks = timing.prefix, prefill_chunks(timing)
    computed = timing.prompt_tokens - timing.cached_tokens
    if broken is None or broken.kind == "new" or not chunks or computed < 2:
        return None
    saved = min(broken.tokens, computed - 1)
    left = StepWork(chunks=((timing.cached_tokens + saved, computed - saved),))
    gain_s = account.own_s * (1.0 - yardstick.ratio(left, to=StepWork(chunks=((timing.cached_tokens, computed),))))
    if gain_s < LEAST_SHARE * account.whole_s:
        return None
    if broken.kind == "evicted":
        text = f"more KV (--kv-memory) would have kept them and started it about {wording.seconds(gain_s)} sooner"
    elif broken.kind == "state":
        text = f"the next prompt that begins like it finds a state there, and starts {wording.seconds(gain_s)} sooner"
    else:
        text = f"with what differs moved to the end it would have started about {wording.seconds(gain_s)} sooner"
    return Change(text, gain_s)


def shorter_prompt(
    timing: SequenceTiming, facts: EngineFacts, account: StartAccount, yardstick: Yardstick
) -> Change | None:
    """Larger steps where the fitted cost says that they pay; else what some tokens less would save."""
    computed, chunks = timing.prompt_tokens - timing.cached_tokens, prefill_chunks(timing)
    if computed <= 2 * FEWER_TOKENS or not chunks:
        return None
    start = timing.cached_tokens
    if yardstick.is_fitted and len(chunks) > 1:
        larger = [
            StepWork(chunks=((at, min(4 * facts.max_tokens_per_step, start + computed - at)),))
            for at in range(start, start + computed, 4 * facts.max_tokens_per_step)
        ]
        now = sum(yardstick.seconds(chunk_work(chunk)) for chunk in chunks)
        gain_s = account.own_s * (1.0 - sum(map(yardstick.seconds, larger)) / now)
        if gain_s >= LEAST_SHARE * account.whole_s:
            text = f"--max-tokens-per-step {4 * facts.max_tokens_per_step} would have read it about"
            return Change(f"{text} {wording.seconds(gain_s)} faster", gain_s)
    fewer = StepWork(chunks=((start, computed - FEWER_TOKENS),))
    gain_s = account.own_s * (1.0 - yardstick.ratio(fewer, to=StepWork(chunks=((start, computed),))))
    if gain_s <= 0.0:
        return None
    return Change(f"every {FEWER_TOKENS} tokens less, or cached, save about {wording.seconds(gain_s)}", gain_s)


def smaller_chunks(timing: SequenceTiming, facts: EngineFacts, account: StreamAccount) -> Change | None:
    """Between a step without prefill and the one that ended its longest gap, both measured, in proportion to tokens.
    The largest budget that is smooth, or the smallest that is sensible."""
    worst, step_s = timing.step_after_gap, account.step_s
    if worst is None or not worst.prefill_tokens:
        return None
    token_s, held = (worst.compute_s - step_s) / worst.prefill_tokens, worst.prefill_tokens + worst.num_decodes
    least = max(LEAST_BUDGET, facts.max_running, 2 * worst.num_decodes)
    budgets = [size for size in (2**power for power in range(16)) if least <= size <= held // 2]
    if not budgets:
        return None
    gaps_s = {size: step_s + (size - worst.num_decodes) * token_s for size in budgets}
    smooth = [size for size in budgets if gaps_s[size] <= SMOOTH * step_s]
    budget, longest_s = smooth[-1] if smooth else budgets[0], max(timing.itl_s)
    gap_s = gaps_s[budget]
    if gap_s > (1.0 - 2 * LEAST_SHARE) * longest_s:
        return None
    option = f"--max-tokens-per-step {budget}"
    if facts.itl_target_s is not None:
        option = f"--itl-target-ms {gap_s * 1e3:.0f}"
    text = f"{option} would have kept its gaps to about {wording.seconds(gap_s)}"
    return Change(f"{text}, at the price of slower prompts", longest_s - gap_s)


def smaller_batch(account: StreamAccount, yardstick: Yardstick) -> Change | None:
    """Half as many streams at a time."""
    context, batch = round(account.mean_context), round(account.mean_batch)
    fewer = batch // 2
    if fewer < 1:
        return None
    ratio = yardstick.ratio(StepWork(contexts=[context] * fewer), to=StepWork(contexts=[context] * batch))
    token_s = account.whole_s / account.num_tokens
    gain_s = (1.0 - ratio) * (account.batch_s + account.alone_s)
    if gain_s < LEAST_SHARE * account.whole_s:
        return None
    faster_s = token_s - gain_s / account.num_tokens
    text = f"--max-running {fewer} would bring it to about {wording.seconds(faster_s)} a token"
    return Change(f"{text}, at the price of longer queues", gain_s)


def smaller_kv(account: StreamAccount, facts: EngineFacts) -> Change | None:
    if facts.int8_kv_share is None:
        return None
    gain_s = account.alone_s * account.context_share * (1.0 - facts.int8_kv_share)
    if gain_s < LEAST_SHARE * account.whole_s:
        return None
    faster_s = (account.whole_s - gain_s) / account.num_tokens
    return Change(f"--kv-type int8 would bring it to about {wording.seconds(faster_s)} a token", gain_s)


def cores_to_itself(whole_s: float, others_s: float, num_tokens: int = 1) -> Change | None:
    """No other programs: what they took of the cores would have been its own, as far as time tells."""
    if others_s < LEAST_SHARE * whole_s:
        return None
    faster = wording.seconds((whole_s - others_s) / num_tokens)
    a_token = " a token" if num_tokens > 1 else ""
    return Change(f"with them ended or moved it would take about {faster}{a_token}", others_s)
