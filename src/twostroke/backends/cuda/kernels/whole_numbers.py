"""Whole numbers on the host, for launches. Triton's functions of the same names also serve inside kernels, and take
microseconds to find out where they are."""

from __future__ import annotations


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is no less than a positive number."""
    return 1 << (number - 1).bit_length()
