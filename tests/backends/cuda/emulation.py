"""Runs a kernel in CUDA C++ on the CPU, by way of `emulated_hopper.hpp`: its own text, with other primitives."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twostroke.backends.cuda.kernels.flash_prefill import SLICE, SPAN, FlashOptions, kernel_for
from twostroke.backends.cuda.kernels.paged import AttentionShape, Scoring
from twostroke.backends.cuda.kernels.prefill_attention import join_tiles
from twostroke.backends.cuda.native import FOLDER, NativeKernel

COMPILER = shutil.which("g++")
MORE_FLAGS = os.environ.get("EMULATION_FLAGS", "").split()
"""Say, -fsanitize=address, with LD_PRELOAD=$(gcc -print-file-name=libasan.so): who touches what is nobody's."""
ENTRY = """
extern "C" int emulate(const TensorMap* maps, const int* table, const int* items, char* out, float* partials,
                       float* log_sums, int* claims, const float* sinks, long long table_stride, int units,
                       int heads_at_once, float scale, float score_scale, int window, int programs, int seed) {
  chance.seed(seed);
  for (int program = 0; program < programs; program++) {
    bool ended = run_program(program, programs, [&] {
      attend(maps[0], maps[1], maps[2], table, items, out, partials, log_sums, claims, sinks, table_stride, units,
             heads_at_once, scale, score_scale, window);
    });
    if (!ended) return 1 + program;
  }
  return 0;
}
"""


class Map(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_void_p),
        ("sizes", ctypes.c_longlong * 3),
        ("strides", ctypes.c_longlong * 3),
        ("box", ctypes.c_longlong * 3),
    )


def build(folder: Path, options: FlashOptions, shape: AttentionShape, scoring: Scoring):
    """The kernel's library for one choice of its constants."""
    given = {"windowed": scoring.window, "softcapped": scoring.softcap, "has_sinks": scoring.sinks}
    kernel = kernel_for(options, shape, **{name: value is not None for name, value in given.items()})
    places = {
        "extern __shared__ char memory[];": "char* memory = arena + STATIC_BYTES;",
        "__shared__ u64 barriers[BARRIERS];": "u64* barriers = (u64*)arena;",
        "__shared__ Work work;": "Work& work = *(Work*)(arena + STATIC_BYTES / 2);",
    }
    return emulated(folder, kernel, places, kernel.constants, ENTRY)


def emulated(
    folder: Path, kernel: NativeKernel, places: Mapping[str, str], constants: Mapping[str, int], entry: str
) -> Any:
    """A library's function `emulate`. `places`: where in the arena the kernel's variables in shared memory are."""
    _, text = kernel.source.split(FOLDER.joinpath("hopper_primitives.cuh").read_text())
    for shared, place in places.items():
        assert shared in text
        text = text.replace(shared, place)
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    header = Path(__file__).with_name("emulated_hopper.hpp")
    source.write_text(f'#include "{header}"\n{text}\n{entry}')
    flags = [
        "-O1",
        "-std=c++20",
        "-w",
        "-shared",
        "-fPIC",
        "-fno-gnu-unique",
        *(f"-D{name}={value}" for name, value in constants.items()),
        *MORE_FLAGS,
    ]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(library)], check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(library)).emulate


def attend_emulated(emulate, case, scoring: Scoring, *, programs: int, seed: int, heads_at_once: int) -> None:
    """As `flash_prefill.attend`, over tensors of the CPU."""
    tokens, heads, head_dim = case.queries.shape
    shape = case.cache.kv.shape_for(case.queries)
    group = shape.group
    tile_tokens = case.work.tile_rows // group
    rows = case.cache.k.numel() // head_dim
    stride = case.queries.stride(0)
    boxes = [(case.queries, (head_dim, heads, tokens), (1, head_dim, stride), (SLICE, group, tile_tokens))]
    boxes += [(c, (head_dim, rows, 1), (1, head_dim, 0), (SLICE, SPAN, 1)) for c in (case.cache.k, case.cache.v)]
    maps = (Map * 3)(*(Map(t.data_ptr(), size, strides, box) for t, size, strides, box in boxes))
    units = len(case.work.items) * shape.kv_heads
    scratch = case.scratch
    table_stride = ctypes.c_longlong(case.cache.table.stride(0))
    pointers = (case.cache.table, case.work.items, case.out, scratch.partials, scratch.log_sums, scratch.claims)
    pointers = (*pointers, scoring.sinks)
    stuck = emulate(
        maps, *(ctypes.c_void_p(None if one is None else one.data_ptr()) for one in pointers), table_stride, units,
        heads_at_once, ctypes.c_float(scoring.factor), ctypes.c_float(scoring.cap_factor or 0.0), scoring.window or 0,
        min(programs, units), seed,
    )  # fmt: skip
    assert stuck == 0, f"program {stuck - 1} of {programs} hangs"
    assert int(scratch.claims) == 0
    join_tiles(case.work, scratch, case.out, shape, scoring.sinks)
