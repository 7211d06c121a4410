"""Sequences of random queries, keys and values in scattered blocks, for tests of attention and of what is stored:
native code beside numpy, over numbers rounded as each kind of KV rounds them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import pytest
from tests.backends.cpu.native import native_code, run

from twostroke.backends.cpu import isa as instruction_sets
from twostroke.backends.cpu.arguments import AttentionField, KVGroupField, RopeField, StepField, float_bits
from twostroke.backends.cpu.attention_work import AttentionWork
from twostroke.backends.cpu.kv_kind import KVKind
from twostroke.backends.cpu.kv_store import KVStore
from twostroke.backends.cpu.memory import address_of, float_zeros
from twostroke.backends.cpu.program import NO_WINDOW
from twostroke.backends.cpu.shape import KernelShape
from twostroke.backends.cpu.tile_kinds import TileKind
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
    has_sinks: bool = False

    @property
    def shape(self) -> KernelShape:
        ratio, kinds = self.queries_per_kv_head, (TileKind.F32,)
        return KernelShape(self.head_dim, ratio, self.block_size, "silu", self.capped, kinds, self.kind, self.has_sinks)

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.queries_per_kv_head


def to_bf16(array: np.ndarray) -> np.ndarray:
    """To nearest even."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).reshape(array.shape)


def as_stored(kind: KVKind, heads: np.ndarray, part: str) -> np.ndarray:
    """[tokens, heads, head_dim] K or V as they come back from the store."""
    if kind is KVKind.F16:
        return heads.astype(np.float16).astype(np.float64)
    if kind is KVKind.BF16:
        return to_bf16(heads).astype(np.float64)
    scales = (key_scales if part == "K" else value_scales)(heads)
    return np.rint(heads * (1 / scales).astype(np.float32)) * scales


def key_scales(heads: np.ndarray) -> np.ndarray:
    """[tokens, heads, 1]: the largest magnitude over 127, rounded up to bf16."""
    scales = np.abs(heads).max(axis=-1, keepdims=True) * np.float32(1 / 127)
    rounded = (scales.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)


def value_scales(heads: np.ndarray) -> np.ndarray:
    """The same as powers of 2^(1 / 512), 1 to 2% larger."""
    mantissas, exponents = np.frexp(np.abs(heads).max(axis=-1, keepdims=True) * np.float32(1 / 127))
    part = 2 * mantissas - 1
    log = (exponents.astype(np.float32) - 1 + part) + (part * (1 - part) * np.float32(0.3444) + np.float32(0.012))
    return 2 ** (np.trunc(log * 512).astype(np.float64) / 512)


def as_multiplied(case: Case, queries: np.ndarray) -> np.ndarray:
    """Queries as the scores see them, without the score's scale."""
    if case.kind is KVKind.F16:
        return queries.astype(np.float64)
    factor = np.float32(case.head_dim**-0.5)
    factor *= np.float32(1) if case.capped else np.float32(1 / np.log(2))
    if case.kind is KVKind.INT8:
        scaled = queries.astype(np.float32) * factor
        largest = np.abs(scaled).max(axis=-1, keepdims=True)
        units = np.float64(largest) * np.float32(1 / 127) / np.float64(factor)
        return np.rint(scaled * (np.float32(127) / largest)) * units
    return to_bf16(queries.astype(np.float32) * factor).astype(np.float64) / np.float64(factor)


# What is left: f32 sums; where weights are rounded to 8 bits of mantissa, half of their last one; and of int8 the short
# series for weights: 1.3e-4 at most and 2e-5 usually, measured over all cases.
LARGEST_ERROR = {KVKind.F16: 2e-6, KVKind.BF16: 4e-3, KVKind.INT8: 3e-4}
USUAL_ERROR = {KVKind.F16: 1e-7, KVKind.BF16: 5e-4, KVKind.INT8: 4e-5}


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
        self.sinks = float_zeros(case.num_heads + 16)
        self.sinks[: case.num_heads] = 2 * rng.standard_normal(case.num_heads)
        self.sinks[:2] = 500.0, -500.0  # one that takes all, and one that takes nothing
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
            queries = as_multiplied(case, heads)
            all_keys, all_values = (
                as_stored(case.kind, heads[:, first : first + case.kv_heads], part)
                for part, first in (("K", case.num_heads), ("V", case.num_heads + case.kv_heads))
            )
            for position in range(start, start + count):
                first = 0 if case.window is None else max(0, position - case.window + 1)
                for head in range(case.num_heads):
                    kv_head = head // case.queries_per_kv_head
                    keys, values = (x[first : position + 1, kv_head] for x in (all_keys, all_values))
                    scores = keys @ queries[position, head] * case.head_dim**-0.5
                    scores = CAP * np.tanh(scores / CAP) if case.capped else scores
                    beside = float(self.sinks[head]) if case.has_sinks else -np.inf
                    highest = max(scores.max(), beside)
                    weights = np.exp(scores - highest)
                    parts.append(weights @ values / (weights.sum() + np.exp(beside - highest)))
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
            StepField.SPAN_RESULTS: address_of(work.room.results),
            StepField.SPAN_COUNTS: address_of(work.room.counts),
            group + KVGroupField.SLOTS: address_of(slots),
            group + KVGroupField.TABLES: address_of(self.tables),
            group + KVGroupField.TABLE_STRIDE: self.tables.shape[1],
        }
        memory = address_of(self.store.places[0].memory)
        queries = case.num_heads * case.head_dim
        sinks = self.sinks / np.float32(np.log(2))
        rope: dict[IntEnum, int] = {
            RopeField.INPUT: address_of(inputs),
            RopeField.STRIDE: self.width,
            RopeField.NUM_HEADS: case.num_heads,
            RopeField.NUM_KV_HEADS: case.kv_heads,
            RopeField.K_OFFSET: queries,
            RopeField.V_OFFSET: queries + case.kv_heads * case.head_dim,
            RopeField.STORE: memory,
            RopeField.GROUP: group,
            RopeField.ROWS: StepField.NUM_TOKENS,
            RopeField.POSITIONS: StepField.POSITIONS,
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
            AttentionField.SINKS: address_of(sinks),
        }
        fields = rope if operation == "rope_and_store" else attention
        run(native_code(case.shape, self.isa), [(operation, fields)], step, threads)
        return output.reshape(batch.num_tokens, case.num_heads, case.head_dim)


def written(attention: Attention, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Views of a block's K and V as [kv_heads, 16 tokens, head_dim] of raw elements, for blocks of 16 tokens."""
    case, memory = attention.case, attention.store.places[0].memory[block]
    element = np.uint8 if case.kind is KVKind.INT8 else np.uint16
    size = 16 * case.head_dim
    parts = memory[:, : 2 * size * np.dtype(element).itemsize].view(element).reshape(case.kv_heads, 2, size)
    if case.kind is KVKind.F16:
        keys = parts[:, 0].reshape(-1, case.head_dim, 16).swapaxes(1, 2)
        return keys, parts[:, 1].reshape(-1, 16, case.head_dim)
    group = 4 if case.kind is KVKind.INT8 else 2
    keys = parts[:, 0].reshape(-1, case.head_dim // group, 16, group).transpose(0, 2, 1, 3)  # [.., 16, groups, group]
    values = parts[:, 1].reshape(-1, 8, case.head_dim, 2).swapaxes(2, 3)  # [.., 8, 2, dims]
    return keys, values


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
    "eight, with sinks": Case(64, 8, window=270, has_sinks=True),
}

each_kind = pytest.mark.parametrize("kind", KVKind, ids=lambda kind: kind.value)
