"""Gemma 4, whose layers differ from each other: heads of two sizes, values that are made of keys, KV that layers share,
vectors for each layer, experts beside an MLP. The CPU backend's logits against the reference's, in every way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.backends.cpu.test_families import PIECES, SETTINGS, TOKENS, cpu_logits, half_precision_kv, reference_logits
from tests.backends.driver import Driver, layout_for
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny

from twostroke.backends.cpu import FACTORY
from twostroke.backends.host.batch import Batch
from twostroke.backends.interface import BackendSettings
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.formats import Formats, FormatWish
from twostroke.core.step import PrefillChunk, Step
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

VARIANTS = ("gemma4", "gemma4_large", "gemma4_moe", "gemma4_unified")

__all__ = ("half_precision_kv",)


@pytest.fixture(scope="module", params=VARIANTS)
def gemma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder, _ = make_tiny(request.param, tmp_path_factory.mktemp(request.param))
    return load_checkpoint(folder)


def by_rows(found: np.ndarray, expected: np.ndarray) -> float:
    """Of most rows, beside the logits' spread: where a router's choice is close, rounding sends a token to another
    expert."""
    return float(np.median(np.sqrt(((found - expected) ** 2).mean(axis=-1))) / expected.std())


def test_every_kind_in_every_way(gemma: Checkpoint, half_precision_kv: None) -> None:
    assert FACTORY.supports(gemma) is None
    expected = reference_logits(gemma)
    for kind, limit in (("f16", 3e-4), ("bf16", 0.02), ("int8", 0.06)):
        whole, *others = cpu_logits(gemma, PIECES, kv=kind)
        assert by_rows(whole, expected) < limit
        assert kind != "f16" or np.abs(whole - expected).max() < 5e-3 * expected.std()
        assert all(np.array_equal(other, whole) for other in others), "the pieces a prompt came in changed its logits"
    (alone,) = cpu_logits(gemma, [[53]], threads=1)
    assert np.array_equal(alone, cpu_logits(gemma, [[53]])[0]), "the number of threads changed the logits"


def test_weights_in_8_bits(gemma: Checkpoint) -> None:
    expected = reference_logits(gemma)
    whole, *others = cpu_logits(gemma, PIECES, weights="q8_0")
    assert by_rows(whole, expected) < 0.12
    assert all(np.array_equal(other, whole) for other in others)


def test_a_row_whose_logits_are_wanted_alone_has_the_same_bits(gemma: Checkpoint) -> None:
    """The last layer leaves the other rows out, and their vectors."""
    backend = FACTORY.create(gemma, layout_for(gemma.spec, len(TOKENS), 16), SETTINGS)
    try:
        driver = Driver(backend, TOKENS)
        whole = driver.prefill(len(TOKENS))
        driver.leave()
        for first in (47, 0):
            driver = Driver(backend, TOKENS)
            if first:
                driver.prefill(first)
            step = Step(1, prefills=(PrefillChunk(0, first, tuple(TOKENS[first:]), samples=True),))
            assert np.array_equal(backend.forward(Batch.from_step(step, backend.rows)), whole[-1:])
            driver.leave()
    finally:
        backend.close()


def test_sequences_beside_each_other(gemma: Checkpoint) -> None:
    """A decode of one and a chunk of another in one step: each as by itself."""
    backend = FACTORY.create(gemma, layout_for(gemma.spec, len(TOKENS), 16, num_sequences=2), SETTINGS)
    try:
        others = [TOKENS, TOKENS[::-1]]
        alone = []
        for number, tokens in enumerate(others):
            driver = Driver(backend, tokens, number, range(5 * number, 5 * number + 5))
            alone.append(np.concatenate([driver.prefill(30), driver.decode(), driver.decode()]))
            driver.leave()
        first, second = (
            Driver(backend, tokens, number, range(5 * number, 5 * number + 5)) for number, tokens in enumerate(others)
        )
        first.prefill(31)
        chunk = PrefillChunk(1, 0, tuple(others[1][:30]), False, 0)
        step = Step(1, decodes=(first.slot(),), prefills=(chunk,))
        together = backend.forward(Batch.from_step(step, backend.rows))
        assert np.array_equal(together[0], alone[0][31]) and np.array_equal(together[1:], alone[1][:30])
        second.position = 30
        assert np.array_equal(second.decode()[0], alone[1][30])
    finally:
        backend.close()


@pytest.mark.slow  # their code is compiled
def test_heads_as_large_as_published(tmp_path: Path, half_precision_kv: None) -> None:
    """256 and 512: spans of a long query are split between threads, in pieces that both sizes take."""
    sizes = {"head_dim": 256, "global_head_dim": 512, "max_position_embeddings": 1024, "num_hidden_layers": 3}
    layers = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_kv_shared_layers": 1}
    checkpoint = load_checkpoint(make_tiny("gemma4", tmp_path, **sizes, **layers)[0])
    tokens = [int(token) for token in np.random.default_rng(3).integers(6, VOCAB_SIZE, 600)]
    found = []
    for factory in (FACTORY, REFERENCE):
        formats = factory.formats(checkpoint, FormatWish(kv="f16" if factory is FACTORY else None))
        assert isinstance(formats, Formats), formats
        settings = BackendSettings(max_context=1024, max_tokens_per_step=600, threads=2, formats=formats)
        backend = factory.create(checkpoint, layout_for(checkpoint.spec, len(tokens), 16), settings)
        driver = Driver(backend, tokens)
        found.append(np.concatenate([driver.prefill(590), *(driver.decode() for _ in range(10))]))
        backend.close()
    # Scores of such heads are sharp: a key that rounds the other way is seen.
    assert by_rows(found[0], found[1]) < 5e-4 and np.abs(found[0] - found[1]).max() < 0.03 * found[1].std()
