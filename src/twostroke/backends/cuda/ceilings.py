"""What this device allows, measured in a fraction of a second: bytes a second, multiply-adds a second in bf16. The
floors that users are shown are counted from these numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

COPY_BYTES = 1 << 30
"""Twenty times an L2 cache, and small enough to find room beside KV."""
MATRIX_SIZE = 8192
REPETITIONS = 15
LAUNCHES = 200


@dataclass(frozen=True, slots=True)
class DeviceRates:
    device: str
    copy_bytes_per_s: float
    """Bytes read plus bytes written by a copy: the steadiest measure of the memory's rate, and within a few percent of
    the best that a kernel which only reads has reached."""
    multiply_adds_per_s: float
    launch_s: float
    """Host seconds that launching one kernel takes."""

    def as_figures(self) -> dict[str, float]:
        return {
            "copy TB/s": self.copy_bytes_per_s / 1e12,
            "bf16 TFLOP/s": 2 * self.multiply_adds_per_s / 1e12,
            "kernel launch us": self.launch_s * 1e6,
        }


@cache
def machine_rates() -> DeviceRates:
    """Measured once a process, on random numbers: zeros multiply faster than data does."""
    small = torch.zeros(32, device="cuda")
    rates = DeviceRates(
        torch.cuda.get_device_name(), _copy_rate(), _multiply_add_rate(), _launch_s(lambda: small.add_(1.0))
    )
    torch.cuda.empty_cache()
    return rates


def _copy_rate() -> float:
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _median_s(lambda: target.copy_(source))


def _multiply_add_rate() -> float:
    left = torch.randn(MATRIX_SIZE, MATRIX_SIZE, dtype=torch.bfloat16, device="cuda")
    right = torch.randn(MATRIX_SIZE, MATRIX_SIZE, dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(left)
    return MATRIX_SIZE**3 / _median_s(lambda: torch.mm(left, right, out=product))


def _median_s(work: Callable[[], object]) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(REPETITIONS):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        work()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return statistics.median(times)


def _launch_s(work: Callable[[], object]) -> float:
    work()
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(LAUNCHES):
        work()
    launched_s = time.perf_counter()
    torch.cuda.synchronize()
    return (launched_s - started_s) / LAUNCHES
