"""Runs single operations of the CPU backend, outside a model: fields in, arrays out."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu import isa as instruction_sets
from twostroke.backends.cpu.arguments import TileKind
from twostroke.backends.cpu.compile import NativeCode, load_or_compile
from twostroke.backends.cpu.isa import InstructionSet
from twostroke.backends.cpu.program import Tape
from twostroke.backends.cpu.shape import KernelShape
from twostroke.backends.cpu.threads import ThreadPool

SHAPE = KernelShape(
    head_dim=16,
    queries_per_kv_head=2,
    block_size=16,
    activation="gelu_tanh",
    soft_capped=False,
    tile_kinds=tuple(TileKind),
)
SCRATCH_BYTES = 1 << 18


def instruction_set_names() -> list[str]:
    """Those that this machine can run: the tests restrict themselves to each in turn."""
    import llvmlite.binding as llvm

    found = instruction_sets.available(
        instruction_sets.architecture(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features()
    )
    return [isa.name for isa in found]


def code_for(isa: InstructionSet, shape: KernelShape = SHAPE) -> NativeCode:
    def module_text() -> str:
        from twostroke.backends.cpu.kernels.build import module_text

        return module_text(shape, isa)

    return load_or_compile(shape.key, isa, module_text)


def run(
    code: NativeCode,
    operations: list[tuple[str, Mapping[IntEnum, int]]],
    step: Mapping[int, int],
    threads: int = 1,
) -> None:
    tape = Tape(code)
    for name, fields in operations:
        tape.add(name, fields)
    record: npt.NDArray[np.int64] = np.zeros(max(step) + 8, dtype=np.int64)
    for field, value in step.items():
        record[field] = value
    pool = ThreadPool(code, threads, SCRATCH_BYTES)
    try:
        pool.run(tape.entries(), record)
    finally:
        pool.close()
