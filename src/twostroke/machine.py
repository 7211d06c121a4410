"""What this machine really offers a process: cores and memory, after cgroup limits and affinity. Standard library
only."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

FALLBACK_MEMORY_BYTES = 4 << 30
"""Assumed where the system does not say."""


@dataclass(frozen=True, slots=True)
class Machine:
    threads: int
    total_memory_bytes: int
    available_memory_bytes: int


KV_SHARE_OF_MEMORY = 0.25
"""Of the host's memory available once the weights are in: a default that leaves room for the rest of a laptop."""


@dataclass(frozen=True, slots=True)
class MemorySpace:
    """Where a backend's weights and KV live."""

    owner: str
    total_bytes: int
    free_beside_weights_bytes: int
    kv_share: float
    """How much of that KV may take unless asked otherwise."""

    def within(self, limit_bytes: float | None) -> MemorySpace:
        """The same with no more memory than this."""
        if limit_bytes is None or limit_bytes >= self.total_bytes:
            return self
        left = max(0, int(self.free_beside_weights_bytes - (self.total_bytes - limit_bytes)))
        return replace(self, total_bytes=int(limit_bytes), free_beside_weights_bytes=left)


def host_memory(machine: Machine, weight_bytes: int) -> MemorySpace:
    free = max(machine.available_memory_bytes - weight_bytes, 0)
    return MemorySpace("this machine", machine.total_memory_bytes, free, KV_SHARE_OF_MEMORY)


def detect() -> Machine:
    total, available = _system_memory()
    memory = cgroup_memory()
    if memory is not None and memory.limit_bytes < total:
        total = memory.limit_bytes
        available = min(available, max(memory.limit_bytes - memory.used_bytes, 0))
    allowed = address_space_left()
    if allowed is not None:
        total, available = min(total, allowed), min(available, allowed)
    return Machine(available_threads(), total, available)


def address_space_left() -> int | None:
    """Bytes that this process may still map where its address space is limited (`ulimit -v`); None: it is not."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        mapped_pages = int(Path("/proc/self/statm").read_text().split()[0])
        return max(0, limit - mapped_pages * resource.getpagesize())
    except (ImportError, OSError, ValueError, IndexError):
        return None


def available_threads() -> int:
    """Cores this process may use: its affinity, cut by the cgroup's CPU quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = cgroup_cpu_quota()
    return max(1, min(cores, int(quota))) if quota is not None else max(1, cores)


_WAITING = (3, 4)
"""Of the first numbers of a processor's line: the seconds in which it was idle, or waited for a disk."""
_COUNTED = 8
"""User, nice, system, idle, disk, two kinds of interrupts, stolen. Guests' time, which follows, is in the first two."""


def busy_s(cores: Collection[int] | None = None, stat: Path = Path("/proc/stat")) -> float | None:
    """What these cores, or all of them, were at work since the system started, for whomever: programs, the system, a
    hypervisor. None where the system does not say."""
    names = {"cpu"} if cores is None else {f"cpu{core}" for core in cores}
    try:
        lines = [line.split() for line in stat.read_text(encoding="ascii").splitlines()]
        found = [[int(number) for number in line[1 : _COUNTED + 1]] for line in lines if line and line[0] in names]
        if len(found) != len(names) or any(len(ticks) <= max(_WAITING) for ticks in found):
            return None
        working = sum(ticks for line in found for index, ticks in enumerate(line) if index not in _WAITING)
        return working / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def processor_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except (OSError, UnicodeDecodeError):
        pass
    return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    limit_bytes: int
    used_bytes: int
    """Without the page cache, which the kernel gives back when memory is asked for."""


def cgroup_cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores, by the tightest quota of this process's cgroup and its parents; None: no quota."""
    quotas = []
    for folder in _cgroup_folders(root, ""):
        numbers = _read_numbers(folder / "cpu.max")  # version 2: quota (or max) and period
        if len(numbers) == 2 and numbers[0] is not None and numbers[1]:
            quotas.append(numbers[0] / numbers[1])
    for folder in _cgroup_folders(root, "cpu"):
        quota, period = _read_numbers(folder / "cpu.cfs_quota_us"), _read_numbers(folder / "cpu.cfs_period_us")
        if quota and period and period[0] and quota[0] is not None and quota[0] > 0:  # -1: no quota
            quotas.append(quota[0] / period[0])
    return min(quotas, default=None)


def cgroup_memory(root: Path = Path("/")) -> CgroupMemory | None:
    """The limit, of this process's cgroup and its parents, that leaves the least; None: no limit."""
    found = []
    for controller, limit_file, used_file, prefix in (
        ("", "memory.max", "memory.current", ""),  # version 2
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        for folder in _cgroup_folders(root, controller):
            limit, used = _read_numbers(folder / limit_file), _read_numbers(folder / used_file)
            if limit and limit[0] is not None:
                cached = _page_cache_bytes(folder / "memory.stat", prefix)
                found.append(CgroupMemory(limit[0], max(0, (used[0] or 0 if used else 0) - cached)))
    return min(found, key=lambda memory: memory.limit_bytes - memory.used_bytes, default=None)


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """This process's folder in the hierarchy of a version 1 controller, or ("") of version 2, and that folder's
    parents. A container often sees its own folder as the hierarchy's top: then only the top exists."""
    top = root / "sys/fs/cgroup" / controller
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(","):
            folder = top / path.lstrip("/")
            chain = [folder, *folder.parents]
            return [place for place in chain[: chain.index(top) + 1] if place.is_dir()] if top in chain else []
    return []


def _page_cache_bytes(stat: Path, prefix: str) -> int:
    try:
        fields = dict(line.split(" ", 1) for line in stat.read_text().splitlines() if " " in line)
        return sum(int(fields.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    except (OSError, ValueError):
        return 0


def _read_numbers(path: Path) -> list[int | None]:
    """The words of a cgroup file; None for "max"."""
    try:
        return [None if word == "max" else int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


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
