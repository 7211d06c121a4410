"""What is read off a workload's token times: one definition of each column for every engine. Knows no engine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.peers.workloads import Workload

MILLISECONDS = 1e3


@dataclass(frozen=True, slots=True)
class Output:
    """One answer: its tokens, and when each was in the caller's hands, in seconds since it was asked for."""

    token_ids: tuple[int, ...]
    token_times_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0]

    @property
    def decode_tokens_per_s(self) -> float:
        return (len(self.token_times_s) - 1) / (self.token_times_s[-1] - self.token_times_s[0])


@dataclass(frozen=True, slots=True)
class Metric:
    workload: str
    name: str
    title: str
    higher_is_better: bool
    digits: int = 0

    @property
    def key(self) -> str:
        return f"{self.workload}.{self.name}"

    def lead(self, ours: float, theirs: float) -> float:
        """How many times better ours is: above 1, we lead, whichever way the metric points."""
        return ours / theirs if self.higher_is_better else theirs / ours


METRICS = (
    Metric("w1", "prefill_tokens_per_s", "W1 prefill tok/s", True),
    Metric("w1", "decode_tokens_per_s", "W1 decode tok/s", True, 1),
    Metric("w2", "prefill_tokens_per_s", "W2 prefill tok/s", True),
    Metric("w2", "decode_tokens_per_s", "W2 decode tok/s", True, 1),
    Metric("w3", "output_tokens_per_s", "W3 output tok/s", True),
    Metric("w3", "ttft_p50_s", "W3 TTFT p50 s", False, 2),
    Metric("w4", "hit_ttft_ms", "W4 hit TTFT ms", False, 1),
    Metric("start", "first_token_s", "start to first token s", False, 2),
)


def read_off(workload: Workload, prompts: Sequence[Sequence[int]], outputs: Sequence[Output]) -> dict[str, float]:
    """The workload's metrics, by name. Refuses an answer of the wrong length: it would make an engine look fast."""
    for output in outputs:
        if len(output.token_ids) != workload.output_tokens or len(output.token_times_s) != workload.output_tokens:
            raise ValueError(f"{workload.output_tokens} tokens were asked for and {len(output.token_ids)} came")
    if len(outputs) != workload.num_requests:
        raise ValueError(f"{workload.num_requests} answers were asked for and {len(outputs)} came")
    if not workload.at_once:
        hits_s = [output.ttft_s for output in outputs[1:]]  # the first one pays for the prefix
        return {
            "hit_ttft_ms": statistics.mean(hits_s) * MILLISECONDS,
            "worst_hit_ttft_ms": max(hits_s) * MILLISECONDS,
            "miss_ttft_ms": outputs[0].ttft_s * MILLISECONDS,
        }
    if workload.num_requests > 1:
        wall_s = max(output.token_times_s[-1] for output in outputs)
        return {
            "output_tokens_per_s": sum(len(output.token_ids) for output in outputs) / wall_s,
            "ttft_p50_s": statistics.median(output.ttft_s for output in outputs),
            "ttft_max_s": max(output.ttft_s for output in outputs),
            "wall_s": wall_s,
        }
    (output,), (prompt,) = outputs, prompts
    if output.token_times_s[-1] <= output.token_times_s[0]:
        raise ValueError("all tokens came at once: there is no time between them to measure")
    return {
        "prefill_tokens_per_s": len(prompt) / output.ttft_s,
        "decode_tokens_per_s": output.decode_tokens_per_s,
        "ttft_s": output.ttft_s,
        "wall_s": output.token_times_s[-1],
    }
