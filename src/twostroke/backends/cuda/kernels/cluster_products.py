"""Matrix products of 16-bit weights for Hopper, of any number of rows, in CUDA C++ (`cluster_products.cu`): programs in
clusters fetch rows for one another, which Triton has no word for. Bound by reading weights up to some 200 rows, by
tensor cores beyond. A gate's activation costs no pass of its own. `cluster_tiles.py` knows how a product is cut."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

import torch

from twostroke.backends.cuda.kernels.activation import GATES, Activation
from twostroke.backends.cuda.kernels.cluster_tiles import ClusterTile
from twostroke.backends.cuda.kernels.product import DEPTH
from twostroke.backends.cuda.kernels.wgmma import product_function
from twostroke.backends.cuda.native import NativeKernel, rows_to_read, tensor_map

SOURCES: Final = ("hopper_primitives.cuh", "gates.cuh", "cluster_products.cu")
BAND_ROWS: Final = 2048
"""Rows whose tiles are walked together: their inputs stay in L2 while a layer's weights pass by."""


def cluster_product(
    x: torch.Tensor,  # [num_rows, width], rows contiguous
    weight: torch.Tensor,  # [outputs, width], contiguous; with gated [2 * outputs, width]: gate, then up
    out: torch.Tensor,  # [num_rows, outputs], contiguous; of a split depth float32, of several parts [parts, ...]
    *,
    tile: ClusterTile,
    num_sms: int,
    gated: Activation | None = None,
) -> None:
    """out = x @ weight.T, gated if asked."""
    num_rows, width = x.shape
    outputs, is_float32 = out.shape[-1], out.dtype == torch.float32
    splits, sharers = tile.splits, 1 if tile.is_split else tile.cluster
    assert width % (DEPTH * splits) == 0 and outputs % 8 == 0 and out.is_contiguous()
    assert not tile.is_split or (gated is None and is_float32)
    assert out.numel() == tile.parts * num_rows * outputs
    columns = tile.outputs // 2 if gated else tile.outputs
    row_tiles, out_blocks = -(-num_rows // tile.rows), -(-outputs // (columns * sharers))
    tiles = row_tiles * out_blocks * tile.parts
    copied = tile.copied_rows(num_rows)
    x_map = tensor_map(x, rows_to_read(x, (row_tiles - 1) * tile.rows + copied), copied // sharers, DEPTH)
    w_map = tensor_map(weight, len(weight), columns, DEPTH)
    kernel = kernel_for(tile, copied, gated, x.dtype, is_float32)
    numbers = (num_rows, outputs, width // DEPTH // splits, row_tiles, out_blocks, tiles)
    # A program whose depth is split has one tile, and gives its ring up for the sums.
    clusters = tiles if tile.is_split else min(tiles, num_sms // tile.cluster)
    kernel.launch(
        clusters * tile.cluster,
        128 * (tile.groups + 1),
        [x_map, w_map, ctypes.c_void_p(out.data_ptr()), *map(ctypes.c_int, numbers)],
        shared_bytes=tile.shared_bytes,
        cluster=tile.cluster,
        dependent=True,
    )


@cache
def kernel_for(
    tile: ClusterTile, copied: int, gated: Activation | None, dtype: torch.dtype, is_float32: bool
) -> NativeKernel:
    constants = {
        "ROW_BLOCKS": tile.row_blocks,
        "GROUPS": tile.groups,
        "COPIED": copied,
        "OUTPUTS": tile.outputs,
        "PIECES": tile.pieces,
        "CLUSTER": tile.cluster,
        "SPLIT": int(tile.is_split),
        "STAGES": tile.stages,
        "BAND": -(-BAND_ROWS // tile.rows),
        "GATED": GATES[gated],
        "FLOAT32": int(is_float32),
        "BFLOAT16": int(dtype == torch.bfloat16),
    }
    multiply = product_function("multiply", tile.outputs // tile.pieces, dtype)
    return NativeKernel.of("product", SOURCES, [multiply], constants)
