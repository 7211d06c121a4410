"""Experts on the CPU against the reference: whichever rows meet which, in whatever pieces and on however many threads;
stored in any kind; and experts that no row meets are not read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.backends.driver import layout_for, logits_by_prefill
from tests.models.kind_files import tiny_model, write_of_kinds
from tests.models.quantised.folders import write_folder
from tests.models.quantised.published import Publisher, publish
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny

from twostroke.backends.cpu import FACTORY
from twostroke.backends.cpu.weights import Weights
from twostroke.backends.interface import BackendFactory, BackendSettings
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.backends.reference.kv_store import KVStore
from twostroke.core.formats import Formats, FormatWish
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.tensor import WeightKind, from_float32

MANY = 200
"""More rows than products of few rows take, also of one expert."""
TOKENS = [int(token) for token in np.random.default_rng(7).integers(6, VOCAB_SIZE, MANY)]
PIECES = [[MANY], [5, 16, 1, 23, 8], [150, 11], [1]]
VARIANTS = [
    *("qwen3_moe", "qwen3_moe_unnormalised", "qwen3_moe_mixed", "mixtral", "gpt_oss", "qwen2_moe", "glm4_moe"),
    *("hunyuan_moe", "minimax_m2", "olmoe", "granite_moe", "granite_moe_shared", "ernie4_5_moe"),
]
SHARP = {"granite_moe_shared": 3e-4}
"""Its scores are multiplied by 1, as Granite's default is: a key that rounds the other way changes more."""


@pytest.fixture
def half_precision_kv(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    write = KVStore.write

    def rounded(store: KVStore, layer: int, slots: np.ndarray, *kept: np.ndarray) -> None:
        write(store, layer, slots, *(array.astype(np.float16).astype(np.float32) for array in kept))

    monkeypatch.setattr(KVStore, "write", rounded)
    yield


def logits(
    factory: BackendFactory,
    checkpoint: Checkpoint,
    tokens: list[int],
    pieces: list[list[int]],
    threads: int = 2,
    weights: str | None = None,
) -> list[np.ndarray]:
    formats = factory.formats(checkpoint, FormatWish(weights, kv="f16" if factory is FACTORY else None))
    assert isinstance(formats, Formats), formats
    settings = BackendSettings(max_context=256, max_tokens_per_step=MANY, threads=threads, formats=formats)
    backend = factory.create(checkpoint, layout_for(checkpoint.spec, len(tokens), 16), settings)
    try:
        return [logits_by_prefill(backend, tokens, sizes) for sizes in pieces]
    finally:
        backend.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_every_way(variant: str, tmp_path: Path, half_precision_kv: None) -> None:
    checkpoint = load_checkpoint(make_tiny(variant, tmp_path)[0])
    assert FACTORY.supports(checkpoint) is None
    (expected,) = logits(REFERENCE, checkpoint, TOKENS, [[MANY]])
    whole, *others = logits(FACTORY, checkpoint, TOKENS, PIECES)
    assert np.sqrt(((whole - expected) ** 2).mean()) < SHARP.get(variant, 2e-4) * expected.std()
    assert all(np.array_equal(other, whole) for other in others), "the pieces a prompt came in changed its logits"
    for threads in (1, 3):
        (alone,) = logits(FACTORY, checkpoint, TOKENS, [[MANY]], threads)
        assert np.array_equal(alone, whole), "the number of threads changed the logits"


@pytest.mark.parametrize("kind", [WeightKind.MXFP4, WeightKind.Q8_0, WeightKind.Q4_K, WeightKind.Q6_K])
def test_quantised_as_stored(kind: WeightKind, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_of_kinds(tiny_model(experts=True), tmp_path / "m.gguf", lambda _: kind))
    held = {tensor.kind for name, tensor in checkpoint.tensors.items() if ".experts." in name}
    assert held == {kind}
    answers_as_the_reference(checkpoint)


def answers_as_the_reference(checkpoint: Checkpoint) -> None:
    assert FACTORY.supports(checkpoint) is None
    tokens = [token % checkpoint.spec.vocab_size for token in TOKENS[:60]]
    (expected,) = logits(REFERENCE, checkpoint, tokens, [[60]])
    whole, *others = logits(FACTORY, checkpoint, tokens, [[60], [7, 30], [1]])
    # Activations are rounded to 8 bits, so a token that is about as near to two experts may go to the other one.
    difference = np.sqrt(((whole - expected) ** 2).mean(axis=-1))
    assert np.median(difference) < 0.06 * expected.std()
    assert all(np.array_equal(other, whole) for other in others)


FORMS = {
    "apart": ("ct_int4", "ct_int4_asym", "ct_int8", "ct_int8_asym", "fp8_block", "ct_nvfp4", "gptq_order", "awq"),
    "stacked": ("ct_int4", "ct_int4_asym", "fp8_block", "ct_fp8_channel", "ct_mxfp4"),
}
"""Of folders, by how they have their experts."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in floats, its experts apart and stacked."""
    folder = tmp_path_factory.mktemp("experts")
    tiny_model(experts=True).save_pretrained(folder / "apart")
    tensors, place = load_file(folder / "apart" / "model.safetensors"), "model.layers.0.mlp.experts"
    own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(place)}
    gate, up, down = (
        torch.stack([own[f"{place}.{expert}.{part}_proj.weight"] for expert in range(4)])
        for part in ("gate", "up", "down")
    )
    tensors |= {f"{place}.gate_up_proj": torch.cat([gate, up], dim=1), f"{place}.down_proj": down}
    write_folder(folder / "stacked", json.loads((folder / "apart" / "config.json").read_text()), tensors)
    return {experts: folder / experts for experts in FORMS}


