"""A benchmark as data: the figures, and everything a reader needs to believe them or to measure them again. Never the
machine's name."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from twostroke import __version__, machine
from twostroke.cost.hardware import Ceilings
from twostroke.engine.build import Assembly
from twostroke.lab.bench import WorkloadResult

SCHEMA = 1
PACKAGES = ("numpy", "llvmlite", "torch", "triton", "matplotlib")
"""Versions of these are recorded where they are installed; none is imported for it."""


def environment() -> dict[str, Any]:
    """Where and with what, the same for every kind of record."""
    here = machine.detect()
    return {
        "schema": SCHEMA,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["twostroke", *sys.argv[1:]]),
        "commit": commit(),
        "machine": {
            "processor": machine.processor_name(),
            "cores": os.cpu_count(),
            "usable_threads": here.threads,
            "memory_bytes": here.total_memory_bytes,
            "system": f"{platform.system()} {platform.release()}",
        },
        "versions": {"twostroke": __version__, "python": platform.python_version(), **_package_versions()},
    }


def bench_record(
    assembly: Assembly,
    ceilings: Ceilings,
    results: Sequence[WorkloadResult],
    *,
    scale: str,
    repetitions: int,
    start: dict[str, float | None],
    others_share: float | None = None,
) -> dict[str, Any]:
    return {
        **environment(),
        **engine_record(assembly),
        "others_share": others_share,
        "ceilings": asdict(ceilings),
        "start": start,
        "scale": scale,
        "repetitions": repetitions,
        "workloads": [workload_record(result) for result in results],
    }


def engine_record(assembly: Assembly) -> dict[str, Any]:
    """The model and how it was run."""
    checkpoint, resolved = assembly.checkpoint, assembly.resolved
    return {
        "model": {
            "name": checkpoint.name,
            "family": checkpoint.spec.family,
            "parameters": checkpoint.num_parameters,
            "weight_bytes_per_step": assembly.shape.weight_bytes_per_step,
            "decode_weight_bytes_per_step": assembly.shape.dense_bytes_read(1),
            "kv_bytes_per_token": assembly.shape.kv_bytes_per_token,
            "load": resolved.config.load,
        },
        "engine": {
            "backend": assembly.backend_name,
            "threads": resolved.threads,
            "max_context": resolved.max_context,
            "max_tokens_per_step": resolved.config.max_tokens_per_step,
            "max_running": resolved.config.max_running,
            "kv_bytes": resolved.kv_bytes,
            "formats": {name: held for name, held in asdict(assembly.formats).items() if name != "reasons"},
            "notes": list(assembly.notes),
        },
    }


def workload_record(result: WorkloadResult) -> dict[str, Any]:
    return {
        "name": result.workload.NAME,
        "sizes": asdict(result.workload),
        "skipped": result.skipped,
        "steps": result.num_steps,
        "duration_s": result.duration_s,
        "figures": {
            summary.typical.name: {
                "value": summary.typical.value,
                "floor": summary.typical.floor,
                "fraction": summary.typical.fraction,
                "values": list(summary.values),
            }
            for summary in result.figures
        },
    }


def commit() -> str | None:
    """What was measured, marked where the tree was not clean; None where this file is not under version control."""
    here = Path(__file__)
    try:
        for command in (["ls-files", "--error-unmatch", here.name], ["describe", "--always", "--dirty"]):
            done = subprocess.run(["git", "-C", str(here.parent), *command], capture_output=True, text=True, timeout=10)
            if done.returncode != 0:
                return None
        return done.stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def process_age_s() -> float | None:
    """Since the system started this process, so that the interpreter's own start counts. None where it is not told."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return uptime_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
