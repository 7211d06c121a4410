"""From a request's fields to SamplingParams, held to this server's limits and this model's context. Every refusal names
the field, and both numbers where there are two."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.core.errors import BadRequestError
from twostroke.core.request_check import NO_VECTORS
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.speculation import SpeculationParams, as_speculation, check_speculation
from twostroke.core.vectors import VectorFacts
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.messages import Ready
from twostroke.server.schemas import ChatBody, CompletionBody, DrawingBody, ResponsesBody, Speculation
from twostroke.server.settings import Limits

LOGPROBS = "message.output_text.logprobs"
"""What a response may be asked to include."""
AS_GIVEN = (
    *("min_tokens", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop_token_ids", "ignore_eos"),
)
"""Fields that mean the same here and there; one that is not given is as SamplingParams has it."""
DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's plain completions give when nothing is asked for."""


def chat_sampling(body: ChatBody, limits: Limits) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    name = chat_limit(body)
    max_tokens = getattr(body, name)
    _at_most(name, max_tokens, limits.max_output_tokens)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _sampling(body, limits, max_tokens, logprobs, num_samples=body.n or 1)


def chat_limit(body: ChatBody) -> str:
    """The field that says how long an answer may be, of the two that may."""
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def completion_sampling(body: CompletionBody, limits: Limits) -> SamplingParams:
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens is 0, which only makes sense with echo", "max_tokens")
    _at_most("max_tokens", max_tokens, limits.max_output_tokens)
    num_samples, logprobs = body.n or 1, body.logprobs
    if body.best_of is not None:
        if body.best_of < num_samples:
            raise bad_request(f"best_of is {body.best_of}, and must not be less than n, {num_samples}", "best_of")
        if body.best_of > num_samples and body.stream:
            message = "best_of cannot be more than n in a stream: which answers are best is known at their end"
            raise bad_request(message, "best_of")
        _at_most("best_of", body.best_of, limits.max_samples)
        if body.best_of > num_samples:
            num_samples, logprobs = body.best_of, logprobs or 0  # by these they are ranked
    # The engine always writes a token; of an echo alone it is left out afterwards.
    return _sampling(body, limits, max(1, max_tokens), logprobs, body.logprobs if body.echo else None, num_samples)


def responses_sampling(body: ResponsesBody, limits: Limits) -> SamplingParams:
    _at_most("max_output_tokens", body.max_output_tokens, limits.max_output_tokens)
    wants_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    return _sampling(body, limits, body.max_output_tokens, (body.top_logprobs or 0) if wants_logprobs else None)


def _sampling(
    body: DrawingBody,
    limits: Limits,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    num_samples: int = 1,
) -> SamplingParams:
    _at_most("n", num_samples, limits.max_samples)
    try:
        return SamplingParams(
            **{name: value for name in AS_GIVEN if (value := getattr(body, name)) is not None},
            max_tokens=max_tokens,
            top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
            logit_bias=_logit_bias(body.logit_bias, limits),
            seed=None if body.seed is None else body.seed % 2**64,
            n=num_samples,
            stop=_stop_strings(body.stop, limits),
            include_stop_string=bool(body.include_stop_str_in_output),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            speculation=_speculation(body.speculation),
        )
    except BadRequestError as error:
        raise as_api_error(error) from None


def _speculation(asked: str | Speculation | None) -> SpeculationParams | None:
    return as_speculation(asked.model_dump() if isinstance(asked, Speculation) else asked)


def as_api_error(error: BadRequestError) -> ApiError:
    """The engine's sentences begin with the field where one is at fault."""
    first = str(error).split(" ", 1)[0].partition("[")[0].removesuffix("'s")
    names = ResponsesBody.model_fields.keys() | ChatBody.model_fields.keys() | CompletionBody.model_fields.keys()
    return bad_request(str(error), first if first in names else None)


def check_served(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams, facts: Ready, param: str, limit: str = "max_tokens"
) -> None:
    """What the engine would refuse, refused before it is sent there. `param` is the field that the prompts came in,
    `limit` the one that says how long an answer may be."""
    try:
        check_speculation(sampling.speculation, facts.engine.draft_methods)
    except BadRequestError as error:
        raise as_api_error(error) from None
    for prompt in prompts:
        if not prompt:
            raise bad_request(f"{param} is empty: at least one token is needed", param)
        if len(prompt) >= facts.max_context:
            raise beyond_context(str(len(prompt)), facts.max_context, param)
        wanted = sampling.max_tokens
        if wanted is not None and len(prompt) + wanted > facts.max_context:
            raise bad_request(
                f"the prompt's {len(prompt)} tokens and {limit} {wanted} make {len(prompt) + wanted} tokens, "
                f"and the context is {facts.max_context}",
                limit,
                "context_length_exceeded",
            )
        if max(prompt) >= facts.vocab_size:
            raise bad_request(
                f"{param} holds the token id {max(prompt)}; this model's ids run from 0 to {facts.vocab_size - 1}",
                param,
            )


def beyond_context(num_tokens: str, max_context: int, param: str) -> ApiError:
    return bad_request(
        f"the prompt has {num_tokens} tokens, and the context is {max_context} tokens, "
        "of which one at least is for the answer",
        param,
        "context_length_exceeded",
    )


def beyond_model(num_tokens: str, most: int, param: str) -> ApiError:
    return bad_request(
        f"{param} holds a text of {num_tokens} tokens, and this model takes {most} at most; truncate_prompt_tokens of "
        "-1 cuts it",
        param,
        "context_length_exceeded",
    )


def check_vectors(facts: Ready) -> VectorFacts:
    """What the model tells of its vectors; raises where it gives none."""
    if facts.vectors is None:
        raise bad_request(NO_VECTORS, "model", "not_an_embedding_model")
    return facts.vectors


def check_text_ids(ids: Sequence[Sequence[int]], facts: Ready, param: str) -> None:
    """What the engine would refuse of texts for vectors, refused before it is sent there."""
    for text in ids:
        if not text:
            raise bad_request(f"{param} holds an empty text: at least one token is needed", param)
        if len(text) > facts.max_context:
            raise beyond_model(str(len(text)), facts.max_context, param)
        if (highest := max(text)) >= facts.vocab_size:
            raise bad_request(
                f"{param} holds the token id {highest}; this model's ids run from 0 to {facts.vocab_size - 1}", param
            )


def _logit_bias(bias: dict[str, float] | None, limits: Limits) -> dict[int, float]:
    if not bias:
        return {}
    if len(bias) > limits.max_logit_bias:
        raise bad_request(
            f"logit_bias has {len(bias)} entries; at most {limits.max_logit_bias} are allowed", "logit_bias"
        )
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad_request(f"logit_bias must map token ids to numbers, and {key!r:.40} is no token id", "logit_bias")
    return {int(key): value for key, value in bias.items()}


def _stop_strings(stop: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > limits.max_stop_strings:
        raise bad_request(f"stop holds {len(strings)} strings; at most {limits.max_stop_strings} are allowed", "stop")
    for text in strings:
        if len(text) > limits.max_stop_chars:
            raise bad_request(
                f"a stop string has {len(text)} characters; at most {limits.max_stop_chars} are allowed", "stop"
            )
    return strings


def _at_most(name: str, value: int | None, limit: int | None) -> None:
    if value is not None and limit is not None and value > limit:
        raise bad_request(f"{name} is {value}; this server allows at most {limit}", name)
