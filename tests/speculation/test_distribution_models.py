"""Tokens that are drawn while a model or a head drafts have the target's own distribution: a chi-square test as that of
drafters which look tokens up, on a small model whose next token depends on the last alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from tests.speculation.test_distribution import LIMIT, surprise
from tests.speculation.tiny import Room, Sizes, make_backend
from tests.speculation.tiny_heads import make_head
from twostroke.core.events import TokenEvent
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.engine import Engine
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads import Head
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind, from_float32
from twostroke.scheduling.scheduler import Scheduler
from twostroke.speculation.speculator import Speculator

VOCAB_SIZE = 6
PROMPT = (0, 1, 2, 0, 1, 2, 0, 1)
NUM_TOKENS, NUM_STREAMS, MOST_DRAFTS = 12, 300, 4
SAMPLING = SamplingParams(temperature=0.9, max_tokens=NUM_TOKENS, ignore_eos=True)
SIZES = Sizes(max_context=48, step_tokens=256, max_running=16, num_blocks=60, prefix_caching=False)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
DRAFTERS: dict[str, Callable[[Checkpoint], Checkpoint | Head]] = {
    "draft": lambda target: target,
    "eagle3": lambda target: make_head("eagle3", target.spec, draft_vocab_size=4),
    "medusa": lambda target: make_head("medusa", target.spec),
    "mtp": lambda target: make_head("mtp", target.spec),
}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("chain")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return as_chain(random_checkpoint(folder, WeightKind.F32, seed=2))


def as_chain(drawn: Checkpoint) -> Checkpoint:
    """The model with layers that add nothing: what it says depends on the last token."""
    tensors = dict(drawn.tensors)
    for name, tensor in drawn.tensors.items():
        if name.endswith((".o", ".down")):
            tensors[name] = from_float32(name, np.zeros(tensor.shape, np.float32))
    return Checkpoint(drawn.name, drawn.path, drawn.spec, tensors)


def probabilities_of(chain: Checkpoint) -> npt.NDArray[np.float64]:
    weights = np.exp(logits_of(chain) / SAMPLING.temperature)
    found: npt.NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return found


def logits_of(chain: Checkpoint) -> npt.NDArray[np.float64]:
    """Of what follows each token."""
    table, norm, output = (
        chain.tensors[name].to_float32().astype(np.float64) for name in ("embedding", "final_norm", "output")
    )
    normed = table / np.sqrt((table**2).mean(axis=1, keepdims=True) + chain.spec.norm_eps) * norm
    found: npt.NDArray[np.float64] = normed @ output.T
    return found


def answers(chain: Checkpoint, drafter: Checkpoint | Head | None) -> tuple[list[list[int]], int]:
    """The tokens of many streams, and how many drafts held."""
    backend = make_backend("reference", chain, SIZES, draft_model=drafter)
    room = None
    if drafter is not None:
        backend.use_speculator(Speculator(backend.companion_drafters, VOCAB_SIZE))
        room = Room(most=MOST_DRAFTS)
    scheduler = Scheduler(SIZES.scheduler_config(), backend.layout, drafting=room, max_drafts=backend.max_drafts)
    engine = Engine(scheduler, backend, VOCAB_SIZE)
    found: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
    num_held = 0
    for seed in range(NUM_STREAMS):
        engine.add(Request(str(seed), PROMPT, replace(SAMPLING, seed=seed)))
    while engine.busy:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                found[int(event.request_id)] += event.token_ids
                num_held += event.timing.drafts_held if event.timing is not None else 0
    if backend.speculator is not None:
        assert backend.speculator.faults == []
    engine.close()
    return found, num_held


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_distribution_is_the_targets(chain: Checkpoint, name: str) -> None:
    found, num_held = answers(chain, DRAFTERS[name](chain))
    assert num_held > NUM_STREAMS, "drafts held, and drafts did not"
    assert surprise(found, probabilities_of(chain)) < LIMIT
    assert found == answers(chain, None)[0]
