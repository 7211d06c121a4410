"""Reading memory and doing next to nothing with it: each program adds up a stretch of its own. Only measures: no kernel
that reads weights or KV can be faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from twostroke.backends.cuda.compile_ahead import launcher
from twostroke.backends.cuda.kernels.target import target_of

WIDTH: Final = 32
"""Numbers in a row: 128 bytes, the widest that the bulk copy engine moves as one, so a block of rows has no gaps."""
ROW_BYTES: Final = WIDTH * 4


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """Programs of each multiprocessor (SM), each reading a block of rows after another."""

    rows: int
    programs_per_sm: int
    """As many run at a time as fit; the rest take the places of those that end first, which evens SMs out."""
    num_stages: int
    """Blocks under way, with the one that is being added; 1: straight into registers, past shared memory."""
    bulk: bool  # by the bulk copy engine: only where the device has one
    num_warps: int = 4

    def __str__(self) -> str:
        way = "bulk copies" if self.bulk else "loads"
        return f"{way}, {self.num_stages} x {self.rows * ROW_BYTES >> 10} KiB, {self.programs_per_sm} programs an SM"


# What measuring tries: two by the bulk copy engine (one kernel), and two that any device can do.
READ_CONFIGS: Final = (
    ReadConfig(rows=128, programs_per_sm=2, num_stages=7, bulk=True),
    ReadConfig(rows=128, programs_per_sm=16, num_stages=7, bulk=True),
    ReadConfig(rows=128, programs_per_sm=16, num_stages=4, bulk=False),
    ReadConfig(rows=256, programs_per_sm=32, num_stages=1, bulk=False),
)


def read_configs(device: torch.device | str) -> list[ReadConfig]:
    """What the device can do of all."""
    has_bulk_copies = target_of(device).has_bulk_copies
    return [config for config in READ_CONFIGS if has_bulk_copies or not config.bulk]


def num_programs(config: ReadConfig, device: torch.device | str) -> int:
    return config.programs_per_sm * target_of(device).num_sms


def read(
    memory: torch.Tensor,  # int32 [num_rows, WIDTH], num_rows a multiple of config.rows
    sums: torch.Tensor,  # int32 [number of programs]
    config: ReadConfig,
) -> None:
    """Every number is read once; each program writes the sum of its stretch (of large numbers what 32 bits hold), so
    that no load can be left out."""
    num_stages = target_of(memory.device).stages(config.num_stages, config.rows * ROW_BYTES)
    launcher(_read, (len(sums),))(
        memory,
        TensorDescriptor.from_tensor(memory, [config.rows, WIDTH]) if config.bulk else None,
        sums,
        len(memory) // config.rows,
        ROWS=config.rows,
        WIDTH=WIDTH,
        STAGES=num_stages,
        num_warps=config.num_warps,
    )


@triton.jit
def _read(memory, blocks, sums, num_blocks, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """No load tells caches what to keep: lines marked to go first would leave others of an earlier pass in L2."""
    program = tl.program_id(0).to(tl.int64)
    first = (program * num_blocks // tl.num_programs(0)).to(tl.int32)
    end = ((program + 1) * num_blocks // tl.num_programs(0)).to(tl.int32)
    places = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    own = memory + first.to(tl.int64) * (ROWS * WIDTH) + places
    found = tl.zeros([ROWS, WIDTH], tl.int32)
    for block in tl.range(0, end - first, num_stages=STAGES):
        if blocks is not None:
            found += blocks.load([(first + block) * ROWS, 0])
        else:
            found += tl.load(own + block * (ROWS * WIDTH))
    tl.store(sums + program, tl.sum(found))
