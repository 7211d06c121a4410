"""Latent attention on the CPU against the reference: chunks, which have keys and values made of latents, and decodes,
which read latents alone; over several spans, on any number of threads, alone and with drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.backends.cpu.native import instruction_set_names
from tests.backends.driver import Driver, layout_for, logits_by_prefill
from tests.models.tiny_checkpoints import SHARP_ROPE, VOCAB_SIZE, latent_variants, make_tiny
from tests.models.tiny_gguf import Stored, write_gguf
from tests.models.tiny_gguf_keys import later_latent_keys

from twostroke.backends.cpu import FACTORY
from twostroke.backends.cpu.backend import CpuBackend
from twostroke.backends.host.batch import Batch
from twostroke.backends.interface import BackendSettings
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.backends.reference.kv_store import KVStore
from twostroke.core.formats import Formats, FormatWish
from twostroke.core.step import PrefillChunk, Step
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.spec import LatentAttention
from twostroke.models.weights.tensor import WeightKind

LONG = 600
"""Two spans of keys and a part of a third; more than a tile of a chunk takes."""
TOKENS = [int(token) for token in np.random.default_rng(7).integers(6, VOCAB_SIZE, LONG)]
SHORT = TOKENS[:53]
KIND = gguf.GGMLQuantizationType.Q8_0
REAL: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 1,
}
"""DeepSeek-V2-Lite's attention, in one layer without experts."""


