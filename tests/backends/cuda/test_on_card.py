"""What only a card can show: captured graphs replay what eager launches compute, and minutes of random load leave
neither a block nor a byte behind. Tiny models, real kernels, bf16."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.cuda.engines import Answers, Sizes, mixed_requests, play, request
from tests.backends.cuda.letters import CODE, JSON, follows_schema, grammars, held, written
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny

from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.graphs import GraphCache
from twostroke.core.events import TokenEvent
from twostroke.core.request import Request
from twostroke.engine.engine import Engine
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOAD_S = float(os.environ.get("RANDOM_LOAD_S", "60"))
STEPS_OF_A_ROUND = 400
SIZES = Sizes(step_tokens=512, max_rows=16, max_context=256, block_size=64, num_blocks=80)
SCARCE = Sizes(step_tokens=256, max_rows=24, max_context=256, block_size=16, num_blocks=48)


@pytest.fixture
def backends() -> Iterator[list[CudaBackend]]:
    made: list[CudaBackend] = []
    yield made
    for backend in made:
        backend.close()


def many_streams() -> list[Request]:
    """Two dozen that join one a step and leave one by one: side by side, beside chunks of prompts; greedy, drawn,
    filtered and penalised."""
    rng = random.Random(5)
    prompts = [rng.choice((1, 3, 20, 70, 150)) for _ in range(24)]
    lengths = [rng.randint(2, 40) for _ in range(25)]
    requests = mixed_requests(prompts, lengths, ignore_eos=True)
    samplings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "logprobs": 2},
        {"temperature": 0.8, "top_p": 0.9},
        {"repetition_penalty": 1.2},
    ]
    return [
        request(
            asked.request_id,
            asked.prompt_token_ids,
            max_tokens=asked.sampling.max_tokens,
            seed=index,
            ignore_eos=True,
            **samplings[index % 7 if index % 7 < len(samplings) else 0],
        )
        for index, asked in enumerate(requests)
    ]


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("llama", {"head_dim": 64}),  # the Hopper kernel takes it
        ("gemma2", {"head_dim": 256}),  # with windows and soft caps, too
        ("qwen3_moe", {"head_dim": 64}),
        ("gemma4", {"head_dim": 256, "global_head_dim": 512}),  # two kernels of attention in one graph
        ("nemotron_h", {}),  # layers of one block
    ],
)
def test_replayed_graphs_say_what_eager_launches_say(
    variant: str,
    changes: dict[str, Any],
    tmp_path: Path,
    backends: list[CudaBackend],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = load_checkpoint(make_tiny(variant, tmp_path, **changes)[0])
    requests = many_streams()

    def answers() -> Answers:
        backend = SIZES.on_device(checkpoint, "cuda", torch.bfloat16, few_rows=None)
        backends.append(backend)
        return play(SIZES.engine(checkpoint, backend), requests)

    replayed = answers()
    num_graphs, num_made_again = len(backends[-1]._parts.graphs), backends[-1]._parts.graphs.num_made_again
    monkeypatch.setattr(GraphCache, "prepare", lambda self, key, work, sample: None)
    monkeypatch.setattr(GraphCache, "run", lambda self, key, work: work())
    eager = answers()
    assert num_graphs > 20 and num_made_again == 0 and len(backends[-1]._parts.graphs) == 0
    assert sum(map(len, replayed.tokens.values())) > 40 * 4
    assert replayed == eager


def test_four_answers_of_eight_follow_a_schema(
    tmp_path: Path, backends: list[CudaBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed or launched kernel by kernel, the same; and the others write what they write among themselves. That is
    in float32: in bf16 last digits, and so the words of a random model, depend on how many run side by side."""
    checkpoint = load_checkpoint(make_tiny("llama", tmp_path, head_dim=64)[0])
    samplings: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 1.5, "top_p": 0.9}, {"min_tokens": 30}]
    free = [request(f"free {n}", [9, 8, 7 + n], max_tokens=40, seed=n, temperature=0.5 * n) for n in range(4)]
    constrained = [
        held(f"held {number}", JSON, range(20, 30 + 10 * number), max_tokens=200, seed=number, **sampling)
        for number, sampling in enumerate(samplings)
    ]
    both = [asked for pair in zip(constrained, free, strict=True) for asked in pair]

    def answers(requests: list[Request], dtype: torch.dtype) -> Answers:
        backend = SIZES.on_device(checkpoint, "cuda", dtype, few_rows=None)
        backends.append(backend)
        return play(SIZES.engine(checkpoint, backend, grammars()), requests)

    exact, alone = answers(both, torch.float32), answers(free, torch.float32)
    replayed = answers(both, torch.bfloat16)
    for found in (exact, replayed):
        for asked in constrained:
            assert found.ends[asked.request_id] == ("stop", None)
            assert follows_schema(written(found.tokens[asked.request_id]))
        assert all(len(found.tokens[asked.request_id]) == 40 for asked in free)
    assert {name: exact.tokens[name] for name in alone.tokens} == alone.tokens
    monkeypatch.setattr(GraphCache, "prepare", lambda self, key, work, sample: None)
    monkeypatch.setattr(GraphCache, "run", lambda self, key, work: work())
    assert answers(both, torch.bfloat16) == replayed


