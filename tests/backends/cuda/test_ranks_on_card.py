"""What only a card can show of ranks on cards: two of them as processes on one card, which meet by gloo; and the sums
of one rank by NCCL, in captured graphs. NCCL between cards needs several."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.backends.cuda.engines import Answers, Sizes, mixed_requests, play
from tests.backends.cuda.float_ranks import FloatRanks
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.ranks import CardRanks
from twostroke.backends.interface import BackendSettings, CardPlace
from twostroke.backends.sharded.card_backend import CardBackend
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BackendError
from twostroke.core.events import TokenEvent
from twostroke.core.formats import Formats
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.build import build
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.shard import Shard, shard_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = Sizes(step_tokens=128, max_rows=4, max_context=128, block_size=16, num_blocks=40)
REQUESTS = mixed_requests((3, 70, 1), (9, 6, 8, 5))
CONFIG = EngineConfig(
    backend="cuda",
    max_context=128,
    max_running=4,
    max_tokens_per_step=128,
    speculate="off",
    kv=KVConfig(memory_bytes=10**7),
)
WIDE = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256}
NEARLY = 0.1
"""How far log-probabilities of a prompt may be apart in bf16, where sums are rounded otherwise: 0.052 was seen."""


def on_card(checkpoint: Checkpoint, ranks: CardRanks | None) -> CudaBackend:
    return CudaBackend(
        checkpoint,
        SIZES.layout(checkpoint),
        device=torch.device("cuda"),
        formats=Formats("f32", "f32", "f32"),
        max_context=SIZES.max_context,
        max_tokens_per_step=SIZES.step_tokens,
        max_running=SIZES.max_rows,
        max_drafts=0,
        ranks=ranks,
    )


def answers(checkpoint: Checkpoint, backend: CudaBackend | CardBackend) -> Answers:
    return play(SIZES.engine(checkpoint, backend), REQUESTS)


@pytest.fixture
def store() -> Iterator[str]:
    descriptor = os.memfd_create("ranks")
    yield f"/proc/self/fd/{descriptor}"
    os.close(descriptor)


@pytest.mark.parametrize("variant", ["gpt_oss", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_two_processes_on_one_card_answer_as_one_does(variant: str, tmp_path: Path) -> None:
    """In float32: experts with windows; and states, experts and full attention."""
    checkpoint = load_checkpoint(make_tiny(variant, tmp_path)[0])
    alone = on_card(checkpoint, None)
    expected = answers(checkpoint, alone)
    alone.close()
    settings = BackendSettings(
        max_context=SIZES.max_context, max_tokens_per_step=SIZES.step_tokens, max_running=SIZES.max_rows
    )
    backend = FloatRanks(2).create(checkpoint, SIZES.layout(checkpoint), settings)
    try:
        assert answers(checkpoint, backend) == expected
    finally:
        backend.close()


def test_the_sums_of_one_rank_by_nccl_are_part_of_graphs(tmp_path: Path, store: str) -> None:
    checkpoint = load_checkpoint(make_tiny("gpt_oss", tmp_path)[0])
    alone = on_card(checkpoint, None)
    expected = answers(checkpoint, alone)
    alone.close()
    part = shard_checkpoint(checkpoint, Shard(0, 1), 16)
    ranks = CardRanks(CardPlace(0, (part.spec.num_logits,), "nccl", store), torch.device("cuda"))
    backend = on_card(part, ranks)
    try:
        assert ranks.is_captured and len(backend._parts.graphs) > 5 and backend._parts.graphs.num_made_again == 0
        assert answers(checkpoint, backend) == expected
    finally:
        backend.close()


def test_an_engine_of_two_ranks_on_one_card_and_its_end(tmp_path: Path) -> None:
    """As a user has it, in bf16: what it says of itself, nearly one rank's log-probabilities, and a rank that is
    killed."""
    folder = str(make_tiny("llama", tmp_path, **WIDE)[0])
    with pytest.raises(
        BackendError, match="2 ranks need a card each to meet by NCCL, and there is 1; --rank-transport"
    ):
        build(folder, replace(CONFIG, tensor_parallel=2), text=False)
    found = []
    for config in (CONFIG, replace(CONFIG, tensor_parallel=2, rank_transport="gloo")):
        assembly = build(folder, config, text=False)
        engine = assembly.engine
        sampling = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=1, ignore_eos=True)
        engine.add(Request("read", tuple(range(20, 90)), sampling))
        logprobs: list[float] = []
        while engine.busy:
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    assert event.error is None, event.error
                    logprobs += [one.logprob for one in event.prompt_logprobs]
        found.append(logprobs)
        if config.tensor_parallel == 1:
            engine.close()
    assert len(found[0]) == len(found[1]) == 69
    assert max(abs(one - other) for one, other in zip(*found, strict=True)) < NEARLY
    assert any("on 1 card, and they meet by gloo, through the host: for correctness" in one for one in assembly.notes)
    assert isinstance(engine.backend, CardBackend)
    (process,) = engine.backend._others._processes  # type: ignore[attr-defined]
    engine.add(Request("cut off", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)))
    engine.step()
    os.kill(process.pid, signal.SIGKILL)
    errors = []
    while engine.busy:
        errors += [event.error for event in engine.step() if isinstance(event, TokenEvent) and event.error]
    assert len(errors) == 1 and f"(process {process.pid}) was killed (SIGKILL): the ranks of one model" in errors[0]
    engine.close()
