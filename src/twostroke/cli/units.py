"""Numbers as people read them."""

from __future__ import annotations

from twostroke.core.units import size as size


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.1f} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"
    return f"{value:.2f} s"


def rate(count: float, duration_s: float | None) -> str:
    """Tokens a second."""
    return "-" if not duration_s else f"{count / duration_s:,.0f} tok/s"
