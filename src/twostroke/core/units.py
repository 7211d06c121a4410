"""Sizes as people read them. Knows nothing else."""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """Returns a number of bytes in the largest unit that leaves a number above 1, like "5.3 GB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000 or unit == "TB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError("unreachable")
