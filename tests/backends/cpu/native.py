"""Runs single operations of the CPU backend, outside a model: fields in, arrays out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import IntEnum
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from _pytest.mark import ParameterSet

from twostroke.backends.cpu import isa as instruction_sets
from twostroke.backends.cpu.code import code_for
from twostroke.backends.cpu.compile import NativeCode
from twostroke.backends.cpu.shape import KernelShape
from twostroke.backends.cpu.tape import Tape
from twostroke.backends.cpu.threads import ThreadPool
from twostroke.backends.cpu.tile_kinds import TileKind

FLOATS = (TileKind.F32, TileKind.F16, TileKind.BF16)
EVERYWHERE = (TileKind.Q4_1, TileKind.Q4_0, TileKind.Q5_K, TileKind.Q6_K, TileKind.Q8_0, TileKind.IQ4_NL, *FLOATS)
"""Tiles that differ between instruction sets: each of them is compiled for each."""
OFTEN = (TileKind.Q5_0, TileKind.Q3_K, TileKind.Q2_K, TileKind.IQ2_S, TileKind.MXFP4)
"""Tiles that differ from those in how they are laid out: quick tests compile them for the fastest set. The others
differ in their numbers alone."""
SHAPE = KernelShape(
    head_dim=16,
    queries_per_kv_head=2,
    block_size=16,
    activation="gelu_tanh",
    soft_capped=False,
    tile_kinds=(),
)
SCRATCH_BYTES = 1 << 18


def shape_with(kind: TileKind) -> KernelShape:
    """SHAPE with tiles of one kind, which are compiled apart from the rest."""
    return replace(SHAPE, tile_kinds=(kind,))


def tile_cases() -> list[ParameterSet]:
    """(instruction set, kind of tile) of all that there are; those that quick tests leave out are marked slow."""
    fastest, *others = instruction_set_names()
    quick = [(fastest, kind) for kind in EVERYWHERE + OFTEN] + [(name, kind) for name in others for kind in EVERYWHERE]
    every = [(name, kind) for name in (fastest, *others) for kind in TileKind]
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.slow, id=f"{case[0]}-{case[1].name}")
        for case in every
    ]


def instruction_set_names() -> list[str]:
    """Those that this machine can run: the tests restrict themselves to each in turn."""
    import llvmlite.binding as llvm

    found = instruction_sets.available(
        instruction_sets.architecture(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features()
    )
    return [isa.name for isa in found]


native_code = cache(code_for)
"""Loaded once, where a test runs many operations."""


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
