"""Which formats an engine has: asked for, or by default with the reason; and what no backend has is declined."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.backends.cpu.quantised_checkpoint import mixed_checkpoint
from tests.models.kind_files import tiny_model, write_of_kinds
from tests.models.quantised.folders import FORMATS, make_quantised
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cpu import FACTORY
from twostroke.backends.cpu.weights import Weights
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.core.formats import STORED
from twostroke.engine.build import Assembly, assemble
from twostroke.engine.formats import asked_weights, choose_formats, preferred
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
    assert (assembly.formats.weights, assembly.formats.arithmetic, assembly.formats.stored) == ("q8_0", "int8", "F32")
    (line,) = (note for note in assembly.notes if note.startswith("formats: "))
    assert line.startswith(f"formats: weights Q8_0 from F32, int8 arithmetic, KV {assembly.formats.kv}, no copies for")
    assert "--quantise none keeps floats" in line and "KV in the fastest of 16 bits on this CPU" in line
    assert "22 tensors F32 quantised to Q8_0" in assembly.notes
    assert assembly.shape.weight_bytes_per_step < floats.weight_bytes / 3


def test_short_memory_takes_q4_1(floats: Checkpoint) -> None:
    short = replace(ROOMY, available_memory_bytes=floats.held_bytes("q8_0"))
    chosen, reason = preferred(FACTORY.preferred_weights, floats, short)
    assert chosen == "q4_1"
    assert reason is not None and "60% of the free memory" in reason


@pytest.mark.parametrize(
    ("asked", "held"), [("q8_0", "q8_0"), ("q4_1", "q4_1"), ("int4", "int4"), ("fp8", "fp8"), ("none", STORED)]
)
def test_what_is_asked_for_is_done(floats: Checkpoint, asked: str, held: str) -> None:
    assembly = build(floats, quantise=asked)
    assert assembly.formats.weights == held
    assert assembly.formats.arithmetic == ("f32" if held == STORED else "int8")
    assert f"quantise {asked} as asked for" in assembly.formats.line


def test_quantised_weights_are_left_alone(tmp_path: Path) -> None:
    mixed = mixed_checkpoint(tmp_path)
    kinds = {name: tensor.kind for name, tensor in mixed.tensors.items() if tensor.kind.is_quantised}
    chosen, _ = preferred(FACTORY.preferred_weights, mixed, ROOMY)
    assert chosen == "q8_0" and {name: mixed.held_kind(name, chosen) for name in kinds} == kinds
    whole = replace(mixed, tensors=dict.fromkeys(("layers.0.q", "layers.1.q"), mixed.tensors["layers.0.q"]))
    assert preferred(FACTORY.preferred_weights, whole, ROOMY) == (None, None)
    weights, reason = asked_weights("q8_0", whole)
    assert weights == STORED and "changes nothing" in str(reason)
    with pytest.raises(BackendError, match="brings float weights to q8_0, q4_1, int4, fp8, not to nvfp4"):
        choose_formats(EngineConfig(quantise="nvfp4"), whole, ROOMY, FACTORY, "asked for")


@pytest.mark.parametrize("form", ["ct_int4", "awq", "ct_fp8_channel", "ct_mxfp4", "gptq_order"])
@pytest.mark.parametrize("asked", [None, "fp8", "int4", "none"])
def test_quantised_folders_with_a_head_in_floats(form: str, asked: str | None, tmp_path: Path) -> None:
    """They are told as they are held. A head never has less than 8 bits."""
    checkpoint = load_checkpoint(make_quantised(form, tmp_path)[0])
    assert list(checkpoint.float_matrices()) == ["output"]
    formats = choose_formats(EngineConfig(quantise=asked), checkpoint, ROOMY, FACTORY, "asked for").formats
    rest = "" if asked == "none" else ", the rest in Q8_0"
    assert formats.line.startswith(f"weights {FORMATS[form].kind} as stored{rest}, int8 arithmetic, ")
    notes = Weights.from_checkpoint(checkpoint, weights=formats.weights).notes
    assert ("1 tensors F32 quantised to Q8_0" in notes) == (asked != "none")


def test_a_quantised_folder_with_more_floats_names_each_kind(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_quantised("ct_int4", tmp_path)[0])
    floats = load_checkpoint(tmp_path / "meant").tensors
    mixed = replace(checkpoint, tensors={**checkpoint.tensors, "layers.0.q": floats["layers.0.q"]})
    formats = choose_formats(EngineConfig(quantise="fp8"), mixed, ROOMY, FACTORY, "asked for").formats
    assert formats.line.startswith("weights INT4 as stored, the rest in Q8_0 and FP8, "), "the largest first"


def test_routers_are_no_floats_to_quantise(tmp_path: Path) -> None:
    """Experts in a GGUF file have a router in floats, which stays one."""
    path = write_of_kinds(tiny_model(experts=True), tmp_path / "m.gguf", lambda _: WeightKind.Q4_0)
    checkpoint = load_checkpoint(path)
    assert checkpoint.is_multiplied("layers.0.router") and not checkpoint.tensors["layers.0.router"].kind.is_quantised
    formats = choose_formats(EngineConfig(), checkpoint, ROOMY, FACTORY, "asked for").formats
    assert formats.weights == STORED and formats.line.startswith("weights Q4_0 as stored, ")


def test_the_reference_backend_declines(floats: Checkpoint) -> None:
    with pytest.raises(BackendError, match="quantises none"):
        build(floats, backend="reference", quantise="q8_0")
    assert build(floats, backend="reference").formats.weights == STORED
    assert build(floats, backend="reference", quantise="none").formats.weights == STORED


@pytest.mark.parametrize("weights", ["int8", "q4_k", "nvfp4"])
def test_a_format_that_no_backend_has_is_declined_by_each_with_a_sentence(floats: Checkpoint, weights: str) -> None:
    with pytest.raises(BackendError) as raised:
        build(floats, quantise=weights)
    sentences = str(raised.value)
    assert sentences.startswith("no backend can run this model here; not cuda: ")
    assert f"not cpu: it brings float weights to q8_0, q4_1, int4, fp8, not to {weights}" in sentences
    assert "not reference: it multiplies by the weights as they are stored" in sentences


def test_an_arithmetic_that_the_backend_lacks_and_kv_in_fp8_are_declined(floats: Checkpoint) -> None:
    with pytest.raises(BackendError, match="the cpu backend does not have what was asked for: its arithmetic follows"):
        build(floats, backend="cpu", dtype="fp8")
    config = EngineConfig(backend="cpu", kv=KVConfig(kind="fp8"))
    with pytest.raises(BackendError, match="it keeps KV in f16, bf16, int8, not in fp8"):
        assemble(floats, None, config)


def test_bad_choices_name_the_good_ones() -> None:
    with pytest.raises(BadRequestError, match=r"quantise must be one of none, f32, .*, not 'q5_9'"):
        EngineConfig(quantise="q5_9")
    with pytest.raises(BadRequestError, match="load must be one of file, random"):
        EngineConfig(load="network")


def test_the_head_keeps_8_bits_and_a_plain_embedding_all(floats: Checkpoint) -> None:
    assert floats.held_kind("output", "q4_1") is WeightKind.Q8_0
    assert floats.held_kind("embedding", "q4_1") is WeightKind.F32  # looked up, never multiplied by
    assert floats.held_kind("layers.0.down", "q4_1") is WeightKind.Q4_1
    assert floats.held_kind("layers.0.mlp_norm", "q4_1") is WeightKind.F32
    tied = replace(floats, spec=replace(floats.spec, tied_embeddings=True))
    assert tied.held_kind("embedding", "q4_1") is WeightKind.Q8_0
