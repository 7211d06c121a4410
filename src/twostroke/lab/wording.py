"""Numbers as a sentence says them."""

from __future__ import annotations


def duration(value_s: float) -> str:
    if value_s < 1e-3:
        return f"{value_s * 1e6:.0f} µs"
    if value_s < 1:
        return f"{value_s * 1e3:.1f} ms" if value_s < 0.1 else f"{value_s * 1e3:.0f} ms"
    return f"{value_s:.1f} s" if value_s < 100 else f"{value_s:,.0f} s"


def size(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"


def count(value: float) -> str:
    return f"{value:,.0f}"


def rate(value_per_s: float) -> str:
    """Tokens a second."""
    return f"{value_per_s:,.0f} tokens/s" if value_per_s >= 10 else f"{value_per_s:.1f} tokens/s"


def flops_a_byte(value: float) -> str:
    """1.3, 280."""
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def ratio(value: float) -> str:
    """2.3 times, 41 times."""
    return f"{value:.1f} times" if value < 10 else f"{value:,.0f} times"


def share(value: float) -> str:
    if 0 < value < 0.0005:
        return "less than 0.1%"
    return f"{value:.1%}" if value < 0.095 else f"{value:.0%}"


def flops(value_per_s: float) -> str:
    if value_per_s >= 1e12:
        return f"{value_per_s / 1e12:,.3g} TFLOP/s"
    return f"{value_per_s / 1e9:,.3g} GFLOP/s"
