"""Who plays a trace for `bench/promises.py`: a simulated H200, or the real engine on this machine's CPU. Both give, of
every request that was answered, who sent it and its timing."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Sequence as Series
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from twostroke.cli.simulate_device import on_device
from twostroke.config import EngineConfig
from twostroke.core.events import TokenEvent
from twostroke.core.request import Request
from twostroke.core.service_level import ServiceLevels
from twostroke.core.step import Step, StepResult
from twostroke.core.timing import SequenceTiming
from twostroke.cost.floor import work_of
from twostroke.engine.build import build
from twostroke.engine.engine import Engine
from twostroke.planner.simulate import Prompts, Replica, ReplicaSpec, collector_paused
from twostroke.planner.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Answered:
    request: Request
    timing: SequenceTiming
    before_s: float = 0.0
    """From when it was due until an engine in the middle of a step took it."""

    @property
    def ttft_s(self) -> float | None:
        """From when it was due."""
        return None if self.timing.ttft_s is None else self.before_s + self.timing.ttft_s


@dataclass(frozen=True, slots=True)
class Way:
    """A policy, and how many tokens a step may have; None: as suits the backend."""

    policy: str
    step_tokens: int | None = None

    def __str__(self) -> str:
        return self.policy if self.step_tokens is None else f"{self.policy}, {self.step_tokens} tokens a step"


@dataclass(frozen=True, slots=True)
class StepTaken:
    """A step of the real engine."""

    num_streams: int
    num_read: int
    """Tokens of prompts."""
    predicted_s: float
    """Before it was launched."""
    measured_s: float


class Simulated:
    name = "simulated: Llama-3.1-8B on an H200"

    def __init__(self, levels: ServiceLevels) -> None:
        spec = on_device("Llama-3.1-8B", "h200", 1, EngineConfig(max_context=16_384)).spec
        self._spec = replace(spec, levels=levels)

    def play(self, way: Way, trace: Series[TraceRequest], without: str | None = None) -> list[Answered]:
        """`without`: a tenant whose answers nobody asks for; the end of all others is the end."""
        spec: ReplicaSpec = replace(self._spec, policy=way.policy)
        if way.step_tokens is not None:
            spec = replace(spec, scheduler=replace(spec.scheduler, max_tokens_per_step=way.step_tokens))
        replica, prompts, ended = Replica(spec), Prompts(), []
        with collector_paused():
            for asked in trace:
                ended += replica.play_until(asked.arrival_s)
                replica.add(prompts.request(asked))
            ended += replica.play_until(inf)
        return [Answered(one.sequence.request, one.sequence.timing) for one in ended]


def levels_text(levels: ServiceLevels) -> str:
    """As the file has them."""
    lines = []
    for level in levels.levels:
        if not level.is_derived:
            promised = {"ttft_ms": level.ttft_s, "itl_ms": level.itl_s}
            lines.append(f"[levels.{level.name}]")
            lines += [f"{name} = {1e3 * value:.3f}" for name, value in promised.items() if value is not None]
    return "\n".join(lines)


class Real:
    """SmolLM2 on the CPU. Requests come at their moments of the clock, whatever the engine is at. One that is due while
    it computes is taken behind that step, and what it has waited by then counts."""

    name = "SmolLM2 on this machine's CPU"

    def __init__(self, levels: ServiceLevels, max_context: int = 4608, model: str = "smollm2") -> None:
        self._levels = levels
        self._max_context = max_context
        self._model = model
        self.steps: list[StepTaken] = []
        """Of the last play."""

    def play(self, way: Way, trace: Series[TraceRequest], without: str | None = None) -> list[Answered]:
        """`without`: see `Simulated.play`."""
        num_left = sum(asked.tenant != without for asked in trace)
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(levels_text(self._levels))
            file.flush()
            config = EngineConfig(
                backend="cpu",
                max_context=self._max_context,
                max_tokens_per_step=way.step_tokens,
                policy=way.policy,
                service_levels=str(Path(file.name)),
                speculate="off",
            )
            assembly = build(self._model, config, text=False)
        engine, num_tokens = assembly.engine, assembly.checkpoint.spec.vocab_size
        prompts, found, waiting = Prompts(), list[Answered](), list(trace)
        sent: dict[str, tuple[Request, float]] = {}
        try:
            self._warm(engine, prompts, num_tokens)
            self._watch(engine)
            gc.collect()
            gc.freeze()  # as a server does: what was built is not looked through in the middle of a step
            started_s = time.perf_counter()
            while num_left and (waiting or engine.busy):
                while waiting and (now_s := time.perf_counter() - started_s) >= waiting[0].arrival_s:
                    request = bounded(prompts.request(waiting.pop(0)), num_tokens)
                    sent[engine.add(request)] = request, now_s - request.arrival_s
                if not engine.busy:
                    time.sleep(max(0.0, waiting[0].arrival_s - (time.perf_counter() - started_s)))
                    continue
                ended = [
                    Answered(sent[event.request_id][0], event.timing, sent[event.request_id][1])
                    for event in engine.step()
                    if isinstance(event, TokenEvent) and event.timing is not None and event.request_id in sent
                ]
                found += ended
                num_left -= sum(one.request.tenant != without for one in ended)
        finally:
            gc.unfreeze()
            engine.close()
        return found

    def _watch(self, engine: Engine) -> None:
        self.steps = steps = []
        predicted_s: dict[int, float] = {}

        def launching(step: Step) -> None:
            cost = engine.step_cost
            predicted_s[step.step_id] = 0.0 if cost is None else cost.seconds(work_of(step))

        def came_back(step: Step, result: StepResult) -> None:
            num_read = sum(len(chunk.token_ids) for chunk in step.prefills)
            steps.append(StepTaken(len(step.decodes), num_read, predicted_s.pop(step.step_id), result.compute_s))

        engine.on_launch, engine.on_step = launching, came_back

    def _warm(self, engine: Engine, prompts: Prompts, num_tokens: int) -> None:
        """Steps of every kind, so that their cost is known."""
        for length in (self._max_context // 2, self._max_context // 8, 40):
            engine.add(bounded(prompts.request(TraceRequest(0.0, length, 40)), num_tokens))
        while engine.busy:
            engine.step()


def bounded(request: Request, num_tokens: int) -> Request:
    """With token ids that a model of so many tokens has."""
    most = num_tokens - 5
    return replace(request, prompt_token_ids=tuple(token % most + 5 for token in request.prompt_token_ids))
