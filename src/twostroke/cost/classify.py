"""Whether a load is prefill-bound or decode-bound: where the machine's seconds go, from the lengths that are asked for
and answered, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from twostroke.cost.floor import StepWork, step_floor_s
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape

Bound = Literal["prefill", "decode", "balanced"]
BOUND_FROM = 0.6
"""A phase with this share of the machine's seconds is what binds."""


@dataclass(frozen=True, slots=True)
class RequestLengths:
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Of the input, what the prefix cache holds: it is not computed."""

    def __post_init__(self) -> None:
        if min(self.input_tokens, self.output_tokens) < 1:
            raise ValueError("a request reads at least one token and writes at least one")
        if not 0 <= self.cached_tokens < self.input_tokens:
            raise ValueError("cached tokens are fewer than those of the input: one is always computed")


@dataclass(frozen=True, slots=True)
class WorkloadClass:
    bound: Bound
    prefill_s: float
    """Machine seconds that all the prompts take."""
    decode_s: float
    """Machine seconds that all the answers take, `batch` streams sharing a step."""
    batch: int
    kv_is_half_empty: bool | None
    """Whether KV is no sign of the load: less than half of it is in use while prompts bind. None: not asked."""
    advice: tuple[str, ...]

    @property
    def prefill_share(self) -> float:
        return self.prefill_s / (self.prefill_s + self.decode_s)

    @property
    def reason(self) -> str:
        streams = f"{self.batch} streams sharing a step" if self.batch > 1 else "one stream a step"
        return (
            f"prompts take {self.prefill_share:.0%} of the machine's seconds and answers {1 - self.prefill_share:.0%}, "
            f"{streams}"
        )


def classify(
    shape: ModelShape,
    ceilings: Ceilings,
    requests: Sequence[RequestLengths],
    batch: int,
    *,
    step_seconds: Callable[[StepWork], float] | None = None,
    kv_space_bytes: float | None = None,
) -> WorkloadClass:
    """`requests` is a sample of the load, `batch` how many streams decode together. Seconds are floors, unless
    `step_seconds` knows better."""
    if not requests or batch < 1:
        raise ValueError("a load has at least one request and one stream")
    seconds = step_seconds or (lambda work: step_floor_s(shape, work, ceilings))
    prefill_s = sum(
        seconds(StepWork(chunks=((one.cached_tokens, one.input_tokens - one.cached_tokens),), num_sampling_chunks=1))
        for one in requests
    )
    # A stream's share of a step among streams like it, over all its tokens after the first.
    decode_s = sum(
        (one.output_tokens - 1)
        * seconds(StepWork(contexts=(one.input_tokens + one.output_tokens // 2,) * batch))
        / batch
        for one in requests
    )
    share = prefill_s / (prefill_s + decode_s)
    bound: Bound = "prefill" if share >= BOUND_FROM else "decode" if share <= 1 - BOUND_FROM else "balanced"
    half_empty = None
    if kv_space_bytes is not None:
        mean_held = sum(shape.kv_bytes_read(one.input_tokens + one.output_tokens // 2) for one in requests)
        half_empty = bound == "prefill" and batch * mean_held / len(requests) < kv_space_bytes / 2
    return WorkloadClass(bound, prefill_s, decode_s, batch, half_empty, _advice(bound, requests, half_empty))


def _advice(bound: Bound, requests: Sequence[RequestLengths], half_empty: bool | None) -> tuple[str, ...]:
    cached = sum(one.cached_tokens for one in requests) / sum(one.input_tokens for one in requests)
    advice: list[str] = []
    if bound != "decode":
        if cached < 0.5:
            advice.append("put what prompts share at their beginning, so that the prefix cache can serve it")
        advice.append("arithmetic is short: 8-bit arithmetic (fp8, int8) or a device with more FLOPs")
        advice.append("scale by the prefill backlog or by TTFT, not by KV occupancy")
        if half_empty:
            advice.append("KV stays less than half full at this load: its occupancy would call the machine idle")
    if bound != "prefill":
        advice.append("bandwidth is short: fewer bits a weight, or a device with more bytes a second")
        advice.append("more streams a step share each reading of the weights, as long as KV and TPOT allow")
    if bound == "balanced":
        advice.append("both phases count: chunked prefill keeps them from stalling each other")
    return tuple(advice)