@pytest.mark.parametrize(("experts", "form"), [(experts, form) for experts, forms in FORMS.items() for form in forms])
def test_quantised_as_folders_have_it(experts: str, form: str, plain: dict[str, Path], tmp_path: Path) -> None:
    publisher = Publisher(form, experts)
    folder, _ = publish(plain[experts], tmp_path, publisher)
    stacks = [name for name in load_file(folder / "model.safetensors") if ".experts.gate_up_proj" in name]
    checkpoint = load_checkpoint(folder)
    held = {tensor.kind.name for name, tensor in checkpoint.tensors.items() if ".experts." in name}
    assert held == {publisher.format.kind} and bool(stacks) == (experts == "stacked")
    answers_as_the_reference(checkpoint)


@pytest.mark.parametrize("ordered", ["gate", "up"])
def test_gate_and_up_whose_tiles_differ(ordered: str, plain: dict[str, Path], tmp_path: Path) -> None:
    """Both are INT4: inputs in an order of their own are rounded to 8 bits, and others are not."""
    folder, _ = publish(plain["apart"], tmp_path, Publisher("gptq_order", "apart"))
    tensors = load_file(folder / "model.safetensors")
    for name, group_of_input in tensors.items():
        if ".experts." in name and name.endswith("_proj.g_idx") and f".{ordered}_proj." not in name:
            tensors[name] = torch.arange(len(group_of_input), dtype=torch.int32) // 32
    save_file(tensors, folder / "model.safetensors")
    checkpoint = load_checkpoint(folder)
    answers_as_the_reference(checkpoint)
    notes = Weights.from_checkpoint(checkpoint).notes
    assert "4 tensors INT4 beside another kind rounded to Q8_0 (8.5 bits a weight)" in notes
    formats = FACTORY.formats(checkpoint, FormatWish())
    assert isinstance(formats, Formats)
    names = [f"layers.0.experts.0.{part}" for part in ("gate", "up")]
    sizes = {FACTORY.held_bytes(checkpoint, name, formats) for name in names}
    assert sizes == {256 * 256 * 34 // 32}


@pytest.mark.parametrize(("gate", "up"), [("ct_int4", "ct_int4_asym"), ("ct_nvfp4", "ct_int4"), ("fp8_block", "awq")])
def test_gate_and_up_of_two_kinds(gate: str, up: str, plain: dict[str, Path], tmp_path: Path) -> None:
    """Of every second expert: the other ones are alike."""
    one, two = (
        load_checkpoint(publish(plain["apart"], tmp_path / form, Publisher(form, "apart"))[0]) for form in (gate, up)
    )
    ups = {f"layers.0.experts.{expert}.up": two.tensors[f"layers.0.experts.{expert}.up"] for expert in (1, 3)}
    answers_as_the_reference(replace(one, tensors={**one.tensors, **ups}))


def test_a_quantised_gate_beside_an_up_in_floats_is_declined(plain: dict[str, Path], tmp_path: Path) -> None:
    quantised, meant = publish(plain["apart"], tmp_path, Publisher("ct_int4", "apart"))
    checkpoint, name = load_checkpoint(quantised), "layers.0.experts.2.up"
    mixed = replace(checkpoint, tensors={**checkpoint.tensors, name: load_checkpoint(meant).tensors[name]})
    assert "gate and up in one kind, and here they are INT4 and F32" in str(FACTORY.supports(mixed))


@pytest.mark.parametrize("variant", ["qwen2_moe", "glm4_moe", "minimax_m2"])
def test_float_weights_in_8_bits(variant: str, tmp_path: Path) -> None:
    """Weights and activations, both: the reference has neither."""
    checkpoint = load_checkpoint(make_tiny(variant, tmp_path)[0])
    (expected,) = logits(REFERENCE, checkpoint, TOKENS[:60], [[60]])
    whole, *others = logits(FACTORY, checkpoint, TOKENS[:60], [[60], [7, 30], [1]], weights="q8_0")
    difference = np.sqrt(((whole - expected) ** 2).mean(axis=-1))
    assert np.median(difference) < 0.1 * expected.std()
    assert all(np.array_equal(other, whole) for other in others)


def test_experts_that_nobody_meets_are_not_read(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_tiny("mixtral", tmp_path)[0])
    spec, tensors = checkpoint.spec, dict(checkpoint.tensors)
    assert spec.moe is not None
    for layer in range(spec.num_layers):
        # Whatever a token is, its experts are 0 and 1: their rows of the router are the others' with more added.
        router = tensors[f"layers.{layer}.router"].to_float32().copy()
        router[2:] = 0
        router[:2] = np.abs(router[:2])
        tensors[f"layers.{layer}.router"] = from_float32("router", router)
        norm = np.abs(tensors[f"layers.{layer}.mlp_norm"].to_float32())
        tensors[f"layers.{layer}.mlp_norm"] = from_float32("norm", norm)
    own = replace(checkpoint, tensors=tensors)
    met = {int(expert) for expert in _met(own)}
    poisoned = dict(tensors)
    for layer in range(spec.num_layers):
        for expert in set(range(spec.moe.num_experts)) - met:
            for part in ("gate", "up", "down"):
                name = f"layers.{layer}.experts.{expert}.{part}"
                poisoned[name] = from_float32(name, np.full(tensors[name].shape, np.nan, dtype=np.float32))
    assert met < set(range(spec.moe.num_experts)), "all experts were met: this proves nothing"
    (clean,) = logits(FACTORY, own, TOKENS[:1], [[1]])
    (found,) = logits(FACTORY, replace(own, tensors=poisoned), TOKENS[:1], [[1]])
    assert np.array_equal(found, clean) and np.isfinite(found).all()


def _met(checkpoint: Checkpoint) -> set[int]:
    """Of the reference: over all layers, for one token."""
    from twostroke.backends.reference import mlp

    found: set[int] = set()
    route = mlp.route

    def noted(*arguments: object) -> object:
        chosen, shares = route(*arguments)  # type: ignore[arg-type]
        found.update(chosen.reshape(-1).tolist())
        return chosen, shares

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlp, "route", noted)
        logits(REFERENCE, checkpoint, TOKENS[:1], [[1]])
    return found
