"""Kernels in CUDA C++, for what Triton cannot say: compiled by NVRTC, which comes with torch, so that no compiler need
be installed; kept on disk; launched through the driver, in clusters and dependent on the kernel ahead where asked."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from twostroke.backends.cuda.compile_ahead import compile_beside, is_rehearsal
from twostroke.cache import cache_folder, read_entry, write_entry
from twostroke.core.errors import BackendError

CLUSTER_DIMENSION, DEPENDENT_LAUNCH = 4, 6
"""Launch attributes, by CUDA's numbers."""
MAX_DYNAMIC_SHARED, SHARED_CARVEOUT = 8, 9
SWIZZLED_128_BYTES, PROMOTED_256_BYTES = 3, 3
ELEMENT_KINDS = {torch.float16: 6, torch.bfloat16: 9}
ARCHITECTURE = "sm_90a"
FOLDER = files("twostroke.backends.cuda.kernels")
PREAMBLE = "typedef unsigned int u32;\ntypedef unsigned long long u64;\n"


class NativeError(BackendError):
    """A kernel could not be compiled, loaded or launched."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class TensorMap(ctypes.Structure):
    """How the copy engine finds a matrix in memory; a kernel's parameter."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def tensor_map(matrix: torch.Tensor, rows: int, box_rows: int, box_columns: int) -> TensorMap:
    """Boxes of a matrix's first `rows` rows, for shared memory with rows of 128 bytes, swizzled."""
    sizes, strides = (matrix.shape[1], rows), (matrix.stride(0),)
    return box_map(matrix.data_ptr(), matrix.dtype, sizes, strides, (box_columns, box_rows))


def rows_to_read(x: torch.Tensor, wanted: int) -> int:
    """The rows that may be copied: those behind the last as well, where the buffer has them. The copy engine fills in
    for rows that are not there, and is slower at that than at reading."""
    behind = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return wanted if (wanted - 1) * x.stride(0) + x.shape[1] <= behind else len(x)


@lru_cache(maxsize=4096)  # a step's maps differ from the last one's where its rows do; of weights they never do
def box_map(
    address: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> TensorMap:
    """Boxes of elements in two dimensions or more, the contiguous one first; `strides`, in elements, are those of the
    others. In shared memory a box is rows of 128 bytes, swizzled."""
    held = (ctypes.c_char * 192)()  # the driver wants it at a multiple of 64
    aligned = -(-ctypes.addressof(held) // 64) * 64
    dimensions = len(sizes)
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        ELEMENT_KINDS[dtype],
        dimensions,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * dimensions)(*sizes),
        (ctypes.c_uint64 * (dimensions - 1))(*(stride * dtype.itemsize for stride in strides)),
        (ctypes.c_uint32 * dimensions)(*box),
        (ctypes.c_uint32 * dimensions)(*[1] * dimensions),
        0,
        SWIZZLED_128_BYTES,
        PROMOTED_256_BYTES,
        0,
    )
    _check(code, "describe a matrix to the copy engine")
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, 128))


class NativeKernel:
    """One function of a source, compiled for one choice of its constants. Compiled and loaded when a device first runs
    it; compiled before that where there was a rehearsal."""

    def __init__(self, name: str, source: str, constants: Mapping[str, int]) -> None:
        self.name, self.source, self.constants = name, source, constants
        self._functions: dict[tuple[int, int], ctypes.c_void_p] = {}

    @staticmethod
    def of(name: str, sources: Sequence[str], products: Sequence[str], constants: Mapping[str, int]) -> NativeKernel:
        """From the files `sources`, behind the `products` that they call (`wgmma.py`)."""
        texts = (FOLDER.joinpath(file).read_text() for file in sources)
        return NativeKernel(name, "\n".join([*products, *texts]), constants)

    def compile(self) -> bytes:
        return compiled(self.source, self.constants)

    def load(self, shared_bytes: int = 0) -> ctypes.c_void_p:
        """On the current device, since code belongs to one; it may take `shared_bytes` of shared memory."""
        driver, device = _driver(), torch.cuda.current_device()
        function = self._functions.get((device, shared_bytes))
        if function is None:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            code = self.compile()
            _enter_context(device)
            _check(driver.cuModuleLoadData(ctypes.byref(module), code), "load a kernel")
            found = driver.cuModuleGetFunction(ctypes.byref(function), module, self.name.encode())
            _check(found, f"find the kernel {self.name}")
            allowed = driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared_bytes)
            _check(allowed, f"give a kernel {shared_bytes} bytes of shared memory")
            # All of it for shared memory: several programs may have to find room beside each other.
            _check(driver.cuFuncSetAttribute(function, SHARED_CARVEOUT, 100), "share out a multiprocessor's memory")
            self._functions[device, shared_bytes] = function
        return function

    def launch(
        self,
        grid: int,
        threads: int,
        arguments: Sequence[Any],  # ctypes values, in the order of the kernel's parameters
        *,
        shared_bytes: int,
        cluster: int = 1,
        dependent: bool = False,
    ) -> None:
        """On torch's current stream; a `dependent` kernel, which waits by itself, before the one ahead has ended."""
        if is_rehearsal():
            compile_beside(self, self.compile)
            return
        function = self.load(shared_bytes)
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())  # a Stream takes longer than a launch
        config = _LaunchConfig((grid, 1, 1), (threads, 1, 1), shared_bytes, stream, _attributes(cluster, dependent), 2)
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), function, pointers, None), "launch a kernel")


