"""The first token of an answer whose prompt another engine has read: what goes to the engine that writes, and whether
it is the one that would have been drawn there. Knows requests; knows no tickets."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from twostroke.core.events import TokenEvent
from twostroke.core.handoff import FirstToken, Handoff
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import FinishReason
from twostroke.kv.handing import Handing


def drawn_as(sampling: SamplingParams) -> str:
    """A digest of all that decides which token is drawn first, and what is told of it. The engine that reads is asked
    for one token, and knows no more of the answer's length than whether it may end at once."""
    alike = replace(
        sampling,
        logit_bias=dict(sorted(sampling.logit_bias.items())),
        max_tokens=None,
        min_tokens=min(1, sampling.min_tokens),
        speculation=None,
        stop=(),
        include_stop_string=False,
        skip_special_tokens=True,
    )
    return blake2b(repr(alike).encode(), digest_size=16).hexdigest()


def with_first(handoff: Handoff | None, request: Request, event: TokenEvent) -> Handoff | None:
    """What another engine is told of a prompt that was read for it, with the token that was drawn. `event`: the last
    of the answer, which the request wanted to be of one token."""
    if handoff is None or handoff.unread or not _may_tell(request) or len(event.token_ids) != 1:
        return handoff
    if event.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH) or request.sampling.max_tokens != 1:
        return handoff
    first = FirstToken(event.token_ids[0], drawn_as(request.sampling))
    for logprobs in event.logprobs:
        first = first._replace(logprob=logprobs.logprob, top=logprobs.top)
    return replace(handoff, first=first)


def believed(request: Request, handing: Handing | None, vocab_size: int) -> Handoff | None:
    """The handoff of a request, without a first token that this engine might not have drawn. `handing`: None: it is of
    no fleet."""
    handoff, first = request.handoff, request.first
    if handoff is None or first is None:
        return handoff
    is_own = handing is not None and handing.knows_model(handoff) and 0 <= first.token_id < vocab_size
    has_logprobs = (first.logprob is not None) == (request.sampling.logprobs is not None)
    if is_own and has_logprobs and _may_tell(request) and first.drawn_as == drawn_as(request.sampling):
        return handoff
    return replace(handoff, first=None)


def _may_tell(request: Request) -> bool:
    """Of several samples each has a first token of its own, and logprobs of a prompt come before it."""
    return request.sampling.n == 1 and request.sampling.prompt_logprobs is None and not request.wants_vector
