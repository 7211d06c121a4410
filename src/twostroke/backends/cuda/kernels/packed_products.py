"""Matrix products with weights of few bits for Hopper, in CUDA C++, bound by reading weights, of which there is less to
read: dense ones of up to 256 rows (`packed_products.cu`), and those of experts with up to 64 rows each
(`packed_experts.cu`). Knows the launches; `packed_tiles.py` and `expert_tiles.py` know how products are cut."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Final, Protocol

import torch

from twostroke.backends.cuda.kernels.activation import Activation, Gate, gate_constants
from twostroke.backends.cuda.kernels.expert_tiles import MAX_PACKED_EXPERTS
from twostroke.backends.cuda.kernels.moe_routing import Order
from twostroke.backends.cuda.kernels.packed_format import DEPTH, Code
from twostroke.backends.cuda.kernels.packed_tiles import PackedTile
from twostroke.backends.cuda.kernels.wgmma import product_function
from twostroke.backends.cuda.native import NativeKernel, TensorMap, rows_to_read, tensor_map

SOURCES: Final = ("hopper_primitives.cuh", "gates.cuh", "codes.cuh", "packed.cuh")


class Coded(Protocol):
    """Weights as one of these products takes them: a matrix, or those of all experts side by side."""

    @property
    def data(self) -> torch.Tensor:
        """uint8 [..., units, rounds, bytes]; of float8 by rows [rows, bytes]"""

    @property
    def factors(self) -> torch.Tensor | None:
        """float32 [..., rows of all units]"""

    @property
    def is_gated(self) -> bool: ...
    @property
    def code(self) -> Code: ...


class CodedMatrix(Coded, Protocol):
    @property
    def units(self) -> int: ...
    @property
    def rounds(self) -> int: ...


def packed_product(
    x: torch.Tensor,  # bfloat16 [num_rows, width], rows contiguous
    weight: CodedMatrix,
    out: torch.Tensor,  # [num_rows, outputs], or [splits, num_rows, outputs] float32 to be added up; contiguous
    *,
    tile: PackedTile,
    num_sms: int,
    gated: Activation | None = None,
) -> None:
    """out = x @ weight.T, gated if asked."""
    num_rows, width = x.shape
    outputs, is_float32, code = out.shape[-1], out.dtype == torch.float32, weight.code
    rounds = weight.rounds // tile.splits
    assert num_rows <= tile.rows and code == tile.code and code.rounds(width) == weight.rounds and out.is_contiguous()
    assert rounds * tile.splits == weight.rounds and rounds % tile.rounds_at_once == 0 and not (gated and is_float32)
    assert weight.is_gated == (gated is not None) and (tile.splits == 1) == (out.dim() == 2)
    out_tiles = -(-weight.units // tile.tile_units)
    tiles = out_tiles * tile.splits
    programs = min(tiles, num_sms * tile.at_once)
    assert not tile.shared or tiles == programs
    x_map = tensor_map(x, rows_to_read(x, tile.rows), tile.rows, DEPTH)
    w_map = x_map if weight.factors is None or weight.data.dim() != 2 else weights_map(weight)
    numbers = (num_rows, outputs, weight.units, weight.rounds, rounds, out_tiles, tiles)
    kernel = product_kernel(tile, gated, is_float32)
    _launch(kernel, programs, tile, (x_map, w_map), (weight.data, weight.factors, out), numbers)


def weights_map(weight: CodedMatrix) -> TensorMap:
    """Of float8 by rows: pairs of bytes, as the copy engine has 64 of them in a row of shared memory."""
    pairs = weight.data.view(torch.bfloat16)
    return tensor_map(pairs, len(pairs), 32 if weight.is_gated else 64, DEPTH)


def packed_experts_product(
    inputs: torch.Tensor,
    weights: Coded,
    results: torch.Tensor,
    order: Order,
    *,
    tile: PackedTile,
    num_sms: int,
    gated: Gate | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """As `moe_grouped.grouped_matmul`. bias: bfloat16."""
    experts, units, rounds = weights.data.shape[:3]
    width = inputs.shape[1]
    assert rounds % tile.rounds_at_once == 0 and experts <= MAX_PACKED_EXPERTS and tile.code == weights.code
    assert weights.is_gated == (gated is not None) and weights.code.rounds(width) == rounds and tile.splits == 1
    x_map = tensor_map(inputs, len(inputs), tile.rows, DEPTH)  # of rows in order
    tensors = (inputs, weights.data, weights.factors, bias, results, order.sorted_pairs, order.starts)
    out_tiles, guesses = -(-units // tile.tile_units), guesses_pay(len(order.sorted_pairs), experts)
    numbers = (results.shape[1], units, rounds, width, out_tiles, order.top_k, int(guesses))
    kernel = experts_kernel(tile, experts, gated, has_bias=bias is not None)
    _launch(kernel, num_sms, tile, (x_map,), tensors, numbers)


def guesses_pay(num_pairs: int, experts: int) -> bool:
    """Whether a program may ask for weights before it knows which experts have rows: few rows meet few experts."""
    return 2 * num_pairs >= experts


def _launch(
    kernel: NativeKernel,
    programs: int,
    tile: PackedTile,
    maps: Sequence[TensorMap],
    tensors: Sequence[torch.Tensor | None],
    numbers: Sequence[int],
) -> None:
    places = (None if each is None else each.data_ptr() for each in tensors)
    arguments = [*maps, *map(ctypes.c_void_p, places), *map(ctypes.c_int, numbers)]
    threads = 128 * (tile.groups + 1)
    kernel.launch(programs, threads, arguments, shared_bytes=tile.shared_bytes, dependent=True)


@cache
def product_kernel(tile: PackedTile, gated: Activation | None, is_float32: bool) -> NativeKernel:
    return _kernel("product", "packed_products.cu", tile, gated, {"FLOAT32": int(is_float32), "BIAS": 0})


@cache
def experts_kernel(tile: PackedTile, experts: int, gated: Gate | None, *, has_bias: bool = False) -> NativeKernel:
    constants = {"EXPERTS": experts, "BIAS": int(has_bias)}
    return _kernel("experts_product", "packed_experts.cu", tile, gated, constants)


def _kernel(name: str, file: str, tile: PackedTile, gated: Gate | None, more_constants: dict[str, int]) -> NativeKernel:
    constants = tile.constants() | gate_constants(gated) | {"BFLOAT16": 1} | more_constants
    multiply = product_function("multiply", tile.rows, torch.bfloat16, from_registers=True)
    return NativeKernel.of(name, (*SOURCES, file), [multiply], constants)
