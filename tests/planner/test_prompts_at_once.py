"""When the first tokens come of prompts that are sent at once, on the figures of an H200 and on a virtual clock: with
steps that end where another prompt would only delay those already read, and with steps that are filled."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from twostroke.cli.simulate_device import on_device
from twostroke.config import EngineConfig
from twostroke.core.service_level import ServiceLevels
from twostroke.cost.floor import work_of
from twostroke.cost.hardware import Ceilings
from twostroke.cost.step_cost import StepCost
from twostroke.planner.report import SimulationReport, percentiles
from twostroke.planner.simulate import Prompts, Replica, ReplicaSpec, simulate
from twostroke.planner.trace import Lengths, TraceRequest, bursts
from twostroke.scheduling import pace
from twostroke.scheduling.pace import PrefillPace


def drawn(seed: int, count: int, prompts: tuple[int, int], answers: tuple[int, int]) -> list[TraceRequest]:
    draw = random.Random(seed).randint
    return [TraceRequest(0.0, draw(*prompts), draw(*answers)) for _ in range(count)]


FEW = [TraceRequest(0.0, length, 240) for length in (1964, 1802, 2687, 2484, 1585, 1944, 2743)]
"""As the comparison on a GPU draws them. Four of them do not fit into 8,192 tokens."""
LOADS = {
    "few": FEW,
    "documents": drawn(6, 48, (5000, 7000), (100, 200)),
    "batch": [TraceRequest(0.0, 1024, 256)] * 128,
    "nano": drawn(0, 256, (100, 1024), (100, 1024)),
    "bursts": bursts(8.0, 160, Lengths(200, 2000), Lengths(50, 300), burst=16),
}


def replica_of(model: str) -> ReplicaSpec:
    config = EngineConfig(max_context=16_384)
    spec = on_device(model, "h200", 1, config).spec
    return replace(spec, levels=ServiceLevels())  # in order of arrival: what is tried is which prompts share a step


@contextmanager
def filled_steps() -> Iterator[None]:
    """Prompts share steps as long as the budget and the target allow."""
    share, pace.LOST_SHARE = pace.LOST_SHARE, -1.0
    try:
        yield
    finally:
        pace.LOST_SHARE = share


def both(model: str, load: str) -> tuple[SimulationReport, SimulationReport]:
    spec = replica_of(model)
    with filled_steps():
        before = simulate(spec, LOADS[load])
    return before, simulate(spec, LOADS[load])


@pytest.mark.parametrize("model", ["Qwen2.5-7B", "Gemma-3-12B", "Llama-3.1-8B"])
def test_a_few_prompts_do_not_all_finish_together(model: str) -> None:
    before, after = both(model, "few")
    assert len({round(ttft_s, 6) for ttft_s in before.served.ttft_s}) == 2, "two steps, whatever the prompts"
    assert len({round(ttft_s, 6) for ttft_s in after.served.ttft_s}) == 4, "one, one, two, and then the rest"
    assert after.ttft_s["p50"] < 0.7 * before.ttft_s["p50"]
    assert statistics.fmean(after.served.ttft_s) < 0.85 * statistics.fmean(before.served.ttft_s)
    assert max(after.served.ttft_s) < 1.02 * max(before.served.ttft_s)
    assert after.itl_s["p99"] <= 1.02 * before.itl_s["p99"], "no stream is held up more often than one in a hundred"
    assert after.output_tokens_per_s > 0.99 * before.output_tokens_per_s


@pytest.mark.parametrize(
    ("model", "load"),
    [
        *(("Qwen2.5-7B", load) for load in ("documents", "batch", "nano", "bursts")),
        *(("Gemma-3-12B", load) for load in ("documents", "batch", "bursts")),
        *((model, "batch") for model in ("Qwen3-30B-A3B", "Qwen3-0.6B")),
    ],
)
def test_longer_lines_are_read_as_fast_as_before(model: str, load: str) -> None:
    before, after = both(model, load)
    assert after.output_tokens_per_s > 0.99 * before.output_tokens_per_s
    assert statistics.fmean(after.served.ttft_s) < 1.005 * statistics.fmean(before.served.ttft_s)
    assert after.itl_s["p99"] <= 1.01 * before.itl_s["p99"]


def test_a_model_whose_steps_are_all_launching_reads_prompts_together() -> None:
    before, after = both("Qwen3-0.6B", "few")
    assert list(after.served.ttft_s) == list(before.served.ttft_s)


class Learning(Replica):
    """As an engine is: its pace asks a cost model that begins with typical factors and learns from each step."""

    def __init__(self, spec: ReplicaSpec) -> None:
        super().__init__(spec)
        assert spec.itl_target_s is not None
        cost = StepCost(spec.shape, Ceilings(4.6e12, 395e12, "as an H200 is measured at start"))
        self.scheduler = type(self.scheduler)(
            spec.scheduler, spec.layout, ledger=self.scheduler.ledger, pace=PrefillPace(cost.seconds, spec.itl_target_s)
        )
        self.cost, apply = cost, self.scheduler.apply

        def learning(step, result, now_s):  # type: ignore[no-untyped-def]
            advances = apply(step, result, now_s)
            cost.observe(work_of(step), result.compute_s)
            return advances

        self.scheduler.apply = learning  # type: ignore[method-assign]


@pytest.mark.parametrize("model", ["Qwen2.5-7B", "Gemma-3-12B", "Llama-3.1-8B"])
def test_an_engine_does_so_from_its_first_step_on(model: str) -> None:
    """Before it has learnt anything of this card, and no worse after a day's mix of loads."""
    spec = replica_of(model)
    with filled_steps():
        before_s = simulate(spec, FEW).ttft_s["p50"]
    replica, prompts = Learning(spec), Prompts()
    for load in ("few", "batch", "documents", "few"):
        replica.now_s += 1.0
        for asked in LOADS[load]:
            replica.add(prompts.request(TraceRequest(replica.now_s, asked.prompt_tokens, asked.output_tokens)))
        ended = []
        while replica.busy:
            ended += [one.sequence.timing.ttft_s for one in replica.step() if one.finished]
        if load == "few":
            assert percentiles([ttft_s for ttft_s in ended if ttft_s is not None])["p50"] < 0.7 * before_s
    assert replica.cost.error is not None and replica.cost.error < 0.05