def random_request(rng: random.Random, name: str) -> Request:
    sampling: dict[str, Any] = {"max_tokens": rng.randint(1, 60), "seed": rng.randrange(2**32)}
    if rng.random() < 0.5:
        sampling["temperature"] = rng.choice((0.3, 0.8, 1.5))
    if rng.random() < 0.3:
        sampling |= {"top_k": rng.choice((1, 10, 100)), "top_p": rng.choice((0.5, 0.95)), "min_p": 0.01}
    if rng.random() < 0.3:
        sampling |= {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    if rng.random() < 0.2:
        sampling |= {"min_tokens": 1, "stop_token_ids": (3, 4, 5), "logit_bias": {7: 2.0}}
    if rng.random() < 0.15:
        sampling["logprobs"] = rng.choice((0, 3))
    if rng.random() < 0.1:
        sampling["prompt_logprobs"] = rng.choice((0, 2))
    if rng.random() < 0.1:
        sampling["n"] = rng.randint(2, 3)
    shared = random.Random(1).choices(range(6, VOCAB_SIZE), k=64)  # a beginning that many prompts have in common
    own = rng.choices(range(6, VOCAB_SIZE), k=rng.choice((1, 5, 40, 120)))
    prompt = [*(shared if rng.random() < 0.4 else []), *own]
    if rng.random() < 0.15:
        return held(name, rng.choice((CODE, JSON)), prompt, **sampling)
    return request(name, prompt, **sampling)


def play_round(engine: Engine, seed: int, num_steps: int = STEPS_OF_A_ROUND) -> None:
    """Arrivals in bursts, aborts at any moment; then what is left is played to its end, and nothing is left."""
    rng, live, num_added = random.Random(seed), set(), 0
    ends: dict[str, int] = {}
    step = 0
    while step < num_steps or engine.busy:
        if step < num_steps and rng.random() < 0.25:
            for _ in range(rng.choice((1, 1, 2, 12))):
                asked = random_request(rng, f"{seed}.{num_added}")
                num_added += 1
                engine.add(asked)
                live.add(asked.request_id)
                ends[asked.request_id] = asked.sampling.n
        if live and rng.random() < 0.08:
            engine.abort(rng.choice(sorted(live)))
        for event in engine.step():
            if isinstance(event, TokenEvent) and event.finish_reason is not None:
                assert event.error is None, event.error
                ends[event.request_id] -= 1
                if ends[event.request_id] == 0:
                    live.discard(event.request_id)
        if step % 20 == 0:
            engine.scheduler.check()
        step += 1
        assert step < num_steps + 20_000, "the load does not drain"
    assert not live and not any(ends.values())
    engine.clear_prefixes()
    play(engine, [request(f"{seed}.last", [9, 8, 7], max_tokens=2)])  # it takes with it the rows that were left
    engine.clear_prefixes()
    counts = engine.scheduler.counts()
    for group, pool in zip(counts.blocks, engine.scheduler.ledger.pools, strict=True):
        assert (group.used, group.cached, group.free) == (0, 0, pool.num_blocks)


def bytes_held() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.fixture(params=["gemma3", "qwen3_moe"])
def random_model(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    return random_checkpoint(make_tiny(request.param, tmp_path)[0], WeightKind.BF16)


@pytest.mark.timeout(600)
def test_random_load_leaves_no_block_and_no_byte(random_model: Checkpoint, backends: list[CudaBackend]) -> None:
    backend = SCARCE.on_device(random_model, "cuda", torch.bfloat16, few_rows=None)
    backends.append(backend)
    engine = SCARCE.engine(random_model, backend, grammars())
    started_s, seed = time.monotonic(), 0
    while time.monotonic() - started_s < LOAD_S / 2 or seed < 2:  # half of it for each model
        play_round(engine, seed)
        assert len(backend._parts.rows) == 1
        seed += 1
    assert engine.scheduler.counts().preemptions > 0
    before = bytes_held()
    play_round(engine, 0)
    assert bytes_held() == before
