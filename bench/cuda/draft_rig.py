"""Engines over a card's backend that have their drafts told, and rows that decode without having read anything. Knows
neither what is measured with them nor where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from twostroke.backends.cuda.backend import CudaBackend
from twostroke.core.events import TokenEvent
from twostroke.core.formats import Formats
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import Sequence as Stream
from twostroke.core.step import BlockGrant, Drafts, RowJoin, Step, StepResult
from twostroke.engine.engine import Engine
from twostroke.models.checkpoint import Checkpoint
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.plan import Drafting
from twostroke.scheduling.scheduler import Scheduler

Answers = dict[str, list[int]]
"""Of requests, by their ids."""
ROOM = 700
"""Positions behind a context: every step that is timed writes one token a row."""


class Told(Drafting):
    """Guesses from known answers; of a request without one, always the same token. `wrong`: the share of guesses that
    are another token."""

    def __init__(self, answers: Mapping[str, Sequence[int]], most: int, wrong: float = 0.0) -> None:
        self._answers, self._most, self._wrong = answers, most, wrong
        self._draw = np.random.default_rng(1)

    def drafts(self, sequence: Stream, most: int) -> Drafts | None:
        known = len(sequence.tokens) - sequence.prompt_len
        answer = np.array(self._answers.get(sequence.request.request_id, [1] * 4096)[known : known + 15], dtype=int)
        if self._wrong:
            answer = np.where(self._draw.random(len(answer)) < self._wrong, (answer + 1) % 2000, answer)
        count = min(most, self._most, len(answer))
        return Drafts(count, tuple(answer.tolist()), len(sequence.tokens)) if count else None


@dataclass(frozen=True, slots=True)
class Rig:
    backend: CudaBackend
    layout: KVLayout
    sizes: SchedulerConfig
    vocab_size: int

    def play(self, requests: Sequence[Request], drafting: Drafting | None = None) -> tuple[Answers, float]:
        """All at once: what each was answered, and how many tokens a stream got in a step that gave it some."""
        scheduler = Scheduler(self.sizes, self.layout, drafting=drafting, max_drafts=self.backend.max_drafts)
        engine = Engine(scheduler, self.backend, self.vocab_size)
        counts: list[int] = []

        def count(_: Step, result: StepResult) -> None:
            counts.extend(map(len, result.sampled.values()))

        engine.on_step = count
        for request in requests:
            engine.add(request)
        answers: Answers = {}
        while engine.busy:
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    assert event.error is None, event.error
                    answers.setdefault(event.request_id, []).extend(event.token_ids)
        self.close_rows(tuple(self.backend._parts.rows.index_of))  # the last ones close with a step that never comes
        return answers, float(np.mean(counts))

    def open_rows(self, count: int, context: int) -> list[int]:
        """Sequences that are to decode behind contexts of one length."""
        blocks, sampling = -(-(context + ROOM) // self.layout.block_size), SamplingParams(temperature=0.0)
        joins = tuple(RowJoin(index, Request(f"row {index}", (5,) * context, sampling)) for index in range(count))
        grants = tuple(
            BlockGrant(index, group, 0, tuple(range(index * blocks, (index + 1) * blocks)))
            for index in range(count)
            for group in range(len(self.layout.groups))
        )
        self.backend.launch(Step(0, joins=joins, grants=grants)).result()
        return [self.backend._parts.rows.index_of[join.seq_id] for join in joins]

    def close_rows(self, sequences: tuple[int, ...]) -> None:
        self.backend.launch(Step(0, leaves=sequences)).result()


def rig_of(
    checkpoint: Checkpoint,
    sizes: SchedulerConfig,
    formats: Formats,
    *,
    block_size: int,
    num_blocks: int,
    forced: Sequence[int] | None = None,
) -> Rig:
    """`forced`: see `VerifyPath`."""
    groups = tuple(KVGroup(group.layers, group.window, num_blocks) for group in checkpoint.spec.kv_groups())
    layout = KVLayout(block_size, groups)
    backend = CudaBackend(
        checkpoint,
        layout,
        device=torch.device("cuda"),
        formats=formats,
        max_context=sizes.max_context,
        max_tokens_per_step=sizes.max_tokens_per_step,
        max_running=sizes.max_running,
        forced=forced,
    )
    return Rig(backend, layout, sizes, checkpoint.spec.vocab_size)


def requests_of(
    draw: np.random.Generator, count: int, vocab_size: int, *, length: int = 40, max_tokens: int = 128, **sampling: Any
) -> list[Request]:
    """With prompts at random, each a little longer than the one before."""
    found = []
    for index in range(count):
        prompt = tuple(draw.integers(5, vocab_size, length + 3 * index).tolist())
        own = {"temperature": 0.0, "max_tokens": max_tokens, "seed": index, "ignore_eos": True, **sampling}
        found.append(Request(f"r{index}", prompt, SamplingParams(**own)))
    return found
