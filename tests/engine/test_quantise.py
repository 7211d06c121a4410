"""Which kind float weights are brought to: asked for, or by default with its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.backends.cpu.quantised_checkpoint import mixed_checkpoint
from tests.models.tiny_checkpoints import make_tiny

from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.engine.build import Assembly, assemble
from twostroke.engine.quantise import as_asked, by_default
from twostroke.machine import Machine
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.tensor import WeightKind

ROOMY = Machine(threads=2, total_memory_bytes=1 << 34, available_memory_bytes=1 << 34)


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_checkpoint(make_tiny("llama", tmp_path_factory.mktemp("floats"))[0])


def build(checkpoint: Checkpoint, **options: str) -> Assembly:
    config = EngineConfig(max_context=64, kv=KVConfig(memory_bytes=1 << 20), **options)  # type: ignore[arg-type]
    assembly = assemble(checkpoint, None, config)
    assembly.engine.close()
    return assembly


def test_the_default_is_q8_0_and_said_out_loud(floats: Checkpoint) -> None:
    assembly = build(floats)
    assert assembly.checkpoint.quantise_to is WeightKind.Q8_0
    assert any(note.startswith("quantise q8_0: ") and "--quantise none keeps floats" in note for note in assembly.notes)
    assert "22 tensors F32 quantised to Q8_0" in assembly.notes
    assert assembly.shape.weight_bytes_per_step < floats.weight_bytes / 3


def test_short_memory_takes_q4_1(floats: Checkpoint) -> None:
    needed = replace(floats, quantise_to=WeightKind.Q8_0).held_bytes
    chosen, reason = by_default(floats, replace(ROOMY, available_memory_bytes=needed))
    assert chosen.quantise_to is WeightKind.Q4_1
    assert reason is not None and "60% of the free memory" in reason


@pytest.mark.parametrize(("asked", "kind"), [("q8_0", WeightKind.Q8_0), ("q4_1", WeightKind.Q4_1), ("none", None)])
def test_what_is_asked_for_is_done(floats: Checkpoint, asked: str, kind: WeightKind | None) -> None:
    assembly = build(floats, quantise=asked)
    assert assembly.checkpoint.quantise_to is kind
    assert f"quantise {asked}: asked for" in assembly.notes


def test_quantised_weights_are_left_alone(tmp_path: Path) -> None:
    mixed = mixed_checkpoint(tmp_path)
    kinds = {name: tensor.kind for name, tensor in mixed.tensors.items() if tensor.kind.is_quantised}
    chosen, _ = by_default(mixed, ROOMY)
    assert {name: chosen.held_kind(name) for name in kinds} == kinds
    whole = replace(mixed, tensors=dict.fromkeys(("layers.0.q", "layers.1.q"), mixed.tensors["layers.0.q"]))
    assert by_default(whole, ROOMY) == (whole, None)
    assert as_asked("q8_0", whole)[0].quantise_to is None
    assert "changes nothing" in str(as_asked("q8_0", whole)[1])


def test_the_reference_backend_declines(floats: Checkpoint) -> None:
    with pytest.raises(BackendError, match="quantises none"):
        build(floats, backend="reference", quantise="q8_0")
    assert build(floats, backend="reference").checkpoint.quantise_to is None
    assert build(floats, backend="reference", quantise="none").checkpoint.quantise_to is None


def test_bad_choices_name_the_good_ones() -> None:
    with pytest.raises(BadRequestError, match=r"quantise must be one of q8_0, q4_1, none, not 'q5_1'"):
        EngineConfig(quantise="q5_1")
    with pytest.raises(BadRequestError, match="load must be one of file, random"):
        EngineConfig(load="network")


def test_the_head_keeps_8_bits_and_a_plain_embedding_all(floats: Checkpoint) -> None:
    asked = replace(floats, quantise_to=WeightKind.Q4_1)
    assert asked.held_kind("output") is WeightKind.Q8_0
    assert asked.held_kind("embedding") is WeightKind.F32  # looked up, never multiplied by
    assert asked.held_kind("layers.0.down") is WeightKind.Q4_1
    assert asked.held_kind("layers.0.mlp_norm") is WeightKind.F32
    tied = replace(asked, spec=replace(asked.spec, tied_embeddings=True))
    assert tied.held_kind("embedding") is WeightKind.Q8_0
