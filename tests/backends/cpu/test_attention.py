"""Writing KV and attending, both phases at once, against a softmax in numpy over keys and values rounded to f16."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import pytest
from tests.backends.cpu.native import code_for, instruction_set_names, run

from twostroke.backends.cpu import isa as instruction_sets
from twostroke.backends.cpu.arguments import (
    AttentionField,
    KVGroupField,
    QueryBlockField,
    RopeField,
    StepField,
    TileKind,
    float_bits,
)
from twostroke.backends.cpu.attention_work import AttentionWork
from twostroke.backends.cpu.kv_store import KVStore
from twostroke.backends.cpu.memory import address_of, float_zeros
from twostroke.backends.cpu.program import NO_WINDOW
from twostroke.backends.cpu.shape import KernelShape
from twostroke.backends.host.batch import Batch
from twostroke.core.kv_layout import KVGroup, KVLayout

CAP = 2.0


@dataclass(frozen=True)
class Case:
    head_dim: int
    queries_per_kv_head: int
    kv_heads: int = 2
    window: int | None = None
    capped: bool = False
    block_size: int = 16

    @property
    def shape(self) -> KernelShape:
        ratio = self.queries_per_kv_head
        return KernelShape(self.head_dim, ratio, self.block_size, "silu", self.capped, (TileKind.F32,))

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.queries_per_kv_head


def make_batch(segments: list[tuple[int, int]], num_decodes: int, tables: np.ndarray) -> Batch:
    """segments: (first position, tokens) each."""
    starts, counts = (np.array(column, dtype=np.int32) for column in zip(*segments, strict=True))
    firsts = (np.cumsum(counts) - counts).astype(np.int32)
    positions = np.concatenate([np.arange(start, start + count) for start, count in segments]).astype(np.int32)
    none = np.zeros(0, dtype=np.int32)
    return Batch(np.zeros_like(positions), positions, num_decodes, firsts, counts, starts, (tables,), none)


class Attention:
    """Sequences of random q, k and v in scattered blocks; attends over any part of them."""

    def __init__(self, case: Case, lengths: list[int], isa_name: str | None = None) -> None:
        self.case, self.lengths = case, lengths
        self.isa = instruction_sets.choose(isa_name)
        rng = np.random.default_rng(1)
        self.width = (case.num_heads + 2 * case.kv_heads) * case.head_dim
        self.projected = [rng.standard_normal((length, self.width)).astype(np.float32) for length in lengths]
        blocks_each = -(-max(lengths) // case.block_size)
        order = rng.permutation(blocks_each * len(lengths)).astype(np.int32)
        self.tables = order.reshape(len(lengths), blocks_each)
        layout = KVLayout(case.block_size, (KVGroup((0,), case.window, len(order)),))
        self.store = KVStore(layout, case.kv_heads, case.shape)
        self.store.places[0].memory[:] = rng.integers(0, 120, self.store.places[0].memory.shape)  # stale, but finite
        self._run([(0, length) for length in lengths], 0, "rope_and_store", 1)

    def attend(
        self, segments: list[tuple[int, int]], num_decodes: int = 0, threads: int = 1, split_for: int = 0
    ) -> np.ndarray:
        """[tokens, heads, head_dim] of a part of each sequence: (first position, tokens)."""
        return self._run(segments, num_decodes, "attention", threads, split_for)

    def expected(self, segments: list[tuple[int, int]]) -> np.ndarray:
        case, parts = self.case, []
        for projected, (start, count) in zip(self.projected, segments, strict=True):
            heads = projected.reshape(len(projected), -1, case.head_dim).astype(np.float64)
            stored = heads[:, case.num_heads :].astype(np.float16).astype(np.float64)
            for position in range(start, start + count):
                first = 0 if case.window is None else max(0, position - case.window + 1)
                for head in range(case.num_heads):
                    kv_head = head // case.queries_per_kv_head
                    keys = stored[first : position + 1, kv_head]
                    values = stored[first : position + 1, case.kv_heads + kv_head]
                    scores = keys @ heads[position, head] * case.head_dim**-0.5
                    scores = CAP * np.tanh(scores / CAP) if case.capped else scores
                    weights = np.exp(scores - scores.max())
                    parts.append(weights @ values / weights.sum())
        return np.array(parts).reshape(-1, case.num_heads, case.head_dim)

    def _run(
        self, segments: list[tuple[int, int]], num_decodes: int, operation: str, threads: int, split_for: int = 0
    ) -> np.ndarray:
        """`split_for`: a number of threads for which the work is split, whatever number runs it."""
        case = self.case
        batch = make_batch(segments, num_decodes, self.tables)
        rows = [p[start : start + count] for p, (start, count) in zip(self.projected, segments, strict=True)]
        inputs = float_zeros(batch.num_tokens, self.width)
        inputs[:] = np.concatenate(rows)
        output = float_zeros(batch.num_tokens, case.num_heads * case.head_dim)
        work = AttentionWork(case.shape, case.kv_heads, self.isa.accumulators, split_for or 1)
        blocks = work.blocks(batch)
        (slots,) = self.store.slots(batch)
        group = int(StepField.KV_GROUPS)
        step = {
            StepField.NUM_TOKENS: batch.num_tokens,
            StepField.NUM_QUERY_BLOCKS: len(blocks),
            StepField.POSITIONS: address_of(batch.positions),
            StepField.QUERY_BLOCKS: address_of(blocks),
            StepField.SPAN_RESULTS: address_of(work.span_results),
            StepField.SPAN_COUNTS: address_of(work.span_counts),
            group + KVGroupField.SLOTS: address_of(slots),
            group + KVGroupField.TABLES: address_of(self.tables),
            group + KVGroupField.TABLE_STRIDE: self.tables.shape[1],
        }
        memory = address_of(self.store.places[0].memory)
        queries = case.num_heads * case.head_dim
        rope: dict[IntEnum, int] = {
            RopeField.INPUT: address_of(inputs),
            RopeField.STRIDE: self.width,
            RopeField.NUM_HEADS: case.num_heads,
            RopeField.NUM_KV_HEADS: case.kv_heads,
            RopeField.K_OFFSET: queries,
            RopeField.V_OFFSET: queries + case.kv_heads * case.head_dim,
            RopeField.STORE: memory,
            RopeField.GROUP: group,
        }
        attention: dict[IntEnum, int] = {
            AttentionField.QUERIES: address_of(inputs),
            AttentionField.STRIDE: self.width,
            AttentionField.NUM_KV_HEADS: case.kv_heads,
            AttentionField.STORE: memory,
            AttentionField.GROUP: group,
            AttentionField.WINDOW: case.window or NO_WINDOW,
            AttentionField.SCALE: float_bits(case.head_dim**-0.5),
            AttentionField.CAP: float_bits(CAP),
            AttentionField.OUTPUT: address_of(output),
            AttentionField.OUTPUT_STRIDE: queries,
        }
        fields = rope if operation == "rope_and_store" else attention
        run(code_for(self.isa, case.shape), [(operation, fields)], step, threads)
        return output.reshape(batch.num_tokens, case.num_heads, case.head_dim)


CASES = {
    "one query a head": Case(64, 1),
    "two": Case(16, 2, window=5),
    "three": Case(64, 3, kv_heads=3),
    "three, windowed": Case(64, 3, window=40),
    "three, window across spans": Case(64, 3, window=270, block_size=32),
    "four, capped": Case(32, 4, window=17, capped=True),
    "five, odd head": Case(80, 5, kv_heads=1),
    "six": Case(32, 6, window=100),
    "seven": Case(16, 7, kv_heads=1),
    "eight": Case(128, 8, kv_heads=1, capped=True),
    "sixteen, in two groups": Case(32, 16, kv_heads=1),
}
LENGTHS = [1, 17, 300, 257, 48, 530]
SEGMENTS = [(0, 1), (16, 1), (299, 1), (240, 17), (0, 48), (509, 21)]


@pytest.mark.parametrize("name", CASES)
def test_both_phases_against_a_softmax(name: str) -> None:
    attention = Attention(CASES[name], LENGTHS)
    ours = attention.attend(SEGMENTS, num_decodes=3, threads=2)
    assert np.abs(ours - attention.expected(SEGMENTS)).max() < 2e-6


@pytest.mark.parametrize("isa_name", instruction_set_names()[1:])
@pytest.mark.parametrize("name", ["three, windowed", "four, capped"])
def test_other_instruction_sets(name: str, isa_name: str) -> None:
    attention = Attention(CASES[name], LENGTHS, isa_name)
    ours = attention.attend(SEGMENTS, num_decodes=3)
    assert np.abs(ours - attention.expected(SEGMENTS)).max() < 2e-6


@pytest.mark.parametrize("name", ["three", "three, window across spans", "four, capped"])
def test_a_query_has_the_same_bits_in_any_company(name: str) -> None:
    attention = Attention(CASES[name], [530])
    whole = attention.attend([(0, 530)])
    pieces = [attention.attend([(start, min(23, 530 - start))]) for start in range(0, 530, 23)]
    decodes = [attention.attend([(position, 1)], num_decodes=1) for position in range(500, 530)]
    assert np.array_equal(np.concatenate(pieces), whole)
    assert np.array_equal(np.concatenate(decodes), whole[500:])
    assert np.array_equal(attention.attend([(0, 530)], threads=3), whole)


@pytest.mark.parametrize("name", ["three", "three, windowed", "three, window across spans", "sixteen, in two groups"])
@pytest.mark.parametrize("threads", [1, 3])
def test_splitting_a_long_context_changes_no_bit(name: str, threads: int) -> None:
    lengths = [530, 256, 257, 40]
    attention = Attention(CASES[name], lengths)
    decodes = [(length - 1, 1) for length in lengths]
    whole = attention.attend(decodes, num_decodes=4)
    split = attention.attend(decodes, num_decodes=4, threads=threads, split_for=64)
    assert np.array_equal(split, whole)
    assert np.abs(split - attention.expected(decodes)).max() < 2e-6


def test_the_work_list_of_split_decodes() -> None:
    case = CASES["three"]
    batch = make_batch([(530, 1), (255, 1), (256, 1), (0, 5)], 3, np.zeros((4, 40), dtype=np.int32))
    blocks = AttentionWork(case.shape, case.kv_heads, accumulators=24, threads=8).blocks(batch)
    by_token = [blocks[blocks[:, QueryBlockField.TOKEN] == token] for token in range(3)]
    assert [list(part[:, QueryBlockField.SPAN]) for part in by_token] == [[0, 1, 2], [0], [0, 1]]
    assert [int(part[0, QueryBlockField.NUM_SPANS]) for part in by_token] == [3, 0, 2]
    results = blocks[blocks[:, QueryBlockField.NUM_SPANS] > 0]
    assert len({int(row[QueryBlockField.FIRST_RESULT] + row[QueryBlockField.SPAN]) for row in results}) == 5
    assert list(blocks[6:, QueryBlockField.COUNT]) == [2, 2, 1]
    busy = AttentionWork(case.shape, case.kv_heads, accumulators=24, threads=2).blocks(batch)
    assert not busy[:, QueryBlockField.NUM_SPANS].any(), "nine pieces are enough for two threads"


def test_what_lies_under_the_mask_does_not_matter() -> None:
    """Blocks hold other sequences' leftovers, at worst the largest numbers that f16 has."""
    attention = Attention(CASES["three"], [21])
    before = attention.attend([(0, 21)])
    memory = attention.store.places[0].memory
    case = CASES["three"]
    second = memory[attention.tables[0, 1]].view(np.float16).reshape(case.kv_heads, 2, -1)
    second[:, 0].reshape(case.kv_heads, case.head_dim, 16)[:, :, 5:] = 65504  # K is transposed
    second[:, 1].reshape(case.kv_heads, 16, case.head_dim)[:, 5:] = -65504
    assert np.array_equal(attention.attend([(0, 21)]), before)


