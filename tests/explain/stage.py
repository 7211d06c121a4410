"""A real engine (scheduler, ledger, prefix index, reference backend on a tiny model) whose clock is virtual: a step
takes what a known cost says, so causes can be brought about exactly, and a predicted gain compared with what the same
requests take when the advice is followed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from twostroke.backends.interface import Backend, SpeculatingBackend, Ticket
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.events import TokenEvent
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import Step, StepResult
from twostroke.core.timing import SequenceTiming
from twostroke.cost.floor import work_of
from twostroke.cost.hardware import Ceilings
from twostroke.cost.step_cost import StepCost
from twostroke.engine.build import build
from twostroke.engine.engine import Engine
from twostroke.engine.explaining import engine_facts
from twostroke.explain.explanation import Explainer, Explanation
from twostroke.scheduling.policies import DEFAULT_POLICY
from twostroke.speculation.budget import DraftBudget
from twostroke.speculation.drafter import Drafter
from twostroke.speculation.speculator import Speculator

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
CEILINGS = Ceilings(2e7, 2e8, "made up: weights take milliseconds to read, and a prompt's token a tenth of one")
BLOCK_BYTES = 16 * 2 * 16 * 4
"""Tokens of K and V of one head of 16 floats, in the one layer."""


@dataclass(frozen=True)
class Ask:
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    call: str = ""
    service_level: str = ""
    tenant: str = ""


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """No two of different seeds share a block."""
    return tuple((seed * 37 + 11 * place + place * place // 7) % 250 + 3 for place in range(length))


def model_folder(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


class Paced:
    """The backend, whose steps take their cost on the virtual clock."""

    def __init__(self, backend: Backend, cost: StepCost) -> None:
        self.name, self.max_drafts = backend.name, backend.max_drafts
        self.now_s = 0.0
        self.others_share = 0.0
        """Of the cores, what other programs take: steps are the longer for it."""
        self._backend = backend
        self._cost = cost

    def launch(self, step: Step) -> Ticket:
        return _PacedTicket(self, step, self._backend.launch(step))

    def seconds(self, step: Step, result: StepResult) -> float:
        return self._cost.seconds(work_of(step, result.drafted)) / (1.0 - self.others_share)

    def close(self) -> None:
        self._backend.close()


class _PacedTicket:
    ready = True

    def __init__(self, paced: Paced, step: Step, ticket: Ticket) -> None:
        self._paced, self._step, self._ticket = paced, step, ticket

    def result(self) -> StepResult:
        result = self._ticket.result()
        seconds = self._paced.seconds(self._step, result)
        self._paced.now_s += seconds
        return replace(result, compute_s=seconds, others_share=self._paced.others_share, drafting_s=0.0)


class Stage:
    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int = 1024,
        max_running: int = 16,
        max_tokens_per_step: int = 256,
        drafter: Drafter | None = None,
        service_levels: Path | None = None,
        policy: str = DEFAULT_POLICY,
    ) -> None:
        """`drafter`: who drafts, within a budget of the known cost; None: nobody. `service_levels`: the file with the
        classes. `policy`: `fifo` where it matters who came first."""
        config = EngineConfig(
            backend="reference",
            load="random",
            max_context=2048 if num_blocks >= 128 else 16 * num_blocks,
            max_running=max_running,
            max_tokens_per_step=max_tokens_per_step,
            kv=KVConfig(memory_bytes=num_blocks * BLOCK_BYTES),
            speculate="off",
            service_levels=None if service_levels is None else str(service_levels),
            policy=policy,
        )
        assembly = build(str(folder), config, text=False)
        self.cost = StepCost(assembly.shape, CEILINGS)
        # The scheduler expects what steps take on the virtual clock, not what they would on the machine under us.
        assembly.engine.scheduler._forecast.step_seconds = self.cost.seconds
        self.paced = Paced(assembly.engine.backend, self.cost)
        vocab_size = assembly.checkpoint.spec.vocab_size
        self.engine = Engine(
            assembly.engine.scheduler, self.paced, vocab_size, run_ahead=False, clock=lambda: self.paced.now_s
        )
        self.facts = replace(engine_facts(assembly), ceilings=CEILINGS, drafts_nothing=None)
        if drafter is not None:
            backend = assembly.engine.backend
            assert isinstance(backend, SpeculatingBackend)
            backend.use_speculator(Speculator([drafter], vocab_size))
            self.engine.scheduler.draft(DraftBudget(self.cost.seconds, backend.max_drafts, [drafter.name]))
        self.host_s = 0.0
        """What the caller takes between two steps, while the backend has nothing to do."""
        self._explainer = Explainer(lambda: self.facts, lambda: self.cost)

    def play(self, asks: Mapping[str, Ask]) -> dict[str, SequenceTiming]:
        """Each is asked when it is due; the timing of each one's first sample, once all have ended."""
        waiting = sorted(asks.items(), key=lambda item: item[1].at_s)
        timings: dict[str, SequenceTiming] = {}
        while waiting or self.engine.busy:
            if waiting and not self.engine.busy:
                self.paced.now_s = max(self.paced.now_s, waiting[0][1].at_s)
            while waiting and waiting[0][1].at_s <= self.paced.now_s:
                name, ask = waiting.pop(0)
                sampling = SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True)
                more = {"call": ask.call, "service_level": ask.service_level, "tenant": ask.tenant}
                self.engine.add(Request(name, ask.prompt, sampling, ask.priority, **more))
            for event in self.engine.step():
                if isinstance(event, TokenEvent) and event.timing is not None and event.sample_index == 0:
                    timings[event.request_id] = event.timing
            self.paced.now_s += self.host_s
        self.engine.scheduler.check()
        return timings

    def explain(self, timing: SequenceTiming, *, fitted: bool = True) -> Explanation:
        explainer = self._explainer if fitted else Explainer(lambda: self.facts, lambda: None)
        return explainer.explain(timing)
