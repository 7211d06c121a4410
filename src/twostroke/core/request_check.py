"""Checks that a request's token ids exist in a model's vocabulary. This is done once, before the request is queued, so
that no backend meets an id it cannot index."""

from __future__ import annotations

from twostroke.core.errors import BadRequestError
from twostroke.core.request import Request
from twostroke.core.setting import shown

NO_VECTORS = "this model writes text and gives no vectors: nothing in its files says how its states are pooled"
NO_TOKENS = "this model gives vectors and writes no text: ask it for embeddings, or for a ranking"


def check_request(request: Request, vocab_size: int) -> None:
    """Raise BadRequestError, naming the field, where a token id lies outside the vocabulary."""
    sampling = request.sampling
    named_ids = (
        ("prompt_token_ids", request.prompt_token_ids),
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
    )
    for name, token_ids in named_ids:
        if not token_ids:
            continue
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < vocab_size:
                raise BadRequestError(
                    f"{name} holds the token id {shown(token_id)}; this model's ids run from 0 to {vocab_size - 1}"
                )
    if sampling.min_tokens > 0 and sum(token_id < vocab_size for token_id in request.stop_ids) >= vocab_size:
        raise BadRequestError("min_tokens cannot be met: every token of the vocabulary is a stop token")


def check_kind(request: Request, *, gives_vectors: bool) -> None:
    """Raise BadRequestError if a request wants a vector from a model that writes text, or text from one that gives
    vectors."""
    if request.wants_vector and not gives_vectors:
        raise BadRequestError(NO_VECTORS)
    if gives_vectors and not request.wants_vector:
        raise BadRequestError(NO_TOKENS)
