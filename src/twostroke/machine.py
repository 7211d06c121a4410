"""What this machine really offers a process: cores and memory, after cgroup limits and affinity. Standard library
only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

FALLBACK_MEMORY_BYTES = 4 << 30
"""Assumed where the system does not say."""


@dataclass(frozen=True, slots=True)
class Machine:
    threads: int
    total_memory_bytes: int
    available_memory_bytes: int


def detect() -> Machine:
    total, available = _system_memory()
    limit, used = _cgroup_memory()
    if limit is not None and limit < total:
        total = limit
        available = min(available, max(limit - used, 0))
    return Machine(available_threads(), total, available)


def available_threads() -> int:
    """Cores this process may use: its affinity, cut by the cgroup's CPU quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = _cgroup_cpu_quota()
    return max(1, min(cores, int(quota))) if quota is not None else max(1, cores)


def _cgroup_folder() -> Path | None:
    """The cgroup v2 folder of this process."""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                folder = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
                return folder if folder.is_dir() else Path("/sys/fs/cgroup")
    except OSError:
        return None
    return None


def _read_numbers(path: Path) -> list[int | None]:
    """The words of a cgroup file; None for "max"."""
    try:
        return [None if word == "max" else int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


def _cgroup_cpu_quota() -> float | None:
    folder = _cgroup_folder()
    numbers = _read_numbers(folder / "cpu.max") if folder is not None else []
    if len(numbers) == 2 and numbers[0] is not None and numbers[1]:
        return max(1.0, numbers[0] / numbers[1])
    return None


def _cgroup_memory() -> tuple[int | None, int]:
    folder = _cgroup_folder()
    if folder is None:
        return None, 0
    limit = _read_numbers(folder / "memory.max")
    used = _read_numbers(folder / "memory.current")
    return (limit[0] if limit else None), (used[0] or 0 if used else 0)


def _system_memory() -> tuple[int, int]:
    """(total, available) bytes."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
        return tuple(int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))  # type: ignore[return-value]
    except (OSError, KeyError, ValueError):
        pass
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return FALLBACK_MEMORY_BYTES, FALLBACK_MEMORY_BYTES // 2
    return total, total // 2  # macOS tells no "available" here: half is a safe guess
