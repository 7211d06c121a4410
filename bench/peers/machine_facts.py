"""What a reader needs to know of the machine that measured: processor, cores, memory, system. Never its name."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from bench.peers.home import REPOSITORY
from twostroke import machine


def machine_facts() -> dict[str, Any]:
    found = machine.detect()
    return {
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "usable_threads": found.threads,
        "memory_gb": round(found.total_memory_bytes / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def revision() -> str:
    """The commit that was measured, marked where the tree was not clean."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
