"""What this device allows, measured in a fraction of a second: bytes a second, multiply-adds a second in bf16. The
floors that users are shown are counted from these numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import torch

from twostroke.backends.cuda.compile_ahead import compiled_ahead
from twostroke.backends.cuda.kernels.read_memory import ROW_BYTES, WIDTH, ReadConfig, num_programs, read, read_configs
from twostroke.backends.cuda.kernels.target import target_of

MEMORY_BYTES = 2 << 30
"""Forty times an L2 cache, so that none of it is still there at the next pass, and small enough to find room beside
KV. A copy reads one half and writes the other."""
LEAST_BYTES = 256 << 20
"""Where KV has left hardly anything: still several times the L2."""
WHOLE_BYTES = 1 << 20
"""What is measured is a multiple of this, so that both halves of a copy have as many rows."""
MATRIX_SIZE = 8192
REPETITIONS = 15
LAUNCHES = 200


@dataclass(frozen=True, slots=True)
class DeviceRates:
    device: str
    copy_bytes_per_s: float  # bytes read plus bytes written by a copy
    reads: Mapping[str, float]  # bytes a second of a kernel that only reads, by the way it reads
    multiply_adds_per_s: float
    launch_s: float  # host seconds that launching one kernel takes

    @property
    def read_bytes_per_s(self) -> float:
        """The best way's: a ceiling is what no kernel exceeds."""
        return max(self.reads.values())

    @property
    def floors_count_with(self) -> Literal["copy", "read"]:
        """The faster of the two: inference hardly writes, so what only reads is its limit, unless every way of reading
        here falls short of a copy."""
        return "read" if self.read_bytes_per_s >= self.copy_bytes_per_s else "copy"

    @property
    def memory_bytes_per_s(self) -> float:
        """What floors count with."""
        return max(self.read_bytes_per_s, self.copy_bytes_per_s)

    def as_figures(self) -> dict[str, float | str]:
        return {
            "copy TB/s": self.copy_bytes_per_s / 1e12,
            "read TB/s": self.read_bytes_per_s / 1e12,
            **{f"read TB/s by {way}": rate / 1e12 for way, rate in self.reads.items()},
            "floors count with": self.floors_count_with,
            "bf16 TFLOP/s": 2 * self.multiply_adds_per_s / 1e12,
            "kernel launch us": self.launch_s * 1e6,
        }


@cache
def machine_rates() -> DeviceRates:
    """Measured once a process, on random numbers: zeros multiply faster than data does."""
    memory = random_memory(bytes_to_measure(torch.cuda.mem_get_info()[0]))
    copy, reads = copy_rate(memory), read_rates(memory, read_configs(memory.device))
    del memory
    small = torch.zeros(32, device="cuda")
    rates = DeviceRates(
        device=torch.cuda.get_device_name(),
        copy_bytes_per_s=copy,
        reads={str(config): rate for config, rate in reads.items()},
        multiply_adds_per_s=_multiply_add_rate(),
        launch_s=_launch_s(lambda: small.add_(1.0)),
    )
    torch.cuda.empty_cache()
    return rates


def bytes_to_measure(free_bytes: int) -> int:
    """No more than half of what is left: an engine that has its KV is measured, too."""
    return min(MEMORY_BYTES, max(LEAST_BYTES, free_bytes // 2 // WHOLE_BYTES * WHOLE_BYTES))


def random_memory(num_bytes: int) -> torch.Tensor:
    """[num_rows, WIDTH] of all 32-bit integers."""
    return torch.randint(-(2**31), 2**31, (num_bytes // ROW_BYTES, WIDTH), dtype=torch.int32, device="cuda")


def copy_rate(memory: torch.Tensor) -> float:
    """Of the first half over the second, which holds random numbers after it too."""
    source, target = memory.chunk(2)
    return memory.nbytes / _median_s(lambda: target.copy_(source))


def read_rates(memory: torch.Tensor, configs: Sequence[ReadConfig]) -> dict[ReadConfig, float]:
    """Of each, on its own: of all, the fastest is the ceiling. Their kernels are compiled beside each other."""
    passes = {config: _one_pass(memory, config) for config in configs}
    with compiled_ahead(lambda: [one_pass() for one_pass in passes.values()]):
        return {config: memory.nbytes / _median_s(one_pass) for config, one_pass in passes.items()}


def _one_pass(memory: torch.Tensor, config: ReadConfig) -> Callable[[], None]:
    sums = torch.empty(num_programs(config, memory.device), dtype=torch.int32, device=memory.device)
    return partial(read, memory, sums, config)


def _multiply_add_rate() -> float:
    left = torch.randn(MATRIX_SIZE, MATRIX_SIZE, dtype=torch.bfloat16, device="cuda")
    right = torch.randn(MATRIX_SIZE, MATRIX_SIZE, dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(left)
    return MATRIX_SIZE**3 / _median_s(lambda: torch.mm(left, right, out=product))


@cache
def float8_multiply_adds_per_s() -> float | None:
    """By the library, with a scale for each row and each output, as prompts are multiplied; None: this card has no
    float8. Measured once a process, where it is asked for."""
    if not target_of("cuda").has_float8:
        return None
    size = (MATRIX_SIZE, MATRIX_SIZE)
    left, right = (torch.randn(size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    scales = torch.ones(MATRIX_SIZE, 1, device="cuda")
    product = torch.empty(size, dtype=torch.bfloat16, device="cuda")

    def multiply() -> None:
        torch._scaled_mm(
            left, right.t(), scales, scales.t(), out_dtype=torch.bfloat16, use_fast_accum=False, out=product
        )

    return MATRIX_SIZE**3 / _median_s(multiply)


def _median_s(work: Callable[[], object]) -> float:
    """The host runs ahead and waits only for the last: a device that had to wait for a launch would count that too."""
    for _ in range(3):
        work()
    times = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPETITIONS)]
    for before, after in times:
        before.record()
        work()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) / 1e3 for before, after in times)


def _launch_s(work: Callable[[], object]) -> float:
    work()
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(LAUNCHES):
        work()
    launched_s = time.perf_counter()
    torch.cuda.synchronize()
    return (launched_s - started_s) / LAUNCHES
