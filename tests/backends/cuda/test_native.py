"""Kernels in CUDA C++ as they are loaded and launched: what is asked of the driver, where there is none to ask."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from twostroke.backends.cuda import native


class Driver:
    """Answers as CUDA's does, and remembers on which device code was loaded and launched."""

    def __init__(self, fault: int = 0):
        self.device, self.fault = None, fault
        self.loaded, self.launched = [], []

    def cuDeviceGet(self, handle, device):  # noqa: N802
        handle._obj.value = device
        return 0

    def cuDevicePrimaryCtxRetain(self, context, handle):  # noqa: N802
        context._obj.value = 100 + handle.value
        return 0

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.device = context.value - 100
        return 0

    def cuModuleLoadData(self, module, code):  # noqa: N802
        self.loaded.append(self.device)
        return self.fault

    def cuModuleGetFunction(self, function, module, name):  # noqa: N802
        function._obj.value = 200 + self.device
        return 0

    def cuFuncSetAttribute(self, function, attribute, value):  # noqa: N802
        return 0

    def cuLaunchKernelEx(self, config, function, pointers, extra):  # noqa: N802
        self.launched.append((function.value - 200, config._obj.stream))
        return 0

    def cuGetErrorString(self, code, text):  # noqa: N802
        text._obj.value = b"device kernel image is invalid"
        return 0


@pytest.fixture
def here(monkeypatch):
    """The current device, which a test may change."""
    chosen = SimpleNamespace(device=0)
    monkeypatch.setattr(native, "compiled", lambda *_: b"code")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=300 + chosen.device))
    return chosen


def test_code_is_loaded_once_on_each_device_that_runs_it(here, monkeypatch):
    driver = Driver()
    monkeypatch.setattr(native, "_driver", lambda: driver)
    kernel = native.NativeKernel("source", "name", {}, "sm_90a")
    for here.device in (0, 1, 0, 1):
        kernel.launch(1, 32, [ctypes.c_int(1)], shared_bytes=0)
    assert driver.loaded == [0, 1]
    assert driver.launched == [(0, 300), (1, 301), (0, 300), (1, 301)]


def test_what_the_driver_refuses_is_a_sentence(here, monkeypatch):
    monkeypatch.setattr(native, "_driver", lambda: Driver(fault=200))
    with pytest.raises(native.NativeError, match="could not load a kernel: error 200, device kernel image is invalid"):
        native.NativeKernel("source", "name", {}, "sm_90a")


def test_structures_are_laid_out_as_cuda_s():
    assert (ctypes.sizeof(native._Attribute), native._Attribute.value.offset) == (72, 8)
    config = native._LaunchConfig
    assert (ctypes.sizeof(config), config.stream.offset, config.attributes.offset) == (56, 32, 40)
    assert ctypes.sizeof(native.TensorMap) == 128
