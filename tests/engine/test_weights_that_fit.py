"""Which weights a card with little memory gets: as they are stored while KV has room beside them, then in fewer bits,
with the sizes that were compared told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.backends.cuda.tables import H200
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda import FACTORY, products
from twostroke.backends.cuda.model_matrices import held_weight_bytes
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BackendError
from twostroke.core.formats import STORED, Formats
from twostroke.core.step_sizes import StepSizes
from twostroke.engine.formats import Choice, choose_formats
from twostroke.machine import Machine, MemorySpace
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind

HERE = Machine(threads=2, total_memory_bytes=1 << 34, available_memory_bytes=1 << 34)
TOTAL_BYTES = 141 * 10**9
KV_BYTES = 4 * 10**9
SHAPES = Path(__file__).parents[2] / "bench" / "shapes"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model of eight billion weights, none of which is ever drawn."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    folder = make_tiny("llama", tmp_path_factory.mktemp("large"), **sizes)[0]
    config = folder / "config.json"
    text = config.read_text()
    for name, value in (
        ("hidden_size", 4096), ("intermediate_size", 14336), ("num_hidden_layers", 32), ("num_attention_heads", 32),
        ("num_key_value_heads", 8), ("head_dim", 128), ("vocab_size", 128256), ("max_position_embeddings", 131072),
    ):  # fmt: skip
        text = _with(text, name, value)
    config.write_text(text)
    return random_checkpoint(folder, WeightKind.BF16)


def _with(text: str, name: str, value: int) -> str:
    return json.dumps({**json.loads(text), name: value})


@pytest.fixture
def _on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which need not be there: all of its memory is free."""

    def memory(self: object, checkpoint: Checkpoint, here: Machine, formats: Formats, sizes: StepSizes) -> MemorySpace:
        return MemorySpace("a card", TOTAL_BYTES, TOTAL_BYTES - held_weight_bytes(checkpoint, formats), 0.95)

    monkeypatch.setattr(type(FACTORY), "memory", memory)


def chosen(checkpoint: Checkpoint, memory_gb: float | None, **options: str) -> Choice:
    config = EngineConfig(backend="cuda", memory_gb=memory_gb, kv=KVConfig(memory_bytes=KV_BYTES), **options)
    return choose_formats(config, checkpoint, HERE, FACTORY, "asked for")


@pytest.mark.usefixtures("_on_a_card")
@pytest.mark.parametrize(
    ("memory_gb", "weights"), [(None, "bf16"), (24, "bf16"), (16, "fp8"), (10, "int4"), (5, "int4")]
)
def test_the_largest_that_leaves_room_for_kv(large: Checkpoint, memory_gb: float | None, weights: str) -> None:
    choice = chosen(large, memory_gb)
    assert choice.formats.weights == weights
    assert choice.memory.total_bytes == (TOTAL_BYTES if memory_gb is None else memory_gb * 10**9)
    is_smaller = weights != "bf16"
    reason = f"16.1 GB in bf16 do not fit {memory_gb} GB beside 4.0 GB of KV: {weights} (--quantise none keeps them)"
    assert (reason in choice.formats.line) == is_smaller


@pytest.mark.usefixtures("_on_a_card")
def test_what_is_asked_for_goes_before_what_fits(large: Checkpoint) -> None:
    assert chosen(large, 16, quantise="none").formats.weights == "bf16"
    assert chosen(large, None, quantise="int4").formats.weights == "int4"
    assert "quantise int4 as asked for" in chosen(large, None, quantise="int4").formats.line


@pytest.mark.usefixtures("_on_a_card")
def test_a_long_context_that_was_asked_for_needs_its_room(large: Checkpoint) -> None:
    for max_context, weights in ((8192, "bf16"), (131072, "fp8")):
        config = EngineConfig(backend="cuda", memory_gb=32, max_context=max_context)
        assert choose_formats(config, large, HERE, FACTORY, "asked for").formats.weights == weights


