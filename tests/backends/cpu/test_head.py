"""A head in native code against the same in numpy, slot by slot: hidden states joined, slots filled, a chain of steps.
Native code holds its matrices in 8 bits and slots in 16, and has a key of zeros in slot 0: so has numpy here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models.heads.published import HIDDEN_SIZE, VOCAB_SIZE, PublishedHead
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cpu import isa
from twostroke.backends.cpu.arguments import TapeField, Wait
from twostroke.backends.cpu.head import HeadNetwork, HeadProgram, native_head
from twostroke.backends.cpu.model import ModelSettings, Workers
from twostroke.backends.cpu.thread_count import OthersOnCores, ThreadCount
from twostroke.backends.cpu.threads import ThreadPool
from twostroke.backends.host.eagle3 import Eagle3Network
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.engine.companions import plan_head
from twostroke.models.heads.eagle3 import load_eagle3
from twostroke.models.loading import load_checkpoint

BLOCK_SIZE, NUM_BLOCKS, COUNT, STREAMS = 16, 12, 40, 3


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("kind", "flags"),
    [("llama", {"norm_before_residual": True}), ("llama", {"norm_before_fc": True}), ("qwen3", {"fc_norm": True})],
)
def test_native_code_computes_what_numpy_does(tmp_path: Path, kind: str, flags: dict[str, bool], threads: int) -> None:
    from twostroke.backends.cpu import FACTORY

    torch.manual_seed(4)
    rng = np.random.default_rng(5)
    folder, _ = make_tiny("llama", tmp_path / "target", num_hidden_layers=4)
    target = load_checkpoint(folder)
    published = PublishedHead(kind, embedding=True, **flags)
    head = load_eagle3(published.save(tmp_path / "head"), target.spec)
    companion = plan_head(head, 1, FACTORY).companion
    layout = KVLayout(BLOCK_SIZE, (KVGroup((0,), None, NUM_BLOCKS, model=1),))
    settings = ModelSettings(isa.choose(), 256, 64, threads)
    with ThreadPoolExecutor(1) as launcher:
        model = native_head(companion, target, layout, "f16", settings, launcher)
    assert model is not None
    pool = ThreadPool(model.code, threads, model.scratch_bytes)
    model.workers = Workers(pool, ThreadCount(threads, OthersOnCores()))
    native = HeadNetwork(model)
    twin = Eagle3Network(
        head,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_context=256,
        embed=lambda ids: np.zeros((len(ids), HIDDEN_SIZE), np.float32),
        output=lambda: np.zeros(0, np.float32),
    )
    try:
        taps = rng.standard_normal((COUNT, 3 * HIDDEN_SIZE)).astype(np.float32)
        joined = twin.join(taps)
        _assert_close(native.join(taps), joined)
        many = np.tile(taps, (12, 1))  # so many rows that each stays with its thread: the last one is waited for, too
        for _ in range(10):
            _assert_close(native.join(many)[-COUNT:], joined)
        program = model._program
        assert isinstance(program, HeadProgram)
        for entries in (program.join_entries, program.write_entries, program.entries):
            assert entries[-1, TapeField.WAIT] == Wait.ALWAYS
        tables = rng.permutation(NUM_BLOCKS).astype(np.int32).reshape(STREAMS, -1)
        positions = np.arange(COUNT, dtype=np.int32)
        for table in tables:
            tokens = rng.integers(0, VOCAB_SIZE, COUNT).astype(np.int32)
            rows = np.repeat(table[None], COUNT, axis=0)
            native.write(tokens, joined, positions, rows)
            twin.write(tokens[1:], joined[1:], positions[1:], rows[1:])
        place, state = np.full(STREAMS, COUNT, np.int32), joined[:STREAMS]
        nothing = np.zeros(STREAMS, np.int32)
        for _ in range(3):
            tokens = rng.integers(0, VOCAB_SIZE, STREAMS).astype(np.int32)
            expected, scores = twin.step(tokens, state, place, tables, nothing)
            found, native_scores = native.step(tokens, state, place, tables, nothing)
            _assert_close(found, expected)
            _assert_close(native_scores, scores)
            state, place = expected, place + 1
        alone = native.step(tokens[:1], state[:1], place[:1] - 1, tables[:1], nothing[:1])[1].copy()
        both = native.step(tokens, state, place - 1, tables, nothing)[1]
        assert np.array_equal(alone[0], both[0])  # whoever else is drafted for
    finally:
        pool.close()


def _assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    """Within what 8 bits leave of numbers of this size."""
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 0.05 * np.abs(expected).max()
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.999


def test_a_head_with_biases_is_left_to_numpy(tmp_path: Path) -> None:
    """A key of zeros in slot 0 could not be made from zeros."""
    from twostroke.backends.cpu import FACTORY

    torch.manual_seed(4)
    folder, _ = make_tiny("llama", tmp_path / "target", num_hidden_layers=4)
    target = load_checkpoint(folder)
    published = PublishedHead()
    attention = published.midlayer.self_attn
    for name in "qkvo":
        linear = getattr(attention, f"{name}_proj")
        linear.bias = torch.nn.Parameter(torch.zeros(linear.weight.shape[0]))
    head = load_eagle3(published.save(tmp_path / "head", attention_bias=True), target.spec)
    layout = KVLayout(BLOCK_SIZE, (KVGroup((0,), None, NUM_BLOCKS, model=1),))
    settings = ModelSettings(isa.choose(), 256, 64, 1)
    with ThreadPoolExecutor(1) as launcher:
        assert native_head(plan_head(head, 1, FACTORY).companion, target, layout, "f16", settings, launcher) is None
