"""Process start to first token, with warm caches: a fresh process of each engine in turn loads the model, reads W1's
prompt and gives one token. The clock runs from before the process exists until the token is in the harness's hands."""

from __future__ import annotations

import time

from bench.peers.crew import Crew
from bench.peers.engines import Engine
from bench.peers.guard import Guard
from bench.peers.speed import Plan, describe, rotated
from bench.peers.summary import Sample
from bench.peers.workloads import PromptSource, Workload

WORKLOAD = "start"


def measure_startup(
    crew: Crew,
    engines: list[Engine],
    workload: Workload,
    plan: Plan,
    source: PromptSource,
    guard: Guard,
    samples: list[Sample],
) -> None:
    """Add the samples to `samples`. `workload` gives the prompt's length. The first round of all fills the caches and
    is not counted."""
    (prompt,) = source.prompts(workload)
    for repetition in range(-1, plan.repetitions):
        for engine in rotated(crew.present(engines), max(repetition, 0)):
            with crew.failing_leaves(engine):
                for attempt in range(1 + plan.retries if repetition >= 0 else 1):
                    sample = _start(crew, engine, prompt, guard, repetition, attempt)
                    if repetition < 0:
                        break
                    samples.append(sample)
                    crew.say(describe(sample))
                    if not sample.disturbance.is_noisy:
                        break


def _start(crew: Crew, engine: Engine, prompt: list[int], guard: Guard, repetition: int, attempt: int) -> Sample:
    guard.wait_until_quiet()
    with guard.watch() as watch:
        started_s = time.perf_counter()
        with crew.start(engine) as worker:
            crew.load(engine, worker)
            loaded_s = time.perf_counter()
            worker.generate([prompt], 1)
            first_token_s = time.perf_counter()
    values = {"first_token_s": first_token_s - started_s, "loaded_s": loaded_s - started_s}
    return Sample(engine.name, WORKLOAD, repetition, attempt, values, watch.disturbance)
