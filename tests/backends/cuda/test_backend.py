"""The whole backend against the reference, through the scheduler: every family, chunked prompts, prefix hits, streams
that come and go. In float32 on a host, so that greedy tokens are the same to the letter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.backends.driver import layout_for
from tests.models.tiny_checkpoints import ORIGINAL_CONTEXT, VOCAB_SIZE, make_tiny, variants

from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.interface import Backend
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.engine import Engine
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16
STEP_TOKENS = 24
MAX_ROWS = 6


def cuda_backend(
    checkpoint: Checkpoint, device: str, dtype: torch.dtype = torch.float32, few_rows: int = 0
) -> CudaBackend:
    return CudaBackend(
        checkpoint,
        layout_for(checkpoint.spec, ORIGINAL_CONTEXT, BLOCK_SIZE, MAX_ROWS),
        device=torch.device(device),
        dtype=dtype,
        max_context=ORIGINAL_CONTEXT,
        max_tokens_per_step=STEP_TOKENS,
        max_running=MAX_ROWS,
        few_rows=few_rows,
    )


def reference_backend(checkpoint: Checkpoint) -> Backend:
    layout = layout_for(checkpoint.spec, ORIGINAL_CONTEXT, BLOCK_SIZE, MAX_ROWS)
    return REFERENCE.create(
        checkpoint, layout, max_context=ORIGINAL_CONTEXT, max_tokens_per_step=STEP_TOKENS, threads=1
    )


def outputs(checkpoint: Checkpoint, backend: Backend, requests: list[Request]) -> dict[str, list[int]]:
    """Every request's tokens; two are there from the start, the others join as steps pass."""
    layout = layout_for(checkpoint.spec, ORIGINAL_CONTEXT, BLOCK_SIZE, MAX_ROWS)
    config = SchedulerConfig(max_context=ORIGINAL_CONTEXT, max_tokens_per_step=STEP_TOKENS, max_running=MAX_ROWS)
    engine = Engine(Scheduler(config, layout), backend, checkpoint.spec.vocab_size)
    waiting = list(requests)
    for request in (waiting.pop(0), waiting.pop(0)):
        engine.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while engine.busy or waiting:
        for event in engine.step():
            if hasattr(event, "token_ids"):
                assert event.error is None
                tokens[event.request_id].extend(event.token_ids)
        if waiting:
            engine.add(waiting.pop(0))
    engine.scheduler.check()
    engine.close()
    return tokens


def mixed_requests(**sampling: object) -> list[Request]:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(6, VOCAB_SIZE, count).tolist() for count in (5, 40, 1, 17)]
    prompts.append([*prompts[1][:32], 9, 8, 7])  # behind a prefix that is in the cache by then
    lengths = (9, 4, 7, 3, 6)
    return [
        Request(f"r{index}", tuple(prompt), SamplingParams(max_tokens=length, seed=index, **sampling))  # type: ignore[arg-type]
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


@pytest.mark.parametrize("variant", variants())
def test_greedy_tokens_are_the_references(variant: str, tmp_path: Path, device: str) -> None:
    folder, _ = make_tiny(variant, tmp_path)
    checkpoint = load_checkpoint(folder)
    requests = mixed_requests(temperature=0.0)
    expected = outputs(checkpoint, reference_backend(checkpoint), requests)
    assert outputs(checkpoint, cuda_backend(checkpoint, device), requests) == expected
