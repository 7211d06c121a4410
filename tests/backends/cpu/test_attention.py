"""Writing KV and attending, both phases at once, in each kind of KV, against a softmax in numpy over queries, keys and
values rounded as the kind rounds them."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from twostroke.backends.cpu.attention_work import AttentionWork, attends_by_rows
from twostroke.backends.cpu.kv_kind import KVKind
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
    kind: KVKind = KVKind.F16

    @property
    def shape(self) -> KernelShape:
        ratio = self.queries_per_kv_head
        return KernelShape(self.head_dim, ratio, self.block_size, "silu", self.capped, (TileKind.F32,), self.kind)

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.queries_per_kv_head


def to_bf16(array: np.ndarray) -> np.ndarray:
    """To nearest even."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).reshape(array.shape)


def as_stored(kind: KVKind, heads: np.ndarray) -> np.ndarray:
    """[tokens, heads, head_dim] K or V as they come back from the store."""
    if kind is KVKind.F16:
        return heads.astype(np.float16).astype(np.float64)
    if kind is KVKind.BF16:
        return to_bf16(heads).astype(np.float64)
    largest = np.abs(heads).max(axis=-1, keepdims=True)
    return np.rint(heads * (np.float32(127) / largest)).astype(np.float64) * (largest * np.float32(1 / 127))


def as_multiplied(case: Case, queries: np.ndarray) -> np.ndarray:
    """Queries as the scores see them, without the score's scale."""
    if case.kind is KVKind.F16:
        return queries.astype(np.float64)
    factor = np.float32(case.head_dim**-0.5)
    factor *= np.float32(1) if case.capped else np.float32(1 / np.log(2))
    return to_bf16(queries.astype(np.float32) * factor).astype(np.float64) / np.float64(factor)


# What is left: f32 sums; and where weights are rounded to 8 bits of mantissa, half of their last one.
LARGEST_ERROR = {KVKind.F16: 2e-6, KVKind.BF16: 4e-3, KVKind.INT8: 8e-3}
USUAL_ERROR = {KVKind.F16: 1e-7, KVKind.BF16: 5e-4, KVKind.INT8: 1.2e-3}


