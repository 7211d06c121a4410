"""Matrix products with packed weights for Hopper, in CUDA C++ (`packed_products.cu`): up to 256 rows, bound by reading
weights, of which there is a quarter less to read. Knows the launch; `packed_tiles.py` how it is cut."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files
from typing import Final

import torch

from twostroke.backends.cuda.kernels.activation import Activation
from twostroke.backends.cuda.kernels.cluster_products import GATES
from twostroke.backends.cuda.kernels.packed_format import DEPTH
from twostroke.backends.cuda.kernels.packed_tiles import PackedTile
from twostroke.backends.cuda.kernels.packed_weights import PackedMatrix
from twostroke.backends.cuda.kernels.wgmma import product_function
from twostroke.backends.cuda.native import NativeKernel, rows_to_read, tensor_map

SOURCES: Final = ("hopper_primitives.cuh", "gates.cuh", "packed.cuh", "packed_products.cu")
FOLDER: Final = files("twostroke.backends.cuda.kernels")


def packed_product(
    x: torch.Tensor,  # bfloat16 [num_rows, width], rows contiguous
    weight: PackedMatrix,
    out: torch.Tensor,  # [num_rows, outputs], or [splits, num_rows, outputs] float32 to be added up; contiguous
    *,
    tile: PackedTile,
    num_sms: int,
    gated: Activation | None = None,
) -> None:
    """out = x @ weight.T, gated if asked."""
    num_rows, width = x.shape
    outputs, is_float32 = out.shape[-1], out.dtype == torch.float32
    units, depth_rounds = weight.data.shape[-3:-1]
    rounds = depth_rounds // tile.splits
    assert num_rows <= tile.rows and rounds * tile.splits * DEPTH == width and out.is_contiguous()
    assert rounds % tile.rounds_at_once == 0 and not (gated and is_float32)
    assert weight.is_gated == (gated is not None) and (tile.splits == 1) == (out.dim() == 2)
    out_tiles = -(-units // tile.tile_units)
    tiles = out_tiles * tile.splits
    assert not tile.shared or tiles <= num_sms
    x_map = tensor_map(x, rows_to_read(x, tile.rows), tile.rows, DEPTH)
    pointers = (weight.data, weight.factors, out)
    numbers = (num_rows, outputs, units, depth_rounds, rounds, out_tiles, tiles)
    _kernel(tile, gated, is_float32).launch(
        min(tiles, num_sms),
        128 * (tile.groups + 1),
        [x_map, *(ctypes.c_void_p(each.data_ptr()) for each in pointers), *map(ctypes.c_int, numbers)],
        shared_bytes=tile.shared_bytes,
        dependent=True,
    )


@cache
def _kernel(tile: PackedTile, gated: Activation | None, is_float32: bool) -> NativeKernel:
    return NativeKernel(*source_and_constants(tile, gated, is_float32), architecture="sm_90a")


def source_and_constants(
    tile: PackedTile, gated: Activation | None, is_float32: bool
) -> tuple[str, str, dict[str, int]]:
    """What is compiled, its function, and the constants that it is compiled for."""
    constants = tile.constants() | {
        "GATED": GATES[gated],
        "FLOAT32": int(is_float32),
        "BFLOAT16": 1,
    }
    multiply = product_function("multiply", tile.rows, torch.bfloat16, from_registers=True)
    texts = (FOLDER.joinpath(name).read_text() for name in SOURCES)
    return "\n".join([multiply, *texts]), "product", constants
