"""A draft's logits have the bits that its token's would have without it: for every number of drafts, in every kind of
weights and KV, across spans and windows, alone and beside a prompt that is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.backends.driver import Driver, layout_for
from tests.cores import all_cores
from tests.speculation.tiny import BLOCK_SIZE, VOCAB_SIZE, Sizes, make_backend, make_checkpoint
from twostroke.backends.host.batch import Batch
from twostroke.backends.host.host_backend import MAX_DRAFTS, HostBackend
from twostroke.core.request import Request
from twostroke.core.step import BlockGrant, PrefillChunk, RowJoin, Step
from twostroke.models.weights.tensor import WeightKind

CONTEXTS = (0, 1, 15, 40, 239, 255, 290)
"""Positions of the slot's own token: drafts cross a block, the window, and a span of attention on the CPU."""
NUM_TOKENS = CONTEXTS[-1] + 1 + MAX_DRAFTS
TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, VOCAB_SIZE, NUM_TOKENS)]
CASES = [
    ("cpu", "llama", WeightKind.F32, "f16"),
    ("cpu", "window", WeightKind.Q8_0, "bf16"),
    ("cpu", "llama", WeightKind.Q4_1, "int8"),
    *(
        pytest.param("cpu", shape, kind, kv, marks=pytest.mark.slow)  # each compiles for seconds where it is new
        for shape in ("llama", "window")
        for kind in (WeightKind.F32, WeightKind.BF16, WeightKind.F16, WeightKind.Q8_0, WeightKind.Q4_0, WeightKind.Q4_1)
        for kv in ("f16", "bf16", "int8")
    ),
    ("reference", "llama", WeightKind.F32, None),
    ("reference", "window", WeightKind.Q8_0, None),
    ("reference", "moe", WeightKind.F32, None),
]


@pytest.fixture(autouse=True)
def _threads_side_by_side() -> Iterator[None]:
    with all_cores():
        yield


def open_neighbour(backend: HostBackend) -> PrefillChunk:
    """A prompt in blocks that the first row does not use."""
    grants = []
    for index, (group, table) in enumerate(zip(backend.layout.groups, backend.rows[0].tables, strict=True)):
        free = sorted(set(range(group.num_blocks)) - set(table.tolist()))
        grants.append(BlockGrant(1, index, 0, tuple(free[:2])))
    prompt = tuple(TOKENS[-23:])
    backend.rows.update(Step(0, joins=(RowJoin(1, Request("1", prompt)),), grants=tuple(grants)))
    return PrefillChunk(1, 0, prompt, samples=True)


class Rewinding(Driver):
    """Goes back to a position, with the blocks that the scheduler would leave it there."""

    def __init__(self, backend: HostBackend, token_ids: list[int]) -> None:
        super().__init__(backend, token_ids)
        self._granted = [table.copy() for table in backend.rows[0].tables]

    def rewind(self, position: int) -> None:
        for table, granted in zip(self.backend.rows[0].tables, self._granted, strict=True):
            table[:] = granted
        self.position = position
        self._take_blocks_behind_windows()


def drafted(driver: Rewinding, position: int, num_drafts: int, prefills: tuple[PrefillChunk, ...] = ()) -> np.ndarray:
    """The logits of a slot at this position and of drafts behind it  # [1 + num_drafts, vocab]"""
    driver.rewind(position)
    slot = driver.slot()
    drafts = {driver.seq_id: tuple(driver.token_ids[position + 1 : position + 1 + num_drafts])}
    rows = driver.backend.rows
    logits = driver.backend.forward(Batch.from_step(Step(1, prefills, (slot,)), rows, drafts))
    return logits[: 1 + num_drafts]


def check_every_number(backend: HostBackend, num_drafts: range) -> None:
    driver = Rewinding(backend, TOKENS)
    neighbour = open_neighbour(backend)
    for position in CONTEXTS:
        driver.rewind(0)
        if position:
            driver.prefill(position)
        plain = np.concatenate([driver.decode() for _ in range(1 + MAX_DRAFTS)])
        for count in num_drafts:
            assert np.array_equal(drafted(driver, position, count), plain[: 1 + count]), (position, count)
        for count in (1, 7, MAX_DRAFTS):
            assert np.array_equal(drafted(driver, position, count, (neighbour,)), plain[: 1 + count]), "beside a prompt"


@pytest.mark.parametrize(("name", "shape", "kind", "kv"), CASES)
def test_every_number_of_drafts(name: str, shape: str, kind: WeightKind, kv: str | None, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, shape, kind)
    layout = layout_for(checkpoint.spec, NUM_TOKENS, BLOCK_SIZE, num_sequences=2)
    # Of two threads, a few queries are split into spans, and many are not.
    for threads in (1, 2) if name == "cpu" else (1,):
        sizes = Sizes(max_context=NUM_TOKENS, step_tokens=NUM_TOKENS, threads=threads)
        backend = make_backend(name, checkpoint, sizes, kv, layout)
        check_every_number(backend, range(MAX_DRAFTS + 1))
        backend.close()
