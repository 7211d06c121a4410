"""Every family's tiny checkpoint: the CPU backend's logits against the reference backend's. Float weights are
multiplied exactly, so all that differs is the KV in f16: the reference is given the same rounding, and what is left
is the rare key that rounds the other way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.backends.cpu.native import instruction_set_names
from tests.backends.cpu.quantised_checkpoint import mixed_checkpoint
from tests.backends.driver import Driver, layout_for, logits_by_prefill
from tests.models.tiny_checkpoints import ORIGINAL_CONTEXT, VOCAB_SIZE, dense_variants, make_tiny

from twostroke.backends.cpu import FACTORY
from twostroke.backends.host.batch import Batch
from twostroke.backends.interface import BackendSettings
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.backends.reference.kv_store import KVStore
from twostroke.core.formats import Formats, FormatWish
from twostroke.core.step import PrefillChunk, Step
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

BLOCK_SIZE = 16
TOKENS = [int(token) for token in np.random.default_rng(7).integers(6, VOCAB_SIZE, 53)]
SETTINGS = BackendSettings(max_context=ORIGINAL_CONTEXT, max_tokens_per_step=64, threads=2)
VARIANTS = [*dense_variants(), "ministral3", "lfm2", "smollm3", "olmo2", "olmo3", "exaone4", "hunyuan_dense"]
USUAL = {"ministral3": 5e-4, "smollm3": 6e-4}
"""Of these ones' sharp scores, a key that rounds the other way changes more; the same is seen without growth."""
PIECES = [[53], [5, 16, 1, 23, 8], [20, 11], [1]]


@pytest.fixture
def half_precision_kv(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    write = KVStore.write

    def rounded(store: KVStore, layer: int, slots: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        write(store, layer, slots, *(array.astype(np.float16).astype(np.float32) for array in (keys, values)))

    monkeypatch.setattr(KVStore, "write", rounded)
    yield


def reference_logits(checkpoint: Checkpoint) -> np.ndarray:
    layout = layout_for(checkpoint.spec, len(TOKENS), BLOCK_SIZE)
    backend = REFERENCE.create(checkpoint, layout, SETTINGS)
    try:
        return logits_by_prefill(backend, TOKENS, [len(TOKENS)])
    finally:
        backend.close()


def resolved(checkpoint: Checkpoint, wish: FormatWish, isa_name: str | None = None) -> Formats:
    found = FACTORY.formats(checkpoint, wish, isa_name)
    assert isinstance(found, Formats), found
    return found


def cpu_logits(
    checkpoint: Checkpoint,
    pieces: list[list[int]],
    isa_name: str | None = None,
    threads: int = 2,
    kv: str | None = None,
    weights: str | None = None,
) -> list[np.ndarray]:
    layout = layout_for(checkpoint.spec, len(TOKENS), BLOCK_SIZE)
    backend = FACTORY.create(
        checkpoint,
        layout,
        replace(SETTINGS, threads=threads, formats=resolved(checkpoint, FormatWish(weights, kv=kv), isa_name)),
        isa_name=isa_name,
    )
    try:
        return [logits_by_prefill(backend, TOKENS, sizes) for sizes in pieces]
    finally:
        backend.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_in_every_way(variant: str, tmp_path: Path, half_precision_kv: None) -> None:
    folder, _ = make_tiny(variant, tmp_path)
    checkpoint = load_checkpoint(folder)
    assert FACTORY.supports(checkpoint) is None
    expected = reference_logits(checkpoint)
    whole, *others = cpu_logits(checkpoint, PIECES, kv="f16")
    assert np.abs(whole - expected).max() < 5e-3 * expected.std()
    assert np.sqrt(((whole - expected) ** 2).mean()) < USUAL.get(variant, 2e-4) * expected.std()
    assert all(np.array_equal(other, whole) for other in others), "the pieces a prompt came in changed its logits"
    for kind, limit in (("bf16", 0.02), ("int8", 0.045)):  # of int8 the queries are brought to 8 bits, too
        rounded, *others = cpu_logits(checkpoint, PIECES, kv=kind)
        assert np.sqrt(((rounded - expected) ** 2).mean()) < limit * expected.std()
        assert all(np.array_equal(other, rounded) for other in others)


@pytest.mark.parametrize("kind", ["f16", "int8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_whose_logits_are_wanted_alone_has_the_same_bits(variant: str, kind: str, tmp_path: Path) -> None:
    """The last layer leaves the other rows out: of a prompt of many rows, and of one of a few."""
    folder, _ = make_tiny(variant, tmp_path)
    checkpoint = load_checkpoint(folder)
    layout = layout_for(checkpoint.spec, len(TOKENS), BLOCK_SIZE)
    formats = resolved(checkpoint, FormatWish(kv=kind))
    backend = FACTORY.create(checkpoint, layout, replace(SETTINGS, formats=formats))
    whole = logits_by_prefill(backend, TOKENS, [len(TOKENS)])
    for first in (47, 0):
        driver = Driver(backend, TOKENS)
        if first:
            driver.prefill(first)
        step = Step(1, prefills=(PrefillChunk(0, first, tuple(TOKENS[first:]), samples=True),))
        assert np.array_equal(backend.forward(Batch.from_step(step, backend.rows)), whole[-1:])
        driver.leave()
    backend.close()


@pytest.mark.parametrize("isa_name", instruction_set_names())
@pytest.mark.parametrize("variant", ["llama_tied", "gemma2"])
def test_mixed_weight_kinds_on_each_instruction_set(isa_name: str, variant: str, tmp_path: Path) -> None:
    """Activations are rounded to 8 bits for quantised weights: a few parts in a hundred of the logits' spread."""
    checkpoint = mixed_checkpoint(tmp_path, variant)
    expected = reference_logits(checkpoint)
    whole, *others = cpu_logits(checkpoint, PIECES, isa_name)
    assert np.sqrt(((whole - expected) ** 2).mean()) < 0.06 * expected.std()
    assert all(np.array_equal(other, whole) for other in others)
    (alone,) = cpu_logits(checkpoint, [[53]], isa_name, threads=1)
    assert np.array_equal(alone, whole), "the number of threads changed the logits"
