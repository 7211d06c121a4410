"""A smaller model and Medusa's heads that draft on the device: answers are those without them, and what they draft, in
every way that a stream can take, is what transformers says of the whole text from the beginning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.backends.cuda.drafting_engines import F32, PROMPTS, SIZES, WAYS, drafts_made
from tests.backends.cuda.engines import Sizes, request
from tests.models.tiny_checkpoints import make_tiny
from tests.speculation.tiny_heads import make_head
from torch.nn.functional import silu

from twostroke.backends.cuda import FACTORY
from twostroke.backends.interface import BackendSettings, Companion, HeadNeeds
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.errors import BackendError
from twostroke.core.formats import Formats
from twostroke.engine.companions import plan_head
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads.medusa import MedusaHeads
from twostroke.models.loading import load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@dataclass
class Made:
    checkpoint: Checkpoint
    companion: Companion
    chain: Callable[[Sequence[int], int], list[int]]
    """What is drafted behind these tokens."""


def draft_model(target: Checkpoint, folder: Path, variant: str = "qwen3", **sizes: int) -> Made:
    """Of another shape than its target."""
    path, model = make_tiny(variant, folder, **sizes)
    own = load_checkpoint(path)

    def chain(known: Sequence[int], count: int) -> list[int]:
        tokens = [min(token, own.spec.vocab_size - 1) for token in known]
        with torch.no_grad():
            for _ in range(count):
                tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        return tokens[len(known) :]

    return Made(target, Companion("draft", own, F32, 1), chain)


def medusa(target: Checkpoint, model: Any, *, token_map: bool = False) -> Made:
    heads = make_head("medusa", target.spec)
    assert isinstance(heads, MedusaHeads)
    if token_map:
        chosen = np.arange(0, target.spec.vocab_size, 2)
        spec = replace(heads.spec, draft_vocab_size=len(chosen))
        tensors = {
            name: tensor.rows(0, len(chosen)) if name.endswith("output") else tensor
            for name, tensor in heads.tensors.items()
        }
        heads = replace(heads, spec=spec, tensors=tensors, target_ids=chosen)
    weights = {name: torch.from_numpy(tensor.to_float32()) for name, tensor in heads.tensors.items()}

    def chain(known: Sequence[int], count: int) -> list[int]:
        with torch.no_grad():
            read = model(input_ids=torch.tensor([known[:-1]]), use_cache=False, output_hidden_states=True)
            state, found = read.hidden_states[-1][0, -1] * target.spec.final_norm_scale, []
            for number in range(min(count, heads.spec.num_heads)):
                through = state + silu(weights[f"{number}.blocks.0"] @ state)
                found.append(int(heads.target_ids[int((weights[f"{number}.output"] @ through).argmax())]))
        return found

    return Made(target, plan_head(heads, 1, REFERENCE).companion, chain)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Any]:
    path, model = make_tiny("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=2)
    return load_checkpoint(path), model


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Any]:
    path, model = make_tiny("llama", tmp_path_factory.mktemp("one_layer"), num_hidden_layers=1)
    return load_checkpoint(path), model


TIGHT = Sizes(step_tokens=16, max_rows=2, max_context=48, num_blocks=4)
"""Prompts come in chunks, and two streams do not fit side by side."""


def check(made: Made, sizes: Sizes, device: str, prompts: Sequence[Sequence[int]] = PROMPTS, count: int = 12) -> None:
    """Drafts hold or not, prompts come in chunks, prefixes are found again, streams give way."""
    requests = [request(f"r{index}", prompt, max_tokens=count) for index, prompt in enumerate(prompts)]
    drafts = drafts_made(made.checkpoint, made.companion, requests, sizes, device)
    assert len(drafts) >= 2 * len(prompts)
    for known, length, found in drafts:
        assert found == made.chain(known[:length], len(found)), length


def test_a_smaller_models_drafts(one_layer: tuple[Checkpoint, Any], tmp_path: Path, device: str) -> None:
    """One that lacks the last entries of the model's table: it reads its own last in their place."""
    made = draft_model(one_layer[0], tmp_path, num_hidden_layers=1, vocab_size=250)
    check(made, TIGHT, device, [[*range(240, 256), 8], [5, 251, 9]], 7)


def test_medusas_drafts(one_layer: tuple[Checkpoint, Any], device: str) -> None:
    """Of a vocabulary of their own."""
    check(medusa(*one_layer, token_map=True), TIGHT, device, [PROMPTS[2], PROMPTS[1]], 7)


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("qwen3", {"num_hidden_layers": 1}),
        ("gemma2", {"num_hidden_layers": 2}),
        ("qwen3_moe", {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}),
        ("deepseek_v2_lite", {"num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_a_smaller_model_in_every_way(
    target: tuple[Checkpoint, Any], tmp_path: Path, way: str, variant: str, changes: dict[str, int], device: str
) -> None:
    """With windows, caps, experts and latents that the model does not have."""
    check(draft_model(target[0], tmp_path, variant, **changes), WAYS[way], device, count=6)


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
def test_medusa_in_every_way(target: tuple[Checkpoint, Any], way: str, device: str) -> None:
    check(medusa(*target), WAYS[way], device, count=8)


def test_what_a_drafter_takes_is_known_before_it_is_made(one_layer: tuple[Checkpoint, Any]) -> None:
    checkpoint, formats = one_layer[0], Formats("bf16", "bf16", "bf16")
    needs = FACTORY.head_needs(make_head("medusa", checkpoint.spec), formats)
    assert isinstance(needs, HeadNeeds) and needs.kv_bytes_per_token == 0
    weights = 2 * 3 * (64 * 64 + 256 * 64)
    logits, taps = 4 * FACTORY.suits.max_running * 256, 2 * FACTORY.suits.max_tokens_per_step * 64
    assert weights + logits + taps < needs.weight_bytes < weights + 4 * (logits + taps)
    assert FACTORY.companion_bytes(checkpoint, formats) > 2 * sum(
        prod(one.shape) for one in checkpoint.tensors.values()
    )


def test_two_drafters_on_the_device_are_refused(one_layer: tuple[Checkpoint, Any]) -> None:
    checkpoint = one_layer[0]
    companions = (Companion("draft", checkpoint, F32, 1), medusa(*one_layer).companion)
    settings = BackendSettings(
        max_context=64, max_tokens_per_step=16, formats=Formats("bf16", "bf16", "bf16"), companions=companions
    )
    with pytest.raises(BackendError, match="one drafter on the device, not for draft and medusa together"):
        FACTORY.create(checkpoint, SIZES.layout(checkpoint), settings)
