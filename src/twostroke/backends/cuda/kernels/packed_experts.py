"""The experts' matrix products with packed weights for Hopper, in CUDA C++ (`packed_experts.cu`): of up to 40 rows an
expert, as decode and short prompts have them, bound by reading the chosen experts' weights. `moe_grouped.py` takes
every other device and shape."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files
from typing import Final

import torch

from twostroke.backends.cuda.kernels.activation import Activation
from twostroke.backends.cuda.kernels.cluster_products import GATES
from twostroke.backends.cuda.kernels.expert_tiles import MAX_PACKED_EXPERTS
from twostroke.backends.cuda.kernels.moe_routing import Order
from twostroke.backends.cuda.kernels.packed_format import DEPTH
from twostroke.backends.cuda.kernels.packed_tiles import PackedTile
from twostroke.backends.cuda.kernels.packed_weights import PackedMatrix
from twostroke.backends.cuda.kernels.wgmma import product_function
from twostroke.backends.cuda.native import NativeKernel, tensor_map

SOURCES: Final = ("hopper_primitives.cuh", "gates.cuh", "packed.cuh", "packed_experts.cu")
FOLDER: Final = files("twostroke.backends.cuda.kernels")


def packed_experts_product(
    inputs: torch.Tensor,
    weights: PackedMatrix,
    results: torch.Tensor,
    order: Order,
    *,
    tile: PackedTile,
    num_sms: int,
    gated: Activation | None = None,
) -> None:
    """As `moe_grouped.grouped_matmul`."""
    experts, units, depth_rounds = weights.data.shape[:3]
    width = depth_rounds * DEPTH
    assert depth_rounds % tile.rounds_at_once == 0 and experts <= MAX_PACKED_EXPERTS
    assert weights.is_gated == (gated is not None) and inputs.shape[1] == width and tile.splits == 1
    x_map = tensor_map(inputs, len(inputs), tile.rows, DEPTH)  # of rows in order
    pointers = (inputs, weights.data, weights.factors, results, order.sorted_pairs, order.starts)
    numbers = (results.shape[1], units, width, -(-units // tile.tile_units), order.top_k)
    _kernel(tile, experts, gated).launch(
        num_sms,
        128 * (tile.groups + 1),
        [x_map, *(ctypes.c_void_p(each.data_ptr()) for each in pointers), *map(ctypes.c_int, numbers)],
        shared_bytes=tile.shared_bytes,
        dependent=True,
    )


@cache
def _kernel(tile: PackedTile, experts: int, gated: Activation | None) -> NativeKernel:
    return NativeKernel(*source_and_constants(tile, experts, gated), architecture="sm_90a")


def source_and_constants(tile: PackedTile, experts: int, gated: Activation | None) -> tuple[str, str, dict[str, int]]:
    """What is compiled, its function, and the constants that it is compiled for."""
    constants = tile.constants() | {
        "EXPERTS": experts,
        "GATED": GATES[gated],
        "BFLOAT16": 1,
    }
    multiply = product_function("multiply", tile.rows, torch.bfloat16, from_registers=True)
    texts = (FOLDER.joinpath(name).read_text() for name in SOURCES)
    return "\n".join([multiply, *texts]), "experts_product", constants