@cache
def _attributes(cluster: int, dependent: bool) -> ctypes.Array[_Attribute]:
    return (_Attribute * 2)(
        _Attribute(CLUSTER_DIMENSION, 0, (cluster, 1, 1)), _Attribute(DEPENDENT_LAUNCH, 0, (int(dependent),))
    )


def compiled(source: str, constants: Mapping[str, int]) -> bytes:
    """The code for a device, from disk where this has been compiled before. Threads may ask at once."""
    options = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", *(f"-D{k}={v}" for k, v in constants.items())]
    compiler = _nvrtc()
    version = (ctypes.c_int(), ctypes.c_int())
    compiler.nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1]))
    identity = "\n".join([PREAMBLE, source, *options, f"{version[0].value}.{version[1].value}"])
    kept = cache_folder() / "cuda" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.cubin"
    return _builds.setdefault(str(kept), _Build(kept, PREAMBLE + source, options)).code()


class _Build:
    """One compilation. Whoever needs it first compiles; who comes meanwhile waits for that, and compiles where it
    failed: so an error shows wherever the kernel is needed."""

    def __init__(self, kept: Path, source: str, options: list[str]) -> None:
        self._kept, self._source, self._options = kept, source, options
        self._making = Lock()
        self._code: bytes | None = None

    def code(self) -> bytes:
        with self._making:
            if self._code is None:
                self._code = read_entry(self._kept)
            if self._code is None:
                self._code = _compile(_nvrtc(), self._source, self._options)
                write_entry(self._kept, self._code)
            return self._code


_builds: dict[str, _Build] = {}
"""By where the code is kept on disk: in a process nothing is compiled twice, even where it cannot be kept."""


def _compile(compiler: ctypes.CDLL, source: str, options: list[str]) -> bytes:
    """NVRTC compiles several programs at once, if each is one thread's; ctypes leaves the interpreter to others."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    if compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None) != 0:
        raise NativeError("CUDA's compiler (NVRTC) does not start.")
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if compiler.nvrtcCompileProgram(program, len(options), given) != 0:
            compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            compiler.nvrtcGetProgramLog(program, log)
            raise NativeError(f"A CUDA kernel does not compile: {log.value.decode(errors='replace')}")
        if compiler.nvrtcGetCUBINSize(program, ctypes.byref(size)) != 0 or size.value == 0:
            raise NativeError(f"CUDA's compiler (NVRTC) gave no code for {options[0]}.")
        code = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _enter_context(device: int) -> None:
    """Code is loaded into the thread's current context, and a new thread has none: torch's, then."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), device), "find the device")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "open the device")
    _check(_driver().cuCtxSetCurrent(context), "use the device")


@cache
def why_not() -> str | None:
    """Why kernels in CUDA C++ cannot be had on this Hopper device, or None: one that does nothing is compiled and
    loaded, since a library may lack its parts, and a driver may be older than the compiler."""
    try:
        NativeKernel("nothing", 'extern "C" __global__ void nothing() {}', {}).load()
    except OSError as error:
        return f"CUDA's compiler (NVRTC) or driver cannot be loaded: {error}"
    except NativeError as error:
        return str(error).rstrip(".")
    return None


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _nvrtc() -> ctypes.CDLL:
    """The one that torch was built with: among its packages, or where the system's loader looks."""
    major = (torch.version.cuda or "13").split(".")[0]
    name = f"libnvrtc.so.{major}"
    packages = find_spec("nvidia")
    for folder in packages.submodule_search_locations or () if packages else ():
        for path in (*Path(folder).glob(f"cu{major}/lib/{name}"), *Path(folder).glob(f"cuda_nvrtc/lib/{name}")):
            return ctypes.CDLL(str(path))
    return ctypes.CDLL(name)


def _check(code: int, aim: str) -> None:
    if code != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown"
        raise NativeError(f"The CUDA driver could not {aim}: error {code}, {reason}.")
