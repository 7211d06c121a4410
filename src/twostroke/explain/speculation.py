"""What drafts did for an answer, in words; and what better ones would have done, where that can be computed."""

from __future__ import annotations

from twostroke.core.speculation import expected_tokens
from twostroke.core.timing import SequenceTiming
from twostroke.cost.floor import StepWork
from twostroke.explain import wording
from twostroke.explain.account import StreamAccount
from twostroke.explain.changes import LEAST_SHARE, Change
from twostroke.explain.facts import EngineFacts, Yardstick

WORTH_A_WORD = 0.05
"""Of the time after the first token, what drafts must have gained or lost to be named."""
FEW_TOKENS = 1.5
"""Tokens a step below which drafts that were tried are said to have helped little."""
ENOUGH_DRAFTS = 16
"""Below that nothing is known of how drafts fare with such a text."""
TRAINED_CHANCE, TRAINED_DRAFTS = 0.7, 4
"""What heads that were trained on such texts are published with: a draft holds 7 times in 10."""


def outcome(timing: SequenceTiming, whole_s: float) -> str | None:
    """What became of drafts; None: not worth a word."""
    gain_s, a_step = timing.speculation_gain_s, timing.tokens_per_step
    if abs(gain_s) < WORTH_A_WORD * whole_s or a_step is None:
        return None
    if gain_s > 0.0:
        return f"speculation gained about {wording.seconds(gain_s)} ({a_step:.1f} tokens a step)"
    whose = "its drafts" if timing.draft_steps else "its neighbours' drafts"
    return f"{whose} cost it about {wording.seconds(-gain_s)} more than they brought"


def why_none(timing: SequenceTiming, facts: EngineFacts) -> str | None:
    """Why there were no drafts, where somebody wanted it so or nothing makes them."""
    if timing.wants_no_drafts:
        return "speculation was off, as the request asked"
    return None if facts.drafts_nothing is None else f"speculation was off: {facts.drafts_nothing}"


def helped_little(timing: SequenceTiming) -> bool:
    a_step = timing.tokens_per_step
    return timing.drafts_computed >= ENOUGH_DRAFTS and a_step is not None and a_step < FEW_TOKENS


def better_drafter(timing: SequenceTiming, account: StreamAccount, yardstick: Yardstick) -> Change | None:
    """The same steps with drafts that hold as often as published ones do. Only where costs are fitted: a floor says
    that drafts are free."""
    a_step = timing.tokens_per_step
    if not yardstick.is_fitted or a_step is None:
        return None
    drafts_now = round(timing.drafts_computed / timing.decode_steps)
    ratio = yardstick.ratio(_step(account, TRAINED_DRAFTS), to=_step(account, drafts_now))
    share = ratio * a_step / expected_tokens(TRAINED_CHANCE, TRAINED_DRAFTS)
    steps_s = account.alone_s + account.batch_s
    gain_s = steps_s * (1.0 - share)
    if gain_s < LEAST_SHARE * account.whole_s:
        return None
    token_s = (account.whole_s - gain_s) / account.num_tokens
    return Change(
        f"a drafter trained on such text, if {TRAINED_CHANCE:.0%} of its drafts held, would bring it to about "
        f"{wording.seconds(token_s)} a token and the time of its own work",
        gain_s,
    )


def _step(account: StreamAccount, num_drafts: int) -> StepWork:
    """As its own were, with this many drafts for each stream."""
    context, batch = round(account.mean_context) + num_drafts, max(1, round(account.mean_batch))
    return StepWork(contexts=[context] * batch, queries=[1 + num_drafts] * batch)