def assert_close(kind: KVKind, ours: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(ours - expected).max() < LARGEST_ERROR[kind]
    assert np.sqrt(((ours - expected) ** 2).mean()) < USUAL_ERROR[kind]


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
            heads = projected.reshape(len(projected), -1, case.head_dim)
            queries, stored = as_multiplied(case, heads), as_stored(case.kind, heads[:, case.num_heads :])
            for position in range(start, start + count):
                first = 0 if case.window is None else max(0, position - case.window + 1)
                for head in range(case.num_heads):
                    kv_head = head // case.queries_per_kv_head
                    keys = stored[first : position + 1, kv_head]
                    values = stored[first : position + 1, case.kv_heads + kv_head]
                    scores = keys @ queries[position, head] * case.head_dim**-0.5
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
            AttentionField.NUM_BLOCKS: StepField.NUM_QUERY_BLOCKS,
            AttentionField.BLOCKS: StepField.QUERY_BLOCKS,
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


each_kind = pytest.mark.parametrize("kind", KVKind, ids=lambda kind: kind.value)


@each_kind
@pytest.mark.parametrize("name", CASES)
def test_both_phases_against_a_softmax(name: str, kind: KVKind) -> None:
    attention = Attention(replace(CASES[name], kind=kind), LENGTHS)
    ours = attention.attend(SEGMENTS, num_decodes=3, threads=2)
    assert_close(kind, ours, attention.expected(SEGMENTS))


@each_kind
@pytest.mark.parametrize("isa_name", instruction_set_names()[1:])
@pytest.mark.parametrize("name", ["three, windowed", "four, capped"])
def test_other_instruction_sets(name: str, isa_name: str, kind: KVKind) -> None:
    attention = Attention(replace(CASES[name], kind=kind), LENGTHS, isa_name)
    ours = attention.attend(SEGMENTS, num_decodes=3)
    assert_close(kind, ours, attention.expected(SEGMENTS))


@each_kind
@pytest.mark.parametrize("name", ["three", "three, window across spans", "four, capped"])
def test_a_query_has_the_same_bits_in_any_company(name: str, kind: KVKind) -> None:
    attention = Attention(replace(CASES[name], kind=kind), [530])
    whole = attention.attend([(0, 530)])
    pieces = [attention.attend([(start, min(23, 530 - start))]) for start in range(0, 530, 23)]
    decodes = [attention.attend([(position, 1)], num_decodes=1) for position in range(500, 530)]
    assert np.array_equal(np.concatenate(pieces), whole)
    assert np.array_equal(np.concatenate(decodes), whole[500:])
    assert np.array_equal(attention.attend([(0, 530)], threads=3), whole)
    assert np.array_equal(attention.attend([(0, 530)], threads=3, split_for=64), whole), "smaller tiles"


@each_kind
@pytest.mark.parametrize("name", ["three", "three, windowed", "three, window across spans", "sixteen, in two groups"])
@pytest.mark.parametrize("threads", [1, 3])
def test_splitting_a_long_context_changes_no_bit(name: str, threads: int, kind: KVKind) -> None:
    lengths = [530, 256, 257, 40]
    attention = Attention(replace(CASES[name], kind=kind), lengths)
    decodes = [(length - 1, 1) for length in lengths]
    whole = attention.attend(decodes, num_decodes=4)
    split = attention.attend(decodes, num_decodes=4, threads=threads, split_for=64)
    assert np.array_equal(split, whole)
    assert_close(kind, split, attention.expected(decodes))


@pytest.mark.parametrize(
    ("segments", "num_decodes", "by_rows"),
    [
        ([(1024, 32)], 0, True),
        ([(32, 32)], 0, True),
        ([(31, 32)], 0, False),  # its last queries read twice what the first do
        ([(0, 32)], 0, False),
        ([(1024, 32), (64, 32)], 0, False),
        ([(1024, 1), (1024, 31)], 1, False),
    ],
)
def test_only_pieces_of_equal_cost_are_dealt_in_runs(
    segments: list[tuple[int, int]], num_decodes: int, by_rows: bool
) -> None:
    assert attends_by_rows(make_batch(segments, num_decodes, np.zeros((len(segments), 80), np.int32))) is by_rows


def test_the_work_list_of_split_decodes() -> None:
    case = CASES["three"]
    batch = make_batch([(530, 1), (255, 1), (256, 1), (0, 5)], 3, np.zeros((4, 40), dtype=np.int32))
    blocks = AttentionWork(case.shape, case.kv_heads, accumulators=24, threads=8).blocks(batch)
    by_token = [blocks[blocks[:, QueryBlockField.TOKEN] == token] for token in range(3)]
    assert [list(part[:, QueryBlockField.SPAN]) for part in by_token] == [[0, 1, 2], [0], [0, 1]]
    assert [int(part[0, QueryBlockField.NUM_SPANS]) for part in by_token] == [3, 0, 2]
    results = blocks[blocks[:, QueryBlockField.NUM_SPANS] > 0]
    assert len({int(row[QueryBlockField.FIRST_RESULT] + row[QueryBlockField.SPAN]) for row in results}) == 5
    assert list(blocks[6:, QueryBlockField.COUNT]) == [2, 2, 1], "few queries are spread over threads"
    long = make_batch([(0, 500)], 0, np.zeros((1, 40), dtype=np.int32))
    tiles = AttentionWork(case.shape, case.kv_heads, accumulators=24, threads=2).blocks(long)
    assert set(tiles[:-1, QueryBlockField.COUNT]) == {32}
    assert tiles[:, QueryBlockField.COUNT].sum() == 500
    busy = AttentionWork(case.shape, case.kv_heads, accumulators=24, threads=2).blocks(batch)
    assert not busy[:, QueryBlockField.NUM_SPANS].any(), "nine pieces are enough for two threads"


def test_the_work_list_of_the_rows_whose_logits_are_wanted() -> None:
    case = CASES["three"]
    batch = make_batch([(530, 1), (0, 40), (7, 5), (0, 9)], 1, np.zeros((4, 40), dtype=np.int32))
    rows = np.array([0, 40, *range(41, 46)], dtype=np.int32)  # the decode, a chunk's last token, all of a chunk, none
    work = AttentionWork(case.shape, case.kv_heads, accumulators=24, threads=2)
    blocks = work.logit_blocks(replace(batch, logit_rows=rows))
    fields = [QueryBlockField.TOKEN, QueryBlockField.COUNT, QueryBlockField.POSITION, QueryBlockField.SEGMENT]
    assert blocks[:4][:, fields].tolist() == [[0, 1, 530, 0]] * 3 + [[40, 1, 39, 1]]
    assert blocks[:4, QueryBlockField.NUM_SPANS].tolist() == [3, 3, 3, 0]
    assert set(blocks[4:, QueryBlockField.SEGMENT]) == {2}
    assert blocks[4:, QueryBlockField.COUNT].sum() == 5
    assert blocks[4, QueryBlockField.POSITION] == 7
    assert work.logit_blocks(batch).shape == (0, len(QueryBlockField))


def written(attention: Attention, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Views of a block's K and V as [kv_heads, 16 tokens, head_dim] of raw elements, for blocks of 16 tokens."""
    case, memory = attention.case, attention.store.places[0].memory[block]
    element = np.uint8 if case.kind is KVKind.INT8 else np.uint16
    size = 16 * case.head_dim
    parts = memory[:, : 2 * size * np.dtype(element).itemsize].view(element).reshape(case.kv_heads, 2, size)
    if case.kind is KVKind.F16:
        keys = parts[:, 0].reshape(-1, case.head_dim, 16).swapaxes(1, 2)
        return keys, parts[:, 1].reshape(-1, 16, case.head_dim)
    keys = parts[:, 0].reshape(-1, case.head_dim // 2, 16, 2).transpose(0, 2, 1, 3)  # [.., 16, dims / 2, 2]
    values = parts[:, 1].reshape(-1, 8, case.head_dim, 2).swapaxes(2, 3)  # [.., 8, 2, dims]
    return keys, values


@each_kind
def test_what_lies_under_the_mask_does_not_matter(kind: KVKind) -> None:
    """Blocks hold other sequences' leftovers, at worst the largest numbers that the kind has."""
    case = replace(CASES["three"], kind=kind)
    attention = Attention(case, [22])
    before = attention.attend([(0, 22)])
    largest = {KVKind.F16: (0x7BFF, 0xFBFF), KVKind.BF16: (0x7F7F, 0xFF7F), KVKind.INT8: (127, 129)}[kind]
    block = int(attention.tables[0, 1])
    keys, values = written(attention, block)
    keys[:, 6:] = largest[0]
    hidden = values[:, 6:] if kind is KVKind.F16 else values[:, 3:]
    hidden[:] = largest[1]
    if kind is KVKind.INT8:
        scales = attention.store.places[0].memory[block, :, case.shape.scales_offset :].view(np.float32)
        scales.reshape(-1, 2, 16)[:, :, 6:] = 65504 / 127
    assert np.array_equal(attention.attend([(0, 22)]), before)


@each_kind
def test_stored_values_saturate_and_nan_is_not_stored(kind: KVKind) -> None:
    attention = Attention(replace(CASES["two"], kind=kind), [4])
    attention.projected[0][:] = [[3.4e38], [-np.inf], [np.nan], [1.0]]
    attention._run([(0, 4)], 0, "rope_and_store", 1)
    memory = attention.store.places[0].memory
    if kind is KVKind.F16:
        assert np.isfinite(memory.view(np.float16)).all()
        assert memory.view(np.float16).max() == 65504
    elif kind is KVKind.BF16:
        stored = (memory.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        assert np.isfinite(stored).all()
        assert stored.max() == np.float32(float.fromhex("0x1.fep127"))
    else:
        scales = memory[:, :, attention.case.shape.scales_offset :].view(np.float32)
        assert np.isfinite(scales).all()
        assert scales.reshape(-1, 2, 16)[:, :, :2].max() == np.float32(65504) * np.float32(1 / 127)


@each_kind
def test_a_query_that_is_not_finite_is_noticed(kind: KVKind) -> None:
    attention = Attention(replace(CASES["three"], kind=kind), [40])
    attention.projected[0][33, 5] = np.nan  # the first head of one token
    ours = attention.attend([(0, 40)])
    assert np.isnan(ours[33, 0]).all()
    assert np.isfinite(np.delete(ours, 33, axis=0)).all()


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


@pytest.mark.parametrize("isa_name", instruction_set_names())
def test_bf16_rounds_to_nearest_even(isa_name: str) -> None:
    attention = Attention(Case(16, 1, kv_heads=1, kind=KVKind.BF16), [48], isa_name)
    rng = np.random.default_rng(3)
    inputs = attention.projected[0]
    inputs[:] = np.ldexp(rng.uniform(-1, 1, inputs.shape), rng.integers(-60, 60, inputs.shape))
    inputs[0, 32:36] = [1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0, 2.0**-126]  # ties, zero, the smallest normal number
    attention._run([(0, 48)], 0, "rope_and_store", 1)
    for index, block in enumerate(attention.tables[0]):
        expected = to_bf16(inputs[16 * index : 16 * index + 16]).view(np.uint32) >> 16
        keys, values = written(attention, int(block))
        assert np.array_equal(keys.reshape(16, 16), expected[:, 16:32])
        assert np.array_equal(values.reshape(16, 16), expected[:, 32:])


def test_a_block_that_was_never_granted_is_refused() -> None:
    attention = Attention(CASES["three, windowed"], [100])
    attention.tables[0, 1] = -1
    attention.attend([(90, 3)])  # it lies behind the window
    with pytest.raises(IndexError, match="never granted"):
        attention.attend([(60, 3)])
