"""How far gaps and a newcomer's first token trade on two cores, computed from figures that were measured there: the
real scheduler on a clock of its own, and steps that take what their tokens take.

    python -m bench.promise_frontier

Measured were a step of 8 streams, and the first token of a prompt of 4,000 tokens, unchunked and beside a promise of
twice the gap. What a token of the prompt takes is supposed to grow evenly along the context. Its two ends were chosen
so that the steps of 16 tokens and more that were planned then give the first token that was measured beside it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.service_level import ServiceLevel, ServiceLevels
from twostroke.cost.floor import StepWork
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import KVGroupShape, ModelShape
from twostroke.planner.simulate import Prompts, Replica, ReplicaSpec
from twostroke.planner.trace import TraceRequest
from twostroke.scheduling.config import SchedulerConfig

STREAMS_S, UNCHUNKED_S = 0.0109, 3.40
"""As `bench.promises --parts newcomer` measured them on 2026-11-18."""
NUM_STREAMS, NUM_TOKENS = 8, 4000
FIRST_TOKEN_MS, LAST_TOKEN_MS = 0.445, 0.905
"""What one more token of the prompt takes, at its beginning and at its end."""
PROMISES = (1.5, 2.0, 2.3, 2.5, 3.0, 4.0)
_UNUSED_SHAPE = ModelShape(10**6, 10**6, 10**5, 10**6, 1, 16, (KVGroupShape(1, None, 64),))


@dataclass(frozen=True, slots=True)
class Found:
    longest_gap_s: float
    mean_gap_s: float
    """While the newcomer was read."""
    ttft_s: float


def read_s(start: int, length: int) -> float:
    middle = (start + length / 2) / NUM_TOKENS
    return 1e-3 * length * (FIRST_TOKEN_MS + (LAST_TOKEN_MS - FIRST_TOKEN_MS) * middle)


def step_seconds(work: StepWork) -> float:
    return (STREAMS_S if work.contexts else 0.0) + sum(read_s(*chunk) for chunk in work.chunks)


def played(policy: str, times: float) -> Found:
    """Streams that were promised gaps so many times as long as their own, and the newcomer."""
    levels = ServiceLevels((ServiceLevel("default"), ServiceLevel("even", itl_s=times * STREAMS_S)))
    replica = Replica(
        ReplicaSpec(
            step_seconds,
            _UNUSED_SHAPE,
            Ceilings(1e9, 1e9, "supposed"),
            SchedulerConfig(max_context=8192, max_tokens_per_step=4096, max_running=64),
            KVLayout(16, (KVGroup((0,), None, 20_000),)),
            policy=policy,
            levels=levels,
        )
    )
    prompts = Prompts()
    for number in range(NUM_STREAMS):
        replica.add(prompts.request(TraceRequest(0.0, 1, 3000, tenant=f"quiet-{number}", service_level="even")))
    replica.play_until(20 * STREAMS_S)
    replica.add(prompts.request(TraceRequest(replica.now_s, NUM_TOKENS, 1, tenant="newcomer")))
    timings = [advance.sequence.timing for advance in replica.play_until(inf)]
    first = next(timing for timing in timings if len(timing.token_times_s) == 1)
    ttft_s = first.ttft_s or inf
    stream = next(timing for timing in timings if timing is not first)
    times_s = [at_s for at_s in stream.token_times_s if first.arrival_s <= at_s <= first.arrival_s + ttft_s]
    gaps_s = [later - before for before, later in pairwise(times_s)]
    return Found(max(stream.itl_s), statistics.mean(gaps_s), ttft_s)


def main() -> None:
    whole_s = read_s(0, NUM_TOKENS)
    share = whole_s / UNCHUNKED_S
    print(f"8 streams write, {1e3 * STREAMS_S:.1f} ms a step; the prompt alone takes {whole_s:.2f} s in small chunks,")
    print(f"{share:.2f} of the {UNCHUNKED_S:.2f} s that it took unchunked. With a mean gap of T times the")
    print(f"undisturbed one, its first token takes {share:.2f} x T / (T - 1) times as long as unchunked")
    print("\npromise   longest gap   mean gap   TTFT, fair          TTFT, slack")
    for times in PROMISES:
        fair, slack = (played(policy, times) for policy in ("fair", "slack"))
        longest, mean = fair.longest_gap_s / STREAMS_S, fair.mean_gap_s / STREAMS_S
        first = "   ".join(f"{one.ttft_s:5.2f} s ({one.ttft_s / UNCHUNKED_S:.2f} x)" for one in (fair, slack))
        print(f"  {times:.1f} x      {longest:.2f} x        {mean:.2f} x     {first}")


if __name__ == "__main__":
    main()
