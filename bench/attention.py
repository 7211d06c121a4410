"""Attention alone, both phases, through the same tape that a model runs: SmolLM2-135M's heads over random K and V.
Prints the fastest and the median of several runs, and the share of what this machine allows: of multiply-adds in
prefill, of bytes read in decode. On a machine that others use, the fastest run is the one to compare.

    PYTHONPATH=src python bench/attention.py [--kinds f16,bf16,int8] [--threads 2] [--repeats 9]"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from enum import IntEnum
from statistics import median

import numpy as np

from twostroke.backends.cpu import isa as instruction_sets
from twostroke.backends.cpu.arguments import AttentionField, KVGroupField, RopeField, StepField, float_bits
from twostroke.backends.cpu.attention_work import AttentionWork
from twostroke.backends.cpu.ceilings import machine_rates
from twostroke.backends.cpu.code import code_for
from twostroke.backends.cpu.isa import InstructionSet
from twostroke.backends.cpu.kv_kind import KVKind, fastest
from twostroke.backends.cpu.kv_store import KVStore
from twostroke.backends.cpu.memory import address_of, float_zeros
from twostroke.backends.cpu.program import NO_WINDOW
from twostroke.backends.cpu.rotation import RotationTable
from twostroke.backends.cpu.shape import KernelShape
from twostroke.backends.cpu.tape import Tape
from twostroke.backends.cpu.threads import ThreadPool
from twostroke.backends.cpu.tile_kinds import TileKind
from twostroke.backends.host.batch import Batch
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.models.rope_spec import RopeSpec

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 9, 3, 64, 30
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Workload:
    name: str
    sequences: int
    start: int
    """Positions already in KV."""
    tokens: int
    """Of each sequence, in this step; 1 is a decode."""

    @property
    def multiply_adds(self) -> float:
        """Of one layer."""
        reads = sum(range(self.start + 1, self.start + self.tokens + 1))
        return 2.0 * self.sequences * reads * HEADS * HEAD_DIM


WORKLOADS = (
    Workload("prefill 512 at 0", 1, 0, 512),
    Workload("prefill 512 at 1792", 1, 1792, 512),
    Workload("prefill 512 at 3584", 1, 3584, 512),
    Workload("decode at 512", 1, 511, 1),
    Workload("decode at 4096", 1, 4095, 1),
    Workload("decode 16 x 512", 16, 511, 1),
)


class Bench:
    def __init__(self, kind: str, isa: InstructionSet, threads: int, layers: int, workload: Workload) -> None:
        self.workload, self.layers, self.threads = workload, layers, threads
        self.shape = shape_for(kind, isa)
        self.code = code_for(self.shape, isa)
        context = workload.start + workload.tokens
        blocks = -(-context // BLOCK_SIZE)
        tables = np.random.default_rng(0).permutation(blocks * workload.sequences).astype(np.int32)
        self.tables = tables.reshape(workload.sequences, blocks)
        layout = KVLayout(BLOCK_SIZE, (KVGroup(tuple(range(layers)), None, len(tables)),))
        self.store = KVStore(layout, KV_HEADS, self.shape)
        self.width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.work = AttentionWork(self.shape, KV_HEADS, isa.accumulators, threads)
        self.pool = ThreadPool(self.code, threads, self.shape.scratch_bytes(isa.accumulators, HEAD_DIM))
        self.rotation = RotationTable(RopeSpec(theta=10000.0, dim=HEAD_DIM), context)
        self.rotation.reach(context - 1)
        self.score_scale = HEAD_DIM**-0.5
        self.output = float_zeros(0)
        """What the last run of attention left: [tokens, heads * head_dim]"""

    def run(self, start: int, tokens: int, operations: tuple[str, ...], repeats: int) -> list[float]:
        """Seconds of one layer, each repeat."""
        sequences = self.workload.sequences
        positions = np.tile(np.arange(start, start + tokens, dtype=np.int32), sequences)
        firsts = np.arange(sequences, dtype=np.int32) * tokens
        counts, starts = np.full(sequences, tokens, np.int32), np.full(sequences, start, np.int32)
        none = np.zeros(0, dtype=np.int32)
        decodes = sequences if tokens == 1 else 0
        batch = Batch(np.zeros_like(positions), positions, decodes, firsts, counts, starts, (self.tables,), none)
        inputs = float_zeros(batch.num_tokens, self.width)
        inputs[:] = self.random_inputs(start, batch.num_tokens)
        output = self.output = float_zeros(batch.num_tokens, HEADS * HEAD_DIM)
        blocks = np.ascontiguousarray(self.work.blocks(batch))
        (slots,) = self.store.slots(batch)
        group = int(StepField.KV_GROUPS)
        step = np.zeros(group + 16, dtype=np.int64)
        for field, value in {
            StepField.NUM_TOKENS: batch.num_tokens,
            StepField.NUM_QUERY_BLOCKS: len(blocks),
            StepField.POSITIONS: address_of(positions),
            StepField.QUERY_BLOCKS: address_of(blocks),
            StepField.SPAN_RESULTS: address_of(self.work.room.results),
            StepField.SPAN_COUNTS: address_of(self.work.room.counts),
            group + KVGroupField.SLOTS: address_of(slots),
            group + KVGroupField.TABLES: address_of(self.tables),
            group + KVGroupField.TABLE_STRIDE: self.tables.shape[1],
        }.items():
            step[field] = value
        tape = Tape(self.code)
        for layer in range(self.layers):
            for operation in operations:
                tape.add(operation, self._fields(operation, layer, inputs, output))
        entries, seconds = tape.entries(), []
        for _ in range(repeats):
            # One thread's own CPU time does not count the time that others had the core.
            clock = time.thread_time if self.threads == 1 else time.perf_counter
            started_s = clock()
            self.pool.run(entries, step)
            seconds.append((clock() - started_s) / self.layers)
        return seconds

    def random_inputs(self, start: int, num_tokens: int) -> np.ndarray:
        """[num_tokens, width] of queries, keys and values, before they are rotated: the same for the same `start`."""
        return np.random.default_rng(start).standard_normal((num_tokens, self.width))

    def _fields(self, operation: str, layer: int, inputs: np.ndarray, output: np.ndarray) -> dict[IntEnum, int]:
        memory, group = address_of(self.store.places[layer].memory), int(StepField.KV_GROUPS)
        if operation == "attention":
            return {
                AttentionField.QUERIES: address_of(inputs),
                AttentionField.STRIDE: self.width,
                AttentionField.NUM_KV_HEADS: KV_HEADS,
                AttentionField.STORE: memory,
                AttentionField.GROUP: group,
                AttentionField.WINDOW: NO_WINDOW,
                AttentionField.SCALE: float_bits(self.score_scale),
                AttentionField.CAP: float_bits(1.0),
                AttentionField.OUTPUT: address_of(output),
                AttentionField.OUTPUT_STRIDE: HEADS * HEAD_DIM,
                AttentionField.NUM_BLOCKS: StepField.NUM_QUERY_BLOCKS,
                AttentionField.BLOCKS: StepField.QUERY_BLOCKS,
            }
        return {
            RopeField.INPUT: address_of(inputs),
            RopeField.STRIDE: self.width,
            RopeField.NUM_HEADS: HEADS,
            RopeField.NUM_KV_HEADS: KV_HEADS,
            RopeField.K_OFFSET: HEADS * HEAD_DIM,
            RopeField.V_OFFSET: (HEADS + KV_HEADS) * HEAD_DIM,
            RopeField.COSINES: address_of(self.rotation.cosines),
            RopeField.SINES: address_of(self.rotation.sines),
            RopeField.HALF: self.rotation.half,
            RopeField.STORE: memory,
            RopeField.ROWS: StepField.NUM_TOKENS,
            RopeField.POSITIONS: StepField.POSITIONS,
            RopeField.GROUP: group,
        }

    @property
    def kv_bytes(self) -> int:
        """Of one layer, all sequences."""
        return int(self.store.places[0].memory.nbytes)


def shape_for(kind: str, isa: InstructionSet) -> KernelShape:
    return KernelShape(
        HEAD_DIM,
        HEADS // KV_HEADS,
        BLOCK_SIZE,
        "silu",
        False,
        (TileKind.F32,),
        fastest(isa) if kind == "auto" else KVKind(kind),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default="f16,bf16,int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    isa = instruction_sets.choose()
    rates = machine_rates(isa, options.threads)
    print(
        f"{isa.name}, threads: {options.threads}; measured ceilings: f32 {rates.float_multiply_adds_per_s / 1e9:.0f} "
        f"Gmac/s, read {rates.read_bytes_per_s / 1e9:.1f} GB/s. Times are of {LAYERS} layers."
    )
    for kind in options.kinds.split(","):
        for workload in WORKLOADS:
            decode = workload.tokens == 1
            bench = Bench(kind, isa, options.threads, LAYERS if decode else 2, workload)
            if workload.start:
                bench.run(0, workload.start, ("rope_and_store",), 1)
            store_s = min(bench.run(workload.start, workload.tokens, ("rope_and_store",), options.repeats))
            seconds = bench.run(workload.start, workload.tokens, ("attention",), options.repeats)
            best_s = min(seconds)
            line = (
                f"{kind:5} {workload.name:20} min {best_s * LAYERS * 1e3:8.2f} median "
                f"{median(seconds) * LAYERS * 1e3:8.2f} ms"
            )
            if decode:
                rate = bench.kv_bytes / best_s
                line += f"  {rate / 1e9:6.1f} GB/s = {rate / rates.read_bytes_per_s:4.0%} of reading"
            else:
                rate = workload.multiply_adds / best_s
                pairs = isa.has_bf16_dot and kind != "f16"
                ceiling = rates.float_multiply_adds_per_s * (2 if pairs else 1)  # a dot of pairs takes as long
                share = f"{rate / ceiling:4.0%} of {'bf16 dots' if pairs else 'f32'}"
                line += f"  {rate / 1e9:6.1f} Gmac/s = {share}"
            print(f"{line}; rope and store {store_s * LAYERS * 1e3:6.2f} ms")
            bench.pool.close()


if __name__ == "__main__":
    main()