def test_stored_values_saturate_and_nan_is_not_stored() -> None:
    attention = Attention(CASES["two"], [4])
    attention.projected[0][:] = [[1e30], [-np.inf], [np.nan], [1.0]]
    attention._run([(0, 4)], 0, "rope_and_store", 1)
    stored = attention.store.places[0].memory.view(np.float16)
    assert np.isfinite(stored).all()
    assert stored.max() == 65504


@pytest.mark.parametrize("isa_name", instruction_set_names())
def test_f16_rounds_to_nearest_even(isa_name: str) -> None:
    """Through the store and back: ties, subnormals, the edges of the range, and many random numbers."""
    case = Case(16, 1, kv_heads=1)
    attention = Attention(case, [48], isa_name)
    rng = np.random.default_rng(3)
    random = np.ldexp(rng.uniform(-1, 1, (48, 48)), rng.integers(-26, 16, (48, 48)))
    special = [2049.0, 2051.0, 2.0**-14, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 65503.9, -65504, 6.0e-5, 0.0, -0.0]
    attention.projected[0][:] = random
    attention.projected[0][0, 32 : 32 + len(special)] = special
    attention._run([(0, 48)], 0, "rope_and_store", 1)
    stored = attention.store.places[0].memory.view(np.float16)[attention.tables[0], 0]  # [blocks, K then V]
    values = stored[:, 16 * 16 :].reshape(48, 16)
    keys = stored[:, : 16 * 16].reshape(3, 16, 16).transpose(0, 2, 1).reshape(48, 16)
    assert np.array_equal(values.view(np.uint16), attention.projected[0][:, 32:].astype(np.float16).view(np.uint16))
    assert np.array_equal(keys.view(np.uint16), attention.projected[0][:, 16:32].astype(np.float16).view(np.uint16))


def test_a_block_that_was_never_granted_is_refused() -> None:
    attention = Attention(CASES["three, windowed"], [100])
    attention.tables[0, 1] = -1
    attention.attend([(90, 3)])  # it lies behind the window
    with pytest.raises(IndexError, match="never granted"):
        attention.attend([(60, 3)])