@pytest.mark.usefixtures("_on_a_card")
def test_a_window_bounds_what_a_long_context_needs(large: Checkpoint) -> None:
    attention = large.spec.layers[0].grouped
    layers = tuple(replace(layer, attention=replace(attention, window=1024)) for layer in large.spec.layers)
    windowed = replace(large, spec=replace(large.spec, layers=layers))
    config = EngineConfig(backend="cuda", memory_gb=32, max_context=131072)
    assert choose_formats(config, windowed, HERE, FACTORY, "asked for").formats.weights == "bf16"


@pytest.mark.usefixtures("_on_a_card")
def test_weights_stored_in_few_bits_are_not_rounded_again(tmp_path: Path) -> None:
    """One float matrix among them, as an output often is, changes nothing."""
    folder = make_tiny("llama", tmp_path)[0]
    floats, stored = (random_checkpoint(folder, kind) for kind in (WeightKind.BF16, WeightKind.Q8_0))
    mixed = replace(stored, tensors={**stored.tensors, "output": floats.tensors["output"]})
    assert mixed.has_float_matrices and mixed.has_quantised_matrices
    config = EngineConfig(backend="cuda", memory_gb=0.0001)
    assert choose_formats(config, mixed, HERE, FACTORY, "asked for").formats.weights == STORED
    with pytest.raises(BackendError, match="rounding them again to int4 would add an error"):
        choose_formats(replace(config, quantise="int4"), mixed, HERE, FACTORY, "asked for")


@pytest.mark.parametrize(("asked", "step_tokens"), [(None, 2048), (8192, 8192)])
def test_steps_are_made_smaller_for_the_sake_of_kv(
    large: Checkpoint, asked: int | None, step_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to a limit, and only where nobody asked for a size."""

    def memory(self: object, checkpoint: Checkpoint, here: Machine, formats: Formats, sizes: StepSizes) -> MemorySpace:
        return MemorySpace("a card", TOTAL_BYTES, KV_BYTES - sizes.max_tokens_per_step * 10**6, 1.0)

    monkeypatch.setattr(type(FACTORY), "memory", memory)
    config = EngineConfig(
        backend="cuda", quantise="none", kv=KVConfig(memory_bytes=KV_BYTES), max_tokens_per_step=asked
    )
    choice = choose_formats(config, large, HERE, FACTORY, "asked for")
    sizes, reason = choice.sizes, choice.steps_reason
    assert sizes.max_tokens_per_step == step_tokens
    told = "steps of 2048 tokens: those of 8192 would leave KV -4.2 GB"
    assert reason == (told if asked is None else None)


def test_memory_within_a_limit() -> None:
    space = MemorySpace("a card", 100, 60, 0.9)
    assert space.within(None) is space and space.within(200) is space
    assert space.within(70) == MemorySpace("a card", 70, 30, 0.9)
    assert space.within(10).free_beside_weights_bytes == 0


@pytest.mark.parametrize(
    ("shape", "asked", "weights", "least_tokens", "step_tokens"),
    [("llama-3.1-8b", "fp8", "fp8", 60_000, 8192), ("qwen3-30b-a3b", None, "int4", 28_000, 4096)],
)
def test_a_card_of_24_gb_holds_what_people_run_there(
    shape: str,
    asked: str | None,
    weights: str,
    least_tokens: int,
    step_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With all that an engine needs beside weights counted, on a Hopper card that need not be there. A driver and torch
    take some of it, so that more must be left than is promised: half a gigabyte on an H200."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (TOTAL_BYTES, TOTAL_BYTES))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a card")
    monkeypatch.setattr(products, "card_of", lambda *_: H200)
    checkpoint = random_checkpoint(SHAPES / shape, WeightKind.BF16)
    config = EngineConfig(backend="cuda", memory_gb=24, quantise=asked)
    choice = choose_formats(config, checkpoint, HERE, FACTORY, "asked for")
    assert choice.formats.weights == weights
    sizes, reason = choice.sizes, choice.steps_reason
    assert sizes.max_tokens_per_step == step_tokens and (reason is None) == (step_tokens == 8192), reason
    for_kv = choice.memory.free_beside_weights_bytes * choice.memory.kv_share
    tokens = for_kv / sum(need.bytes_per_token for need in choice.kv_needs)
    assert tokens > least_tokens, f"{tokens:,.0f} tokens"
