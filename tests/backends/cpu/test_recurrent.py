"""Models some of whose layers keep a state: the CPU backend's logits against the reference's, in every way that a
sequence may be cut, and with drafts of which some hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.backends.cpu.test_families import PIECES, SETTINGS, TOKENS, cpu_logits, reference_logits, resolved
from tests.backends.driver import Driver, layout_for
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cpu import FACTORY
from twostroke.backends.cpu.state_store import FIRST_ASIDE
from twostroke.backends.host.batch import Batch
from twostroke.core.formats import FormatWish
from twostroke.core.step import DecodeSlot, PrefillChunk, Step
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

VARIANTS = (
    *("lfm2", "lfm2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_next_mixed"),
    *("granite_hybrid", "granite_hybrid_dense", "nemotron_h", "nemotron_h_latent"),
)
TURNED = {"qwen3_next_mixed": 1}
"""Rows with two experts so close that KV in bf16 sends them to the other one."""


@pytest.fixture(scope="module", params=VARIANTS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder, _ = make_tiny(request.param, tmp_path_factory.mktemp(request.param))
    return load_checkpoint(folder)


@pytest.fixture
def num_turned(request: pytest.FixtureRequest) -> int:
    return TURNED.get(request.node.callspec.params["hybrid"], 0)


def test_every_kind_in_every_way(hybrid: Checkpoint, num_turned: int) -> None:
    assert FACTORY.supports(hybrid) is None
    expected = reference_logits(hybrid)
    for kind, limit in (("f16", 3e-3), ("bf16", 0.03)):
        whole, *others = cpu_logits(hybrid, PIECES, kv=kind)
        of_rows = np.sort(((whole - expected) ** 2).mean(axis=-1))
        of_rows = of_rows[: len(of_rows) - (num_turned if kind == "bf16" else 0)]
        assert np.sqrt(of_rows.mean()) < limit * expected.std()
        assert all(np.array_equal(other, whole) for other in others), "the pieces a prompt came in changed its logits"
    (alone,) = cpu_logits(hybrid, [[53]], threads=1)
    assert np.array_equal(alone, cpu_logits(hybrid, [[53]])[0]), "the number of threads changed the logits"


def test_weights_in_8_bits(hybrid: Checkpoint) -> None:
    """Of most rows: where a router's choice is close, rounding sends a token to another expert."""
    expected = reference_logits(hybrid)
    whole, *others = cpu_logits(hybrid, PIECES, weights="q8_0")
    difference = np.sqrt(((whole - expected) ** 2).mean(axis=-1))
    assert np.median(difference) < (0.08 if hybrid.spec.moe is None else 0.12) * expected.std()
    assert all(np.array_equal(other, whole) for other in others)


@pytest.mark.parametrize("num_held", [0, 1, 3])
def test_drafts_change_a_state_as_far_as_they_hold(hybrid: Checkpoint, num_held: int) -> None:
    """Three drafts behind a token, of which some hold; then the sequence goes on as if they had come one by one."""
    first = 20
    backend = FACTORY.create(
        hybrid,
        layout_for(hybrid.spec, len(TOKENS), 16),
        replace(SETTINGS, formats=resolved(hybrid, FormatWish(kv="f16"))),
    )
    try:
        driver = Driver(backend, TOKENS)
        driver.prefill(first)
        plain = [driver.decode()[0] for _ in range(8)]
        driver.leave()
        driver = Driver(backend, TOKENS)
        driver.prefill(first)
        slot = driver.slot()
        right = TOKENS[first + 1 : first + 1 + num_held]
        drafts = (*right, *(token ^ 1 for token in TOKENS[first + 1 + num_held : first + 4]))
        found = backend.forward(Batch.from_step(Step(1, decodes=(slot,)), backend.rows, {0: drafts}))
        states = backend.model.kv.states
        for group in states.groups:
            states.commit(group, int(backend.rows[0].tables[group][0]), num_held)
        assert all(np.array_equal(found[place], plain[place]) for place in range(num_held + 1))
        driver.position = first + 1 + num_held
        for place in range(num_held + 1, 8):
            assert np.array_equal(driver.decode()[0], plain[place])
    finally:
        backend.close()


def test_sequences_beside_each_other_keep_their_own_states(hybrid: Checkpoint) -> None:
    backend = FACTORY.create(hybrid, layout_for(hybrid.spec, len(TOKENS), 16, num_sequences=2), SETTINGS)
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
        slot: DecodeSlot = first.slot()
        together = backend.forward(Batch.from_step(Step(1, decodes=(slot,), prefills=(chunk,)), backend.rows))
        assert np.array_equal(together[0], alone[0][31]) and np.array_equal(together[1:], alone[1][:30])
        second.position = 30
        assert np.array_equal(second.decode()[0], alone[1][30])
    finally:
        backend.close()


ENDS = (
    ["linear_attention", "full_attention", "mlp"],
    ["full_attention", "linear_attention", "moe"],
    ["mlp", "full_attention"],
)
"""Of layers of one block each: where the other rows are left out."""


@pytest.mark.parametrize("kinds", ENDS)
def test_a_row_whose_logits_are_wanted_alone_has_the_same_bits(kinds: list[str], tmp_path: Path) -> None:
    """Behind the last layer that mixes rows, or within it, the others are left out."""
    folder, _ = make_tiny("nemotron_h", tmp_path, layers_block_type=kinds)
    checkpoint = load_checkpoint(folder)
    backend = FACTORY.create(checkpoint, layout_for(checkpoint.spec, len(TOKENS), 16), SETTINGS)
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


def test_room_for_states_behind_drafts_grows(hybrid: Checkpoint) -> None:
    """More drafts than any step had before: the tapes are made anew, and sequences go on as they were."""
    backend = FACTORY.create(hybrid, layout_for(hybrid.spec, len(TOKENS), 16), SETTINGS)
    try:
        driver = Driver(backend, TOKENS)
        driver.prefill(20)
        plain = [driver.decode()[0] for _ in range(30)]
        driver.leave()
        driver = Driver(backend, TOKENS)
        driver.prefill(20)
        step = Step(1, decodes=(driver.slot(),))
        found = backend.forward(Batch.from_step(step, backend.rows, {0: tuple(TOKENS[21:50])}))
        assert len(found) > FIRST_ASIDE and all(
            np.array_equal(one, other) for one, other in zip(found, plain, strict=True)
        )
    finally:
        backend.close()
