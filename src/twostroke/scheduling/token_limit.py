"""How long a sequence may become: its prompt and its answer, or its prompt alone where that becomes a vector."""

from __future__ import annotations

from twostroke.core.errors import BadRequestError
from twostroke.core.request import Request
from twostroke.core.setting import shown
from twostroke.scheduling.config import SchedulerConfig


class TokenLimit:
    def __init__(self, config: SchedulerConfig, pool_limit: int | None) -> None:
        """`pool_limit`: the most tokens that a sequence alone can grow to in KV, the last of which it does not hold;
        None: any number."""
        self._limit, self._limited_by = config.max_context, f"max_context is {config.max_context}"
        if pool_limit is not None and pool_limit < config.max_context:
            self._limit, self._limited_by = pool_limit, f"the KV cache has room for {pool_limit}"
        texts = [config.max_context]
        texts += [] if pool_limit is None else [pool_limit - 1]
        texts += [config.max_tokens_per_step] if config.whole_prompts else []
        self._text_limit = min(texts)

    def total_tokens(self, request: Request) -> int:
        """Prompt plus output, at most; raises for what could never finish."""
        prompt_len, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        limit, where = self._limit, self._limited_by
        if request.wants_vector:
            return self._vector_tokens(prompt_len)
        if prompt_len >= limit:
            raise BadRequestError(
                f"the prompt has {prompt_len} tokens, and {where} tokens, of which one at least is for the answer"
            )
        if max_tokens is None:
            return limit
        if prompt_len + max_tokens > limit:
            raise BadRequestError(
                f"the prompt's {prompt_len} tokens and max_tokens {shown(max_tokens)} make "
                f"{shown(prompt_len + max_tokens)} tokens, and {where}"
            )
        return prompt_len + max_tokens

    def _vector_tokens(self, prompt_len: int) -> int:
        """The vector counts as the one token that follows the prompt, and that is never an input."""
        if prompt_len > self._text_limit:
            raise BadRequestError(f"the text has {prompt_len} tokens, and this model takes {self._text_limit} at most")
        return prompt_len + 1
