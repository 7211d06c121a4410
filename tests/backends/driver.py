"""Drives a host backend's forward pass directly, without an engine: one sequence in scattered blocks, computed in the
pieces a test asks for. Blocks that fall behind a sliding window are taken away as the scheduler would."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.batch import Batch
from twostroke.backends.host.host_backend import HostBackend
from twostroke.backends.host.rows import NO_BLOCK
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.step import BlockGrant, DecodeSlot, PrefillChunk, RowJoin, Step
from twostroke.models.spec import ModelSpec

Logits = npt.NDArray[np.float32]


def layout_for(spec: ModelSpec, num_tokens: int, block_size: int, num_sequences: int = 1) -> KVLayout:
    blocks = (-(-num_tokens // block_size) + 1) * num_sequences
    groups = (
        KVGroup(
            group.layers,
            group.window,
            2 * num_sequences if group.content == "state" else blocks,
            group.content,
            group.values,
        )
        for group in spec.kv_groups()
    )
    return KVLayout(block_size, tuple(groups))


class Driver:
    """One sequence on a backend."""

    def __init__(self, backend: HostBackend, token_ids: list[int], seq_id: int = 0, among: range | None = None) -> None:
        """`among`: the blocks it may have, of each group of tokens; None: all of them."""
        self.backend, self.token_ids, self.seq_id = backend, token_ids, seq_id
        self.position = 0
        layout = backend.layout
        grants = []
        for index, group in enumerate(layout.groups):
            may = range(2 * seq_id, 2 * seq_id + 2) if group.is_state else among or range(group.num_blocks)
            ids = random.Random(seq_id + index).sample(may, layout.entries_for(group, len(token_ids)))
            grants.append(BlockGrant(seq_id, index, 0, tuple(ids)))
        join = RowJoin(seq_id, Request(str(seq_id), tuple(token_ids)))
        backend.rows.update(Step(0, joins=(join,), grants=tuple(grants)))

    def prefill(self, count: int) -> Logits:
        """The next tokens as one chunk  # [count, vocab]"""
        chunk = tuple(self.token_ids[self.position : self.position + count])
        return self._run(Step(1, prefills=(PrefillChunk(self.seq_id, self.position, chunk, False, 0),)), count)

    def decode(self) -> Logits:
        """The next token as a decode slot  # [1, vocab]"""
        return self._run(Step(1, decodes=(self.slot(),)), 1)

    def slot(self) -> DecodeSlot:
        """For the next token, as if its row had sampled it."""
        row = self.backend.rows[self.seq_id]
        row.last_token, row.length = self.token_ids[self.position], self.position + 1
        return DecodeSlot(self.seq_id, self.position)

    def share(self, other: Driver, num_blocks: int) -> None:
        """Begin behind what another sequence has computed of the same tokens: on a prefix hit. A state is shared as a
        copy of what it is now."""
        rows, layout = self.backend.rows, self.backend.layout
        both = zip(rows[self.seq_id].tables, rows[other.seq_id].tables, strict=True)
        for index, (own, theirs) in enumerate(both):
            if layout.groups[index].is_state:
                self.backend.block_store.states.copy(index, int(theirs[0]), int(own[0]))
            else:
                own[:num_blocks] = theirs[:num_blocks]
        self.position = num_blocks * self.backend.layout.block_size

    def leave(self) -> None:
        self.backend.rows.update(Step(2, leaves=(self.seq_id,)))

    def _run(self, step: Step, count: int) -> Logits:
        self._take_blocks_behind_windows()
        logits = self.backend.forward(Batch.from_step(step, self.backend.rows))
        self.position += count
        return logits

    def _take_blocks_behind_windows(self) -> None:
        layout = self.backend.layout
        for group, table in zip(layout.groups, self.backend.rows[self.seq_id].tables, strict=True):
            if group.window is not None:
                oldest = max(0, self.position - group.window + 1)  # the next query reads nothing before it
                table[: oldest // layout.block_size] = NO_BLOCK


def logits_on_a_prefix_hit(backend: HostBackend, token_ids: list[int], num_blocks: int) -> Logits:
    """Those behind so many blocks that another sequence has computed; of the rest, half is a chunk."""
    half = backend.layout.groups[0].num_blocks // 2
    first = Driver(backend, token_ids, 0, range(half))
    second = Driver(backend, token_ids, 1, range(half, 2 * half))
    first.prefill(num_blocks * backend.layout.block_size)
    second.share(first, num_blocks)
    parts = [second.prefill((len(token_ids) - second.position) // 2)]
    while second.position < len(token_ids):
        parts.append(second.decode())
    first.leave()
    second.leave()
    return np.concatenate(parts)


def logits_by_prefill(backend: HostBackend, token_ids: list[int], chunk_sizes: list[int]) -> Logits:
    """All logits, computed in chunks of these sizes; whatever is left goes token by token as decodes."""
    driver = Driver(backend, token_ids)
    parts = [driver.prefill(size) for size in chunk_sizes]
    while driver.position < len(token_ids):
        parts.append(driver.decode())
    driver.leave()
    return np.concatenate(parts)
