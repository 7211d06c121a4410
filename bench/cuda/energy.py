"""What a card has drawn so far, by its own counter (NVML): where power is what limits it, a kernel is as fast as it is
frugal. Knows nothing of what runs."""

from __future__ import annotations

import ctypes


class EnergyMeter:
    def __init__(self, device: int = 0) -> None:
        """Raises OSError where NVML or its counter is not to be had."""
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        self._check(self._library.nvmlInit_v2())
        self._check(self._library.nvmlDeviceGetHandleByIndex_v2(device, ctypes.byref(self._handle)))
        self.joules()

    def joules(self) -> float:
        """Since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._check(self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules)))
        return millijoules.value / 1e3

    @staticmethod
    def _check(code: int) -> None:
        if code != 0:
            raise OSError(f"NVML says error {code}")
