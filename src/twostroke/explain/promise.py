"""What a sample's class promised, what was kept of it, and who took the time where it was not: a sentence, from the
same accounts as the verdict."""

from __future__ import annotations

from itertools import pairwise

from twostroke.core.service_level import Promise
from twostroke.core.timing import SequenceTiming
from twostroke.explain import elsewhere, wording
from twostroke.explain.account import StartAccount, StreamAccount
from twostroke.explain.timeline import away_spans

WORTH_A_WORD = 0.1
"""The share of the time to a late first token that a part has to have taken to be named."""
MOST_PARTS = 3


def promise_kept(timing: SequenceTiming, start: StartAccount | None, stream: StreamAccount | None) -> str | None:
    """None: its class promises nothing."""
    promise = timing.promise
    if promise is None or (promise.ttft_s is None and promise.itl_s is None):
        return None
    parts = [
        text for text in (_first_token(timing, promise, start), _gaps(timing, promise, stream)) if text is not None
    ]
    return f"the class {promise.level} promises " + "; and ".join(parts)


# The first token


def _first_token(timing: SequenceTiming, promise: Promise, account: StartAccount | None) -> str | None:
    if promise.ttft_s is None:
        return None
    promised = f"a first token in {wording.seconds(promise.ttft_s)}"
    if timing.ttft_s is None:
        end_s = timing.finished_s
        waited = "" if end_s is None else f" in the {wording.seconds(end_s - timing.asked_s)} until it ended"
        return f"{promised}, and none came{waited}"
    came = f"it came in {wording.seconds(timing.ttft_s)}"
    if timing.kept_ttft:
        return f"{promised}: kept, {came}"
    text = f"{promised}, and {came}"
    took = [] if account is None else _who_took(timing, account)
    return f"{text}: {_listed(took)}" if took else text


def _who_took(timing: SequenceTiming, account: StartAccount) -> list[str]:
    """The largest parts first."""
    computed = timing.prompt_tokens - timing.cached_tokens
    parts = [
        (account.slots_s, "waiting for a running slot"),
        (account.gaps_s, "waiting until streams ended, so that the others keep the gaps they were promised"),
        (account.blocks_s, "waiting for KV space"),
        (account.prompts_s, f"other requests' work before its own{_ahead(timing)}"),
        (account.beside_s, "other prompts and streams in the steps that read it"),
        (account.others_s, "other programs on the cores"),
        (account.own_s, f"reading its own {wording.count(computed, 'token')}"),
        elsewhere.queue_there(timing, account),
        elsewhere.read_there(timing, account),
        elsewhere.read_in_vain(timing, account),
        elsewhere.handed_over(timing, account),
    ]
    named = sorted((part for part in parts if part[0] >= WORTH_A_WORD * account.whole_s), reverse=True)
    return [f"{wording.seconds(seconds)} went into {what}" for seconds, what in named[:MOST_PARTS]]


def _ahead(timing: SequenceTiming) -> str:
    """Who that was, as far as it is known: of a server's keys, how long the prompts of others were read meanwhile."""
    queue, known = timing.queue, []
    if queue.ahead:
        known.append(f"{wording.count(queue.ahead, 'request')} waited before it when it came")
    for seconds, whose in ((queue.others_read_s, "other API keys"), (queue.kin_read_s, "its own key")):
        if seconds is not None and seconds >= WORTH_A_WORD * (timing.ttft_s or 0.0):
            known.append(f"prompts of {whose} were read for {wording.seconds(seconds)}")
    return f" ({', '.join(known)})" if known else ""


# The gaps between tokens


def _gaps(timing: SequenceTiming, promise: Promise, account: StreamAccount | None) -> str | None:
    if promise.itl_s is None:
        return None
    promised, gaps_s = f"gaps of at most {wording.seconds(promise.itl_s)}", timing.itl_s
    if not gaps_s:
        return promised if timing.first_token_s is None else f"{promised}: kept, it has none"
    longest = f"the longest was {wording.seconds(max(gaps_s))}"
    num_late = sum(gap_s > promise.itl_s for gap_s in gaps_s)
    if timing.kept_itl:
        but = f" ({num_late:,} of {len(gaps_s):,} were longer)" if num_late else ""
        return f"{promised}: kept, {longest}{but}"
    text = f"{promised}, and {num_late:,} of {len(gaps_s):,} were longer, {longest}"
    cause = _who_made_it_wait(timing, promise.itl_s, account)
    return text if cause is None else f"{text}: {cause}"


def _who_made_it_wait(timing: SequenceTiming, target_s: float, account: StreamAccount | None) -> str | None:
    """Of its longest gap, what was done in it, where that is known."""
    times_s, gaps_s = timing.token_times_s, timing.itl_s
    ended_s = next(later for earlier, later in pairwise(times_s) if later - earlier == max(gaps_s))
    if timing.first_came and ended_s == times_s[1]:
        return f"it went into {elsewhere.TAKEOVER}"
    if any(start_s < ended_s <= end_s for start_s, end_s in away_spans(timing)):
        if timing.gave_way == timing.preemptions:
            return "in it, it gave its slot to a request that had none"
        return "in it, its KV went to older requests and was computed again"
    step = timing.step_after_gap
    if step is not None and step.prefill_tokens:
        others = step.num_decodes - 1
        beside = f" beside {wording.count(others, 'other stream')}" if others > 0 else ""
        return f"in it, the engine read {wording.count(step.prefill_tokens, 'token')} of other prompts{beside}"
    if account is None:
        return None
    if account.batch_s >= max(account.host_s, account.others_s, account.alone_s):
        return f"{wording.count(account.mean_batch - 1, 'other stream')} shared its steps on average"
    if account.others_s >= max(account.host_s, account.alone_s):
        return f"other programs took {account.steps.others_share:.0%} of the cores while it was written"
    if account.host_s >= account.alone_s:
        return "the backend stood idle between steps (scheduling, text, the caller)"
    alone_s = account.alone_s / account.num_tokens
    return f"a token takes {wording.seconds(alone_s)} even where nobody else runs" if alone_s > target_s else None


def _listed(parts: list[str]) -> str:
    first, *rest = parts
    return ", ".join([first, *(part.replace(" went into ", " into ", 1) for part in rest)])