@pytest.fixture
def half_precision_kv(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    write = KVStore.write

    def rounded(store: KVStore, layer: int, slots: np.ndarray, *kept: np.ndarray) -> None:
        write(store, layer, slots, *(array.astype(np.float16).astype(np.float32) for array in kept))

    monkeypatch.setattr(KVStore, "write", rounded)
    yield


def tiny(variant: str, folder: Path, **changes: Any) -> Checkpoint:
    checkpoint = load_checkpoint(make_tiny(variant, folder, **changes)[0])
    assert FACTORY.supports(checkpoint) is None
    return checkpoint


def created(
    checkpoint: Checkpoint, kv: str | None = "f16", threads: int = 2, isa_name: str | None = None, **others: Any
) -> CpuBackend:
    formats = FACTORY.formats(checkpoint, FormatWish(others.pop("weights", None), kv=kv), isa_name)
    assert isinstance(formats, Formats), formats
    settings = BackendSettings(max_context=1024, max_tokens_per_step=LONG, threads=threads, formats=formats)
    layout = layout_for(checkpoint.spec, LONG, others.pop("block_size", 16), **others)
    return FACTORY.create(checkpoint, layout, settings, isa_name=isa_name)


def cpu_logits(
    checkpoint: Checkpoint, tokens: list[int], pieces: list[list[int]], *settings: Any, **others: Any
) -> list[np.ndarray]:
    backend = created(checkpoint, *settings, **others)
    try:
        return [logits_by_prefill(backend, tokens, sizes) for sizes in pieces]
    finally:
        backend.close()


def reference_logits(checkpoint: Checkpoint, tokens: list[int], pieces: list[int]) -> np.ndarray:
    settings = BackendSettings(max_context=1024, max_tokens_per_step=LONG)
    backend = REFERENCE.create(checkpoint, layout_for(checkpoint.spec, LONG, 16), settings)
    try:
        return logits_by_prefill(backend, tokens, pieces)
    finally:
        backend.close()


def usual(found: np.ndarray, expected: np.ndarray) -> float:
    """The difference of the usual row: one that is about as near to two experts may go to the other."""
    return float(np.median(np.sqrt(((found - expected) ** 2).mean(axis=-1))) / expected.std())


@pytest.mark.parametrize("variant", [one for one in latent_variants() if one != "mistral3_vision"])
def test_in_every_way(variant: str, tmp_path: Path, half_precision_kv: None) -> None:
    checkpoint = tiny(variant, tmp_path)
    expected = reference_logits(checkpoint, SHORT, [len(SHORT)])
    whole, chunks, *others = cpu_logits(checkpoint, SHORT, [[53], [5, 16, 1, 23, 8], [20, 11], [1]])
    assert np.array_equal(chunks, whole), "the pieces a prompt came in changed its logits"
    for found in (whole, *others):
        assert np.sqrt(((found - expected) ** 2).mean()) < 2e-4 * expected.std()
    whole, chunks, *others = cpu_logits(checkpoint, SHORT, [[53], [5, 16, 1, 23, 8], [20, 11], [1]], "bf16")
    assert np.array_equal(chunks, whole)
    # Rounding the reference's latents to bf16 alone makes 0.01 of this.
    assert all(usual(found, expected) < 0.03 for found in (whole, *others))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_over_several_spans_on_any_number_of_threads(kind: str, tmp_path: Path, half_precision_kv: None) -> None:
    checkpoint = tiny("deepseek_v3", tmp_path)
    pieces = [[LONG], [300, 40, 1, 3, 256], [LONG - 12]]
    expected = reference_logits(checkpoint, TOKENS, [LONG])
    whole, chunks, decoded = cpu_logits(checkpoint, TOKENS, pieces, kind)
    assert np.array_equal(chunks, whole) and np.array_equal(decoded[:-12], whole[:-12])
    assert all(usual(found, expected) < (2e-4 if kind == "f16" else 0.04) for found in (whole, decoded))
    for threads in (1, 3):
        found = cpu_logits(checkpoint, TOKENS, [[LONG], [LONG - 12]], kind, threads)
        assert np.array_equal(found[0], whole) and np.array_equal(found[1], decoded)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_larger_blocks_change_nothing(kind: str, tmp_path: Path) -> None:
    checkpoint = tiny("deepseek_v2_lite", tmp_path, num_hidden_layers=1)
    found, expected = (cpu_logits(checkpoint, TOKENS[:300], [[290]], kind, block_size=size)[0] for size in (48, 16))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", [pytest.param("f16", marks=pytest.mark.slow), "bf16"])
def test_in_the_sizes_of_a_published_model(kind: str, tmp_path: Path, half_precision_kv: None) -> None:
    checkpoint = tiny("deepseek_v2_lite", tmp_path, **REAL)
    tokens, limit = TOKENS[:290], 2e-4 if kind == "f16" else 0.03
    expected = reference_logits(checkpoint, tokens, [len(tokens)])
    for found in cpu_logits(checkpoint, tokens, [[290], [280]], kind):
        assert usual(found, expected) < limit


@pytest.mark.parametrize("isa_name", instruction_set_names()[1:])
def test_on_other_instruction_sets(isa_name: str, tmp_path: Path, half_precision_kv: None) -> None:
    checkpoint = tiny("deepseek_v2_lite", tmp_path, num_hidden_layers=1)
    expected = reference_logits(checkpoint, SHORT, [len(SHORT)])
    for kind, limit in (("f16", 2e-4), ("bf16", 0.03)):
        for found in cpu_logits(checkpoint, SHORT, [[53], [40]], kind, 2, isa_name):
            assert usual(found, expected) < limit


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_drafts_have_the_bits_of_tokens_alone(kind: str, tmp_path: Path) -> None:
    """And so have decodes in company: two sequences, one with three drafts behind its token."""
    checkpoint = tiny("mistral4", tmp_path)
    backend = created(checkpoint, kind, num_sequences=2)
    half = backend.layout.groups[0].num_blocks // 2
    drivers = [Driver(backend, TOKENS, 0, range(half)), Driver(backend, TOKENS[::-1], 1, range(half, 2 * half))]
    for driver, count in zip(drivers, (280, 30), strict=True):
        driver.prefill(count)
    slots = tuple(driver.slot() for driver in drivers)
    drafts = {0: tuple(TOKENS[281:284])}
    together = backend.forward(Batch.from_step(Step(1, decodes=slots), backend.rows, drafts))
    alone = [drivers[0].decode() for _ in range(4)] + [drivers[1].decode()]
    assert np.array_equal(together, np.concatenate(alone))
    backend.close()


def test_a_row_whose_logits_are_wanted_alone_has_the_same_bits(tmp_path: Path) -> None:
    backend = created(tiny("glm4_moe_lite", tmp_path))
    whole = logits_by_prefill(backend, SHORT, [len(SHORT)])
    for first in (47, 0):
        driver = Driver(backend, SHORT)
        if first:
            driver.prefill(first)
        step = Step(1, prefills=(PrefillChunk(0, first, tuple(SHORT[first:]), samples=True),))
        assert np.array_equal(backend.forward(Batch.from_step(step, backend.rows)), whole[-1:])
        driver.leave()
    backend.close()


def test_blocks_that_were_copied_out_and_in_elsewhere_are_read_alike(tmp_path: Path) -> None:
    checkpoint = tiny("deepseek_v2", tmp_path)
    first, second = created(checkpoint, None), created(checkpoint, None)
    (group,), (form,) = first.layout.groups, first.block_store.block_formats()
    assert form == second.block_store.block_formats()[0] and ("latent", 1) in form.axes
    formats = FACTORY.formats(checkpoint)
    assert isinstance(formats, Formats)
    assert form.num_bytes == 16 * FACTORY.kv_bytes_per_token(checkpoint, group.layers, formats)
    drivers = Driver(first, SHORT), Driver(second, SHORT)
    drivers[0].prefill(40)
    memory = np.zeros(form.num_bytes, dtype=np.uint8)
    tables = [driver.backend.rows[0].tables[0] for driver in drivers]
    tables[1][:3] = tables[0][:3][::-1]  # other blocks, in another order
    for mine, theirs in zip(tables[0][:3], tables[1][:3], strict=True):
        first.block_store.copy_out(0, int(mine), memory)
        second.block_store.copy_in(0, int(theirs), memory)
    drivers[1].position = 40
    assert all(np.array_equal(drivers[1].decode(), drivers[0].decode()) for _ in range(5))
    first.close()
    second.close()


@pytest.mark.parametrize("stacks", [False, True], ids=["one matrix", "stacks of heads"])
def test_a_gguf_file_in_8_bits(stacks: bool, tmp_path: Path) -> None:
    """Keys and values made by one matrix, or by a stack of heads each. In a layer without experts: activations are
    brought to 8 bits, too, and a token may be sent elsewhere for that."""
    sizes = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "num_hidden_layers": 1}
    _, model = make_tiny("deepseek_v3", tmp_path / "folder", **sizes, rope_parameters={**SHARP_ROPE, "mscale": 1.0})

    def in_8_bits(name: str, tensor: torch.Tensor) -> Stored | None:
        if tensor.ndim < 2 or "ffn_gate_inp" in name or "token_embd" in name:
            return None
        return gguf.quants.quantize(tensor.float().numpy(), KIND), KIND

    keys = later_latent_keys(model.config) if stacks else {}
    checkpoint = load_checkpoint(write_gguf(model, tmp_path / "tiny.gguf", in_8_bits, **keys))
    assert checkpoint.tensors["layers.0.kv_a"].kind is WeightKind.Q8_0
    expected = reference_logits(checkpoint, SHORT, [len(SHORT)])
    whole, chunks, decoded = cpu_logits(checkpoint, SHORT, [[53], [7, 30, 16], [20]])
    assert np.array_equal(chunks, whole)
    assert usual(whole, expected) < 0.06 and usual(decoded, expected) < 0.06


def test_what_does_not_fit_is_declined(tmp_path: Path) -> None:
    checkpoint = tiny("deepseek_v2_lite", tmp_path, num_hidden_layers=1)
    assert "latents in f16, bf16, not in int8" in str(FACTORY.formats(checkpoint, FormatWish(kv="int8")))
    (layer,) = checkpoint.spec.layers
    assert isinstance(layer.attention, LatentAttention)
    for change, sentence in (
        ({"rank": 48}, "multiples of 32, and this model's rank of latents is 48"),
        ({"value_dim": 24}, "values of a multiple of 16 numbers, and this model's have 24"),
        ({"plain_dim": 20}, "keys of a multiple of 16 numbers, and this model's have 28"),
        ({"plain_dim": 23, "rotated_dim": 9}, "two at a time"),
    ):
        own = replace(layer, attention=replace(layer.attention, **change))
        spec = replace(checkpoint.spec, layers=(own,))
        assert sentence in str(FACTORY.supports(replace(checkpoint, spec=spec)))
