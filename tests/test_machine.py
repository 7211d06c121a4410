"""What the machine offers, read from files as the kernel writes them: both cgroup versions, containers, page cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.machine import CgroupMemory, cgroup_cpu_quota, cgroup_memory

GB = 10**9


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_version_2_of_a_container(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/memory.max": f"{4 * GB}\n",
            "sys/fs/cgroup/memory.current": f"{3 * GB}\n",
        },
    )
    assert cgroup_cpu_quota(root) == 1.5
    assert cgroup_memory(root) == CgroupMemory(4 * GB, 3 * GB)


def test_page_cache_is_not_in_use(tmp_path: Path) -> None:
    """A model that was just downloaded fills the page cache: the memory is there all the same."""
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{4 * GB}\n",
            "sys/fs/cgroup/memory.current": f"{4 * GB}\n",
            "sys/fs/cgroup/memory.stat": f"anon {GB}\nfile {3 * GB}\nactive_file {GB}\ninactive_file {2 * GB}\n",
        },
    )
    assert cgroup_memory(root) == CgroupMemory(4 * GB, GB)


def test_a_limit_of_a_parent_holds(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/app.scope\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{2 * GB}\n",
            "sys/fs/cgroup/user.slice/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/user.slice/app.scope/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/app.scope/cpu.max": "max 100000\n",
        },
    )
    assert cgroup_cpu_quota(root) == 2.0
    assert cgroup_memory(root) == CgroupMemory(2 * GB, 0)


def test_version_1(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{8 * GB}\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{5 * GB}\n",
            "sys/fs/cgroup/memory/box/memory.stat": f"cache {GB}\ntotal_active_file {GB}\ntotal_inactive_file {GB}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cgroup_cpu_quota(root) == 4.0
    assert cgroup_memory(root) == CgroupMemory(8 * GB, 3 * GB)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": ""},
        {"proc/self/cgroup": "nonsense\n0::/../../etc\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "lots\n", "sys/fs/cgroup/cpu.max": "1 0\n"},
        {"proc/self/cgroup": "1:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"},
    ],
)
def test_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    root = write(tmp_path, files)
    assert cgroup_cpu_quota(root) is None
    assert cgroup_memory(root) is None
