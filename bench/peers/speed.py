"""W1 to W4: in every repetition of every workload the engines take turns, in an order that rotates, and a noisy sample
is taken again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.peers.crew import Crew
from bench.peers.engines import Engine
from bench.peers.guard import Guard
from bench.peers.metrics import METRICS, Metric, Output, read_off
from bench.peers.summary import Sample
from bench.peers.worker import Worker
from bench.peers.workloads import PromptSource, Workload

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Plan:
    workloads: list[Workload]
    repetitions: int
    retries: int
    """How often a noisy sample is taken again."""


def measure_speed(
    crew: Crew,
    engines: list[Engine],
    plan: Plan,
    source: PromptSource,
    guard: Guard,
    after: Callable[[], None],
    samples: list[Sample],
) -> None:
    """Add all samples, the noisy ones among them, to `samples` as they come: an interrupted run keeps what it has.
    `after` is called after each repetition."""
    for workload in plan.workloads:
        _warm_up(crew, engines, workload, source)
    for repetition in range(plan.repetitions):
        for workload in plan.workloads:
            # A prompt set for each attempt, the same for every engine: nothing is in a prefix cache by accident.
            attempts = [source.prompts(workload) for _ in range(1 + plan.retries)]
            present = crew.present(engines)
            for engine in rotated(present, repetition):
                with crew.failing_leaves(engine):
                    samples += _sample(crew, engine, workload, attempts, repetition, guard)
        after()
        crew.say(f"repetition {repetition + 1} of {plan.repetitions} done")


def rotated(engines: list[Engine], by: int) -> list[Engine]:
    """No engine always follows the same one, or always goes first."""
    start = by % len(engines) if engines else 0
    return engines[start:] + engines[:start]


def run_workload(worker: Worker, workload: Workload, prompts: Prompts) -> list[Output]:
    if workload.at_once:
        return worker.generate(prompts, workload.output_tokens)
    return [output for prompt in prompts for output in worker.generate([prompt], workload.output_tokens)]


def _warm_up(crew: Crew, engines: list[Engine], workload: Workload, source: PromptSource) -> None:
    """The first call of a shape may compile or allocate: it is not measured. A few tokens of each prompt will do."""
    prompts = [prompt[:64] for prompt in source.prompts(workload)]
    for engine in crew.present(engines):
        with crew.failing_leaves(engine), crew.turn(engine) as worker:
            worker.generate(prompts if workload.at_once else prompts[:1], 4)


def _sample(
    crew: Crew, engine: Engine, workload: Workload, attempts: list[Prompts], repetition: int, guard: Guard
) -> list[Sample]:
    samples: list[Sample] = []
    for attempt, prompts in enumerate(attempts):
        guard.wait_until_quiet()
        with guard.watch() as watch, crew.turn(engine) as worker:
            outputs = run_workload(worker, workload, prompts)
        values = read_off(workload, prompts, outputs)
        sample = Sample(engine.name, workload.name, repetition, attempt, values, watch.disturbance)
        samples.append(sample)
        crew.say(describe(sample))
        if not sample.disturbance.is_noisy:
            break
    return samples


def describe(sample: Sample) -> str:
    metrics = [metric for metric in METRICS if metric.workload == sample.workload and metric.name in sample.values]
    figures = ", ".join(f"{_short_title(metric)} {sample.values[metric.name]:.{metric.digits}f}" for metric in metrics)
    noise = f"  NOISY ({sample.disturbance})" if sample.disturbance.is_noisy else ""
    return f"{sample.workload} repetition {sample.repetition + 1}  {sample.engine:<16} {figures}{noise}"


def _short_title(metric: Metric) -> str:
    """Without the workload's name, which the line has already said."""
    return metric.title.removeprefix(f"{metric.workload.upper()} ")
