"""Floats of 8 and 4 bits, as tables: E4M3 (no infinities), E8M0 (powers of two) and E2M1; and bfloat16 to float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

FP4_LEAST, FP4_MOST = -6.0, 6.0
E4M3_MOST = 448.0


def _e4m3() -> Float32:
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    magnitudes = np.where(exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * np.exp2(exponents - 10.0))
    magnitudes[(codes & 127) == 127] = np.nan
    values: Float32 = np.where(codes & 128, -magnitudes, magnitudes).astype(np.float32)
    return values


def _e8m0() -> Float32:
    values: Float32 = np.full(256, np.nan, dtype=np.float32)
    values[:255] = np.exp2(np.arange(255) - 127.0)
    return values


E4M3_VALUES = _e4m3()  # [256]
E8M0_VALUES = _e8m0()  # [256]
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)  # [16]
_E4M3_POSITIVE = E4M3_VALUES[:127]


def bfloat16_values(bits: npt.NDArray[Any]) -> Float32:
    """Of 16 bits each, the upper half of a float32."""
    values: Float32 = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values


def to_e4m3(values: Float32) -> npt.NDArray[np.uint8]:
    """The nearest codes, ties to even; what is beyond the largest becomes the largest. Finite numbers alone."""
    magnitudes = np.minimum(np.abs(values), np.float32(E4M3_MOST))
    above = np.clip(np.searchsorted(_E4M3_POSITIVE, magnitudes), 1, 126)
    low, high = _E4M3_POSITIVE[above - 1], _E4M3_POSITIVE[above]
    below_half, above_half = magnitudes - low, high - magnitudes  # both exact: neighbours are within a factor of two
    takes_high = (above_half < below_half) | ((above_half == below_half) & (above % 2 == 0))
    codes = np.where(takes_high, above, above - 1).astype(np.uint8)
    return codes | (np.signbit(values).astype(np.uint8) << np.uint8(7))
