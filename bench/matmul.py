"""Matrix products alone: SmolLM2-135M's four shapes in Q4_1 over random weights and activations, or other shapes and
kinds, for several numbers of rows. Prints the fastest of many runs: on a machine that others use, that is the one to
compare. A matrix that is larger than the caches shows what memory allows.

    PYTHONPATH=src python -m bench.matmul [--rows 1,16,32,256] [--seconds 1.0] [--peaks 0.0] [--threads 1]
        [--kind q4_1] [--products 2048x65536,...]"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from tests.backends.cpu.random_weights import random_tensor

from twostroke.backends.cpu import isa as instruction_sets
from twostroke.backends.cpu.arguments import MOST_LACKING_ROWS, GatedField, MatmulField, NormField, StepField
from twostroke.backends.cpu.code import code_for
from twostroke.backends.cpu.compile import NativeCode
from twostroke.backends.cpu.kernels.matmul import gated_name, matmul_name
from twostroke.backends.cpu.memory import Arena, address_of, float_zeros
from twostroke.backends.cpu.operand import Operand
from twostroke.backends.cpu.packing import PackedMatrix, pack, packed_bytes, tile_kind
from twostroke.backends.cpu.shape import KernelShape
from twostroke.backends.cpu.tape import Tape
from twostroke.backends.cpu.threads import ThreadPool
from twostroke.models.weights.tensor import WeightKind, WeightTensor

SHAPE = KernelShape(
    head_dim=64, queries_per_kv_head=3, block_size=16, activation="silu", soft_capped=False, tile_kinds=()
)


@dataclass(frozen=True)
class Product:
    depth: int
    outputs: int
    gated: bool = False

    @property
    def label(self) -> str:
        return f"{self.depth} to {self.outputs}{' gated' if self.gated else ''}"


DRAWN_OUTPUTS = 256
"""Rows of a matrix that are drawn; below them they come again."""
PRODUCTS = (Product(576, 960), Product(576, 576), Product(576, 3072, gated=True), Product(1536, 576))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,32,256")
    parser.add_argument("--kind", default="q4_1", help="of GGUF, that weights are stored as")
    parser.add_argument("--products", help="DEPTHxOUTPUTS, several with commas between them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each shape")
    parser.add_argument("--peaks", type=float, default=0.0, help="share of groups with a value that stands out")
    options = parser.parse_args()
    isa = instruction_sets.choose(None)
    kind = WeightKind[options.kind.upper()]
    products = PRODUCTS if options.products is None else tuple(map(product_of, options.products.split(",")))
    code = code_for(replace(SHAPE, tile_kinds=(tile_kind(kind),)), isa)
    threads = "one thread" if options.threads == 1 else f"{options.threads} threads"
    print(f"{isa.name}, {threads}, {kind.name}, Gmac/s, {options.peaks:.0%} of groups with a peak")
    print(f"{'rows':>5}" + "".join(f"{product.label:>20}" for product in products))
    matrices = [random_matrix(kind, product) for product in products]
    for rows in (int(count) for count in options.rows.split(",")):
        rates = [
            rate(code, product, matrix, rows, options.peaks, options.seconds, options.threads)
            for product, matrix in zip(products, matrices, strict=True)
        ]
        print(f"{rows:5}" + "".join(f"{1e-9 * found:20.1f}" for found in rates), flush=True)


def product_of(text: str) -> Product:
    depth, outputs = text.split("x")
    return Product(int(depth), int(outputs))


def rate(
    code: NativeCode, product: Product, matrix: PackedMatrix, rows: int, peaks: float, seconds: float, threads: int
) -> float:
    """Multiply-adds a second; the call from Python, some microseconds, counts too."""
    operand, target = Operand(rows, product.depth), Operand(rows, product.outputs // 2)
    inputs = random_inputs(rows, product.depth, peaks)
    output = float_zeros(rows + MOST_LACKING_ROWS, product.outputs)
    read = operand.fields(floats=False, quantised=True, halves=matrix.kind.layout.scale_sets == 2)
    prepare: dict[IntEnum, int] = {
        NormField.INPUT: address_of(inputs),
        NormField.WIDTH: product.depth,
        NormField.ROWS: StepField.NUM_TOKENS,
    }
    if product.gated:
        name = gated_name(matrix.kind)
        fields: dict[IntEnum, int] = {
            GatedField.WEIGHTS: address_of(matrix.data),
            GatedField.UP_BYTES: matrix.data[: matrix.num_tiles // 2].nbytes,
            GatedField.DEPTH: product.depth,
            GatedField.NUM_TILES: matrix.num_tiles // 2,
            GatedField.ROWS: StepField.NUM_TOKENS,
        }
        fields |= target.target_fields(floats=False, quantised=True)
    else:
        name = matmul_name(matrix.kind)
        fields = {
            MatmulField.WEIGHTS: address_of(matrix.data),
            MatmulField.DEPTH: product.depth,
            MatmulField.NUM_TILES: matrix.num_tiles,
            MatmulField.ROWS: StepField.NUM_TOKENS,
            MatmulField.OUTPUT: address_of(output),
            MatmulField.OUTPUT_STRIDE: product.outputs,
        }
    preparing, multiplying = Tape(code), Tape(code)
    preparing.add("prepare", prepare | read)
    multiplying.add(name, fields | read)
    return rows * product.depth * product.outputs / fastest_s(code, preparing, multiplying, rows, seconds, threads)


def fastest_s(code: NativeCode, preparing: Tape, multiplying: Tape, rows: int, seconds: float, threads: int) -> float:
    step = np.zeros(64, dtype=np.int64)
    step[StepField.NUM_TOKENS] = rows
    entries, best_s = multiplying.entries(), float("inf")
    pool = ThreadPool(code, threads, 1 << 20)
    try:
        pool.run(preparing.entries(), step)
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            started_s = time.perf_counter()
            pool.run(entries, step)
            best_s = min(best_s, time.perf_counter() - started_s)
    finally:
        pool.close()
    return best_s


def random_matrix(kind: WeightKind, product: Product) -> PackedMatrix:
    parts = 2 if product.gated else 1
    outputs, tensors = product.outputs // parts, []
    for index in range(parts):
        drawn = random_tensor(kind, min(outputs, DRAWN_OUTPUTS), product.depth, seed=index)
        data = np.resize(drawn.data, (outputs, drawn.data.shape[1]))
        tensors.append(WeightTensor(f"part {index}", kind, (outputs, product.depth), data))
    return pack(tensors, Arena(packed_bytes(tile_kind(kind), product.outputs, product.depth)))


def random_inputs(rows: int, depth: int, peaks: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    inputs = float_zeros(rows, depth)
    inputs[:] = rng.standard_normal((rows, depth))
    groups = inputs.reshape(rows, -1, 32)
    groups[..., 7] = np.where(rng.random(groups.shape[:2]) < peaks, 30.0, groups[..., 7])
    return inputs


if __name__ == "__main__":
    main()
