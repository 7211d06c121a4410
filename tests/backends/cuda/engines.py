"""Engines over tiny checkpoints, on the device and on the reference, driven step by step: the same requests, arriving
at the same steps, so that both must say the same. In float32 on a host, where greedy tokens are equal to the letter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from tests.backends.cuda.tables import fused_up_to
from tests.models.tiny_checkpoints import VOCAB_SIZE

from twostroke.backends.cuda.backend import DTYPES, CudaBackend
from twostroke.backends.cuda.tuned_table import Choices
from twostroke.backends.interface import Backend, BackendSettings, Listener, MaskingBackend
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.events import TokenEvent
from twostroke.core.formats import PACKED, Formats
from twostroke.core.grammar import Grammars
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import TokenLogprobs
from twostroke.engine.engine import Engine
from twostroke.models.checkpoint import Checkpoint
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.scheduler import Scheduler

MOST_STEPS = 2000


@dataclass(frozen=True)
class Sizes:
    """Of an engine: small, and every limit is met."""

    step_tokens: int = 24
    max_rows: int = 6
    max_context: int = 64
    block_size: int = 16
    num_blocks: int = 40  # of each KV group

    def layout(self, checkpoint: Checkpoint) -> KVLayout:
        found = checkpoint.spec.kv_groups()
        groups = tuple(
            KVGroup(group.layers, group.window, self.num_blocks, group.content, group.values) for group in found
        )
        return KVLayout(self.block_size, groups)

    @property
    def config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_context=self.max_context, max_tokens_per_step=self.step_tokens, max_running=self.max_rows
        )

    def engine(self, checkpoint: Checkpoint, backend: Backend, grammars: Grammars | None = None) -> Engine:
        if grammars is not None:
            assert isinstance(backend, MaskingBackend)
            backend.use_grammars(grammars)
        scheduler = Scheduler(self.config, self.layout(checkpoint))
        return Engine(scheduler, backend, checkpoint.spec.vocab_size, grammars=grammars)

    def on_device(
        self,
        checkpoint: Checkpoint,
        device: str,
        dtype: torch.dtype = torch.float32,
        few_rows: int | None = 0,
        *,
        pack_for_decode: bool = False,
        choices: Choices | None = None,
        weights: str | None = None,
        kv: str | None = None,
        listener: Listener | None = None,
    ) -> CudaBackend:
        """`few_rows`: up to how many tokens fused kernels take; None: as the tables say. `weights`: what matrices are
        brought to; `kv`: what K and V are kept in. `listener`: who is told of prompts."""
        name = next(name for name, own in DTYPES.items() if own == dtype)
        return CudaBackend(
            checkpoint,
            self.layout(checkpoint),
            device=torch.device(device),
            formats=Formats(weights or name, name, kv or name, copies=PACKED if pack_for_decode else None),
            max_context=self.max_context,
            max_tokens_per_step=self.step_tokens,
            max_running=self.max_rows,
            choices=fused_up_to(few_rows, device, dtype) if choices is None else choices,
            listener=listener,
        )

    def on_reference(self, checkpoint: Checkpoint, listener: Listener | None = None) -> Backend:
        settings = BackendSettings(
            max_context=self.max_context, max_tokens_per_step=self.step_tokens, listener=listener
        )
        return REFERENCE.create(checkpoint, self.layout(checkpoint), settings)


@dataclass
class Answers:
    """What the requests got, each by its id; of several answers to one, each by `name_of`."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    ends: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """Finish reason and error."""

    def take(self, event: TokenEvent) -> None:
        name = name_of(event.request_id, event.sample_index)
        assert name not in self.ends, "an event after the last"
        self.tokens.setdefault(name, []).extend(event.token_ids)
        self.logprobs.setdefault(name, []).extend(event.logprobs)
        self.prompt_logprobs.setdefault(name, []).extend(event.prompt_logprobs)
        if event.finish_reason is not None:
            self.ends[name] = (event.finish_reason.value, event.error)


def name_of(request_id: str, sample_index: int) -> str:
    return f"{request_id} #{sample_index}" if sample_index else request_id


def play(engine: Engine, requests: Sequence[Request], aborts: Mapping[int, str] | None = None) -> Answers:
    """Two requests are there from the start, one more joins at each step; `aborts`: step -> whom. The books are proven
    after every step, and nothing is left in the end."""
    answers, waiting = Answers(), list(requests)
    aborts = dict(aborts or {})
    for step in range(MOST_STEPS):
        for _ in range(2 if step == 0 else 1):
            if waiting:
                engine.add(waiting.pop(0))
        if step in aborts:
            engine.abort(aborts.pop(step))
        for event in engine.step():
            if isinstance(event, TokenEvent):
                answers.take(event)
        engine.scheduler.check()
        if not (engine.busy or waiting or aborts):
            break
    samples = [(asked.request_id, index) for asked in requests for index in range(asked.sampling.n)]
    assert set(answers.ends) == {name_of(*sample) for sample in samples}
    counts = engine.scheduler.counts()
    assert (counts.waiting, counts.running_prefill, counts.running_decode, counts.steps_in_flight) == (0, 0, 0, 0)
    assert all(group.used == 0 for group in counts.blocks)
    return answers


def play_both(
    checkpoint: Checkpoint,
    requests: Sequence[Request],
    device: str,
    sizes: Sizes,
    few_rows: int | None = 0,
    grammars: Grammars | None = None,
) -> tuple[Answers, Answers]:
    """On the device and on the reference."""
    both = []
    for backend in (sizes.on_device(checkpoint, device, few_rows=few_rows), sizes.on_reference(checkpoint)):
        engine = sizes.engine(checkpoint, backend, grammars)
        both.append(play(engine, requests))
        engine.close()
    return both[0], both[1]


def request(name: str, prompt: Sequence[int], **sampling: object) -> Request:
    return Request(name, tuple(prompt), SamplingParams(**{"temperature": 0.0, **sampling}))  # type: ignore[arg-type]


def mixed_requests(prompt_lengths: Sequence[int], output_lengths: Sequence[int], **sampling: object) -> list[Request]:
    """Prompts at random, and one more whose beginning is the second's, which is in the prefix cache by then."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(6, VOCAB_SIZE, length).tolist() for length in prompt_lengths]
    prompts.append([*prompts[1][: len(prompts[1]) // 16 * 16], 9, 8, 7])
    return [
        request(f"r{index}", prompt, max_tokens=length, seed=index, **sampling)
        for index, (prompt, length) in enumerate(zip(prompts, output_lengths, strict=True))
    ]


def with_sampling(requests: Sequence[Request], *changes: Mapping[str, object]) -> list[Request]:
    """The requests with other sampling, one mapping for each."""
    return [
        replace(asked, sampling=replace(asked.sampling, **change))  # type: ignore[arg-type]
        for asked, change in zip(requests, changes, strict=True)
    ]


def first_tokens_apart(found: Answers, expected: Answers) -> float:
    """How far log-probabilities of the likeliest first tokens are apart at most, over all answers."""
    apart = []
    for name, own in found.logprobs.items():
        theirs = dict(expected.logprobs[name][0].top)
        both = [(token, logprob) for token, logprob in own[0].top if token in theirs]
        assert 2 * len(both) > len(theirs), f"{name} has other likeliest tokens"
        apart += [abs(logprob - theirs[token]) for token, logprob in both]
    return max(apart)
