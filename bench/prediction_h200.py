"""What an H200 did, as recorded in bench/results, beside what is predicted of it: a step's cost is fitted to what was
recorded of single steps and single prompts, and the workloads of `twostroke bench` are then played on a simulated
engine, whose figures were no part of the fit. Needs no GPU."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.cost.floor import StepWork
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape
from twostroke.cost.step_cost import StepCost
from twostroke.engine.shape import shape_of
from twostroke.lab.figures import Floors
from twostroke.lab.sizes import FULL
from twostroke.lab.stage import Stage
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind
from twostroke.planner.simulate import Replica, ReplicaSpec
from twostroke.scheduling.config import SchedulerConfig

HERE = Path(__file__).resolve().parent
PREDICTED = ("batch", "prefix", "noisy", "nano")
FITTED = {("prefix", "TTFT cold")}
"""Figures of those workloads that are part of the fit."""
FIGURES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "out_tok_s": "output",
    "s": "duration",
    "itl_p50": "ITL p50",
    "itl_p99": "ITL p99",
    "ttft_cold": "TTFT cold",
    "ttft_hit": "TTFT hit",
    "itl_p50_before": "ITL p50 before",
    "itl_p99_during": "ITL p99 during",
    "long_ttft": "long TTFT",
}
UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "tok/s": 1.0}
OBSERVED_TIMES = 40
RUN = 20
"""Of bench/results/cuda-bench.txt."""
NEWCOMER_S_PER_TOKEN = 1.0e-3 / 8256
"""The host's work on a prompt before its first launch. Of that machine's host nothing is recorded: this is what
bench/host_step.py found, on two cores of an AMD EPYC, of the engine as it was in these runs."""
BLOCK_SIZE, MAX_TOKENS_PER_STEP, MAX_RUNNING, MAX_CONTEXT = 64, 8192, 512, 40960


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    """As the records call it."""
    folder: str
    itl_target_s: float
    """As the recorded run was paced."""
    num_blocks: int


MODELS = (
    Model("8B", "llama-3.1-8b", 0.035, 14844),
    Model("0.6B", "qwen3-0.6b", 0.035, 18984),
    Model("30B", "qwen3-30b-a3b", 0.035, 13059),
)


def recorded_figures(model: str) -> tuple[dict[tuple[str, str], float], Ceilings]:
    """Of the last run with weights in 16 bits, by workload and title: seconds, or tokens a second."""
    text = (HERE / "results" / "cuda-bench.txt").read_text(encoding="utf-8")
    part = text.split(f"---- run {RUN},")[1].split("---- run")[0].split(f"== {model}\n")[1].split("\n== ")[0]
    found, workload = {}, ""
    for line in part.splitlines():
        match = re.match(r"(\w*)\s+([A-Za-z][\w ]*?)\s+([\d,.]+) (µs|ms|s|tok/s|tokens)\s", line)
        if match is not None:
            workload = match.group(1) or workload
            if match.group(4) == "tokens":
                continue
            number = float(match.group(3).replace(",", ""))
            found[workload, match.group(2)] = number * UNITS[match.group(4)]
    rates = re.search(r"allows: ([\d.]+) T multiply-adds/s, ([\d.]+) TB/s", part)
    assert rates is not None
    return found, Ceilings(float(rates.group(2)) * 1e12, float(rates.group(1)) * 1e12, f"run {RUN} on the H200")


def recorded_steps(model: str) -> list[tuple[StepWork, float]]:
    """Steps of decode slots alone."""
    text = (HERE / "results" / "cuda-step-profile.txt").read_text(encoding="utf-8")
    part = text.split(f"== profile {model}\n")[1].split("== profile")[0]
    found = re.findall(r"^(\d+) rows at context (\d+): ([\d.]+) ms a step", part, re.MULTILINE)
    return [(StepWork(contexts=[int(context)] * int(rows)), float(ms) / 1e3) for rows, context, ms in found]


def fitted_cost(shape: ModelShape, ceilings: Ceilings, model: str, figures: dict[tuple[str, str], float]) -> StepCost:
    """From single steps, single prompts and single streams."""
    seen = recorded_steps(model)
    single, prefill = FULL["single"], FULL["prefill"]
    for workload, name in ((single, "single"), (prefill, "prefill")):
        prompt_len, out_len = getattr(workload, "prompt_len"), getattr(workload, "out_len")  # noqa: B009
        if (name, "TTFT") in figures:
            seen.append((StepWork(((0, prompt_len),), 1), figures[name, "TTFT"]))
            seen.append((StepWork(contexts=[prompt_len + out_len // 2]), figures[name, "TPOT"]))
    if ("prefix", "TTFT cold") in figures:
        seen.append((StepWork(((0, 8192 + 64),), 1), figures["prefix", "TTFT cold"]))
    cost, order = StepCost(shape, ceilings), random.Random(0)
    for _ in range(OBSERVED_TIMES):
        for work, seconds in order.sample(seen, len(seen)):
            cost.observe(work, seconds)
    return cost


class SimulatedEngine:
    """The four methods that workloads drive, on a virtual clock."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.replica = Replica(spec)
        self._count = 0

    def clock(self) -> float:
        return self.replica.now_s

    def add(self, token_ids: Sequence[int], out_len: int) -> str:
        self._count += 1
        sampling = SamplingParams(max_tokens=out_len, ignore_eos=True)
        self.replica.add(Request(str(self._count), tuple(token_ids), sampling, arrival_s=self.replica.now_s))
        return str(self._count)

    def step(self) -> list[tuple[str, int, bool]]:
        advances = self.replica.step()
        return [(one.sequence.request.request_id, len(one.sampled), one.finished) for one in advances]

    def busy(self) -> bool:
        return self.replica.busy

    def clear_prefix(self) -> None:
        self.replica.scheduler.clear_prefixes()


