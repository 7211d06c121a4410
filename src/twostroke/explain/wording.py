"""Numbers as a sentence has them: two or three digits, with a unit."""

from __future__ import annotations


def seconds(value: float) -> str:
    if value < 0.9995e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 0.9995:
        milliseconds = value * 1e3
        return f"{milliseconds:.0f} ms" if milliseconds >= 9.95 else f"{milliseconds:.1f} ms"
    return f"{value:.1f} s" if value >= 9.995 else f"{value:.2f} s"


def part(value: float, whole: float) -> str:
    """`1.90 of the 2.10 s`, or `900 ms of the 2.10 s` where the units differ."""
    if value >= 0.995 * whole:
        return f"all of the {seconds(whole)}"
    shown, total = seconds(value), seconds(whole)
    if shown.split()[1] == total.split()[1]:
        shown = shown.split()[0]
    return f"{shown} of the {total}"


def times(value: float) -> str:
    return f"{value:.1f} times" if value < 9.95 else f"{value:,.0f} times"


def count(number: float, noun: str) -> str:
    """`1 request`, `1,900 tokens`."""
    return f"{number:,.0f} {noun}" + ("" if round(number) == 1 else "s")


def often(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def size(num_bytes: float) -> str:
    """`97 MB`."""
    for unit, bytes_each in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= bytes_each:
            return f"{num_bytes / bytes_each:.3g} {unit}"
    return f"{num_bytes / 1e3:.3g} kB"


def size_option(num_bytes: float) -> str:
    """As `--kv-memory` takes it, rounded up."""
    for unit, bytes_each in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= 10 * bytes_each:
            return f"{int(-(-num_bytes // bytes_each))}{unit}"
    return f"{int(-(-num_bytes // 1e3))}KB"
