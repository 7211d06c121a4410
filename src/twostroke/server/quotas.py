"""How much work may be in flight, of one API key and in all, in samples and in tokens. A request counts with all that
it may come to, from when its prompt is known until its call ends. Knows no engine; a refusal has both numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.core.sampling_params import SamplingParams
from twostroke.server.errors import ApiError
from twostroke.server.messages import Ready
from twostroke.server.metrics import Metrics
from twostroke.server.settings import ServerSettings

MAX_TEXTS = 2048
"""That one request may have vectors of, as OpenAI allows."""
ALL = -2
"""Stands for all keys together, and for requests without one."""


@dataclass(frozen=True, slots=True)
class Work:
    samples: int
    """Prompts times `n`."""
    tokens: int
    """Of each sample: its prompt, and as many more as its answer may have."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may be in flight; None: there is no limit."""

    total_samples: int
    total_tokens: int
    key_samples: int | None
    key_tokens: int | None


def work_of(prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, facts: Ready) -> Work:
    per_prompt = (
        facts.max_context if sampling.max_tokens is None else len(prompt) + sampling.max_tokens for prompt in prompts
    )
    return Work(len(prompts) * sampling.n, sum(per_prompt) * sampling.n)


def bounds_of(settings: ServerSettings, facts: Ready) -> Bounds:
    """What was asked for, or what suits the engine: twice as many samples as may run and wait, all of the longest for
    half of them. Where there are several keys, none may have more than half of it."""
    limits = settings.limits
    most_prompts = limits.max_prompts if facts.vectors is None else 2 * MAX_TEXTS
    capacity = max(facts.engine.max_running + limits.max_queue, most_prompts)
    total_samples = limits.max_samples_in_flight or 2 * capacity
    total_tokens = limits.max_tokens_in_flight or capacity * facts.max_context
    key_samples, key_tokens = limits.max_samples_per_key, limits.max_tokens_per_key
    if len(settings.api_keys) > 1:
        key_samples, key_tokens = key_samples or -(-total_samples // 2), key_tokens or -(-total_tokens // 2)
    return Bounds(total_samples, total_tokens, key_samples, key_tokens)


class Quotas:
    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._samples: Counter[int] = Counter()
        self._tokens: Counter[int] = Counter()

    def samples_of(self, key: int) -> int:
        return self._samples[key]

    def take(self, key: int, work: Work, facts: Ready) -> None:
        """Counts it, or raises: 429 with the time after which there should be room, 400 for what there never is."""
        bounds = bounds_of(self._settings, facts)
        if key >= 0:
            self._check(key, "samples", self._samples[key], work.samples, bounds.key_samples, facts)
            self._check(key, "tokens", self._tokens[key], work.tokens, bounds.key_tokens, facts)
        self._check(ALL, "samples", self._samples[ALL], work.samples, bounds.total_samples, facts)
        self._check(ALL, "tokens", self._tokens[ALL], work.tokens, bounds.total_tokens, facts)
        self._add(key, work.samples, work.tokens)

    def give_back(self, key: int, work: Work) -> None:
        self._add(key, -work.samples, -work.tokens)

    def seconds_for(self, num_samples: int, facts: Ready) -> int:
        """Seconds until this many of the samples in flight will have ended, at the pace of late."""
        at_once = max(1, min(facts.engine.max_running, self._samples[ALL]))
        seconds = self._metrics.mean_sample_s * num_samples / at_once
        return math.ceil(min(self._settings.limits.request_timeout_s, max(1.0, seconds)))

    def _add(self, key: int, samples: int, tokens: int) -> None:
        for owner in (ALL,) if key < 0 else (key, ALL):
            self._samples[owner] += samples
            self._tokens[owner] += tokens

    def _check(self, owner: int, unit: str, in_flight: int, asked: int, limit: int | None, facts: Ready) -> None:
        if limit is None or in_flight + asked <= limit:
            return
        whose = "this API key" if owner != ALL else "this server"
        self._metrics.rejected.labels(f"{'key' if owner != ALL else 'total'}_{unit}").inc()
        if asked > limit:
            message = f"this request may come to {asked} {unit}, and {whose} may have {limit} in flight"
            raise ApiError(400, message, code=f"{unit}_limit")
        message = f"{whose} has {in_flight} {unit} in flight and may have {limit}; this request may come to {asked}"
        too_many = in_flight + asked - limit
        if unit == "tokens":  # as samples of the usual length
            too_many = math.ceil(too_many * self._samples[owner] / in_flight)
        raise ApiError(
            429, message, code=f"{unit}_limit", headers={"Retry-After": str(self.seconds_for(too_many, facts))}
        )
