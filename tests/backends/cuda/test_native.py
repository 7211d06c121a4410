"""Kernels in CUDA C++ as they are loaded and launched: what is asked of the driver, where there is none to ask."""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from twostroke.backends.cuda import native


class Driver:
    """Answers as CUDA's does, and remembers on which device code was loaded and launched."""

    def __init__(self, fault: int = 0):
        self.device, self.fault = None, fault
        self.loaded, self.launched, self.allowed = [], [], []

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
        if attribute == native.MAX_DYNAMIC_SHARED:
            self.allowed.append((function.value - 200, value))
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
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 300 + device, raising=False)
    return chosen


def test_code_is_loaded_once_on_each_device_that_runs_it(here, monkeypatch):
    driver = Driver()
    monkeypatch.setattr(native, "_driver", lambda: driver)
    kernel = native.NativeKernel("name", "source", {})
    for here.device in (0, 1, 0, 1):
        kernel.launch(1, 32, [ctypes.c_int(1)], shared_bytes=1 << 17)
    assert driver.loaded == [0, 1] and driver.allowed == [(0, 1 << 17), (1, 1 << 17)]
    assert driver.launched == [(0, 300), (1, 301), (0, 300), (1, 301)]


def test_what_the_driver_refuses_is_a_sentence(here, monkeypatch):
    monkeypatch.setattr(native, "_driver", lambda: Driver(fault=200))
    with pytest.raises(native.NativeError, match="could not load a kernel: error 200, device kernel image is invalid"):
        native.NativeKernel("name", "source", {}).load()


def test_structures_are_laid_out_as_cuda_s():
    assert (ctypes.sizeof(native._Attribute), native._Attribute.value.offset) == (72, 8)
    config = native._LaunchConfig
    assert (ctypes.sizeof(config), config.stream.offset, config.attributes.offset) == (56, 32, 40)
    assert ctypes.sizeof(native.TensorMap) == 128


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """NVRTC's own compiler where there is one, else one that takes its time; and how often it was asked."""
    asked = []
    try:
        native._nvrtc()
        translate = native._compile
    except OSError:
        monkeypatch.setattr(native, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=lambda *_: 0))

        def translate(compiler, source, options):
            time.sleep(0.05)
            if "mistake" in source:
                raise native.NativeError("A CUDA kernel does not compile: mistake")
            return source.encode()

    def count(compiler, source, options):
        asked.append(source)
        return translate(compiler, source, options)

    monkeypatch.setattr(native, "_compile", count)
    monkeypatch.setattr(native, "_builds", {})
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    return asked


def add(number):
    return f'extern "C" __global__ void add(int* x) {{ x[threadIdx.x] += {number}; }}'


def test_what_threads_ask_for_at_once_is_compiled_once(counted):
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda n: native.compiled(add(n % 3), {}), range(24)))
    assert len(counted) == 3 and len(set(found)) == 3
    assert all(found[n] == found[n % 3] for n in range(24))


def test_nothing_is_compiled_again_where_the_cache_cannot_be_written(counted, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "file"))
    assert native.compiled(add(1), {}) == native.compiled(add(1), {})
    assert len(counted) == 1


def test_what_another_process_compiled_is_read(counted, monkeypatch):
    code = native.compiled(add(1), {})
    monkeypatch.setattr(native, "_builds", {})
    assert native.compiled(add(1), {}) == code
    assert len(counted) == 1


def test_an_error_shows_wherever_the_kernel_is_needed(counted):
    kernel = native.NativeKernel("name", "mistake", {})
    with ThreadPoolExecutor(2) as threads:
        tried = [threads.submit(kernel.compile) for _ in range(2)]
    for future in tried:
        assert isinstance(future.exception(), native.NativeError)
    with pytest.raises(native.NativeError, match=r"(?s)does not compile: .*mistake"):
        kernel.compile()
