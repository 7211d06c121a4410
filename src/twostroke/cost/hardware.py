"""What the hardware can do at most, as measured, not as advertised. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ceilings:
    read_bytes_per_s: float
    """Bytes read from memory a second, by all threads together."""
    multiply_adds_per_s: float
    """Multiply-adds a second in the arithmetic that the backend's matrix products use; one is two FLOPs."""
    source: str
    """Where the two numbers come from, for whoever reads them."""

    def __post_init__(self) -> None:
        for name in ("read_bytes_per_s", "multiply_adds_per_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive and finite, not {getattr(self, name)!r}")