def replica_of(model: Model) -> tuple[ReplicaSpec, dict[tuple[str, str], float], int]:
    """As the recorded engine was set up, at the fitted cost; the recorded figures; the size of the vocabulary."""
    checkpoint = random_checkpoint(HERE / "shapes" / model.folder, WeightKind.BF16, name=model.name)
    groups = checkpoint.spec.kv_groups()
    shape = shape_of(checkpoint, [2 * len(group.layers) * group.values for group in groups])
    figures, ceilings = recorded_figures(model.name)
    replica = ReplicaSpec(
        fitted_cost(shape, ceilings, model.name, figures).seconds,
        shape,
        ceilings,
        SchedulerConfig(MAX_CONTEXT, MAX_TOKENS_PER_STEP, MAX_RUNNING),
        KVLayout(BLOCK_SIZE, tuple(KVGroup(group.layers, group.window, model.num_blocks) for group in groups)),
        itl_target_s=model.itl_target_s,
        newcomer_s_per_token=NEWCOMER_S_PER_TOKEN,
    )
    return replica, figures, checkpoint.spec.vocab_size


def predictions() -> list[tuple[str, float, float]]:
    """Of each figure that the fit has not seen: its name, predicted, recorded; seconds, or tokens a second."""
    found = []
    for model in MODELS:
        replica, figures, vocab_size = replica_of(model)
        for name in PREDICTED:
            if not any(workload == name for workload, _ in figures):
                continue
            engine = SimulatedEngine(replica)
            stage = Stage(engine, engine.clock)
            FULL[name].play(stage, vocab_size)
            no_floors = Floors(replica.shape, replica.ceilings, [StepWork(contexts=[1])] * stage.num_steps)
            for figure in FULL[name].figures(stage, no_floors):
                title = FIGURES.get(figure.name.removesuffix("_ms"), "")
                if (name, title) in figures and (name, title) not in FITTED:
                    value = figure.value / 1e3 if figure.name.endswith("_ms") else figure.value
                    found.append((f"{model.name} {name}, {title}", value, figures[name, title]))
    return found


if __name__ == "__main__":
    for name, predicted, recorded in predictions():
        print(f"{name:<32} {predicted:12.4f} {recorded:12.4f} {predicted / recorded - 1:+8.1%}")
