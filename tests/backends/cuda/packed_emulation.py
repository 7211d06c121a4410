"""Runs products with packed weights on the CPU, by way of `emulated_hopper.hpp`: the kernels' own text."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tests.backends.cuda.emulation import Map, emulated

from twostroke.backends.cuda.kernels.activation import Activation, Gate
from twostroke.backends.cuda.kernels.moe_routing import Order
from twostroke.backends.cuda.kernels.packed_format import DEPTH
from twostroke.backends.cuda.kernels.packed_products import (
    Coded,
    CodedMatrix,
    experts_kernel,
    guesses_pay,
    product_kernel,
)
from twostroke.backends.cuda.kernels.packed_tiles import PackedTile
from twostroke.backends.cuda.native import NativeKernel, rows_to_read

RUN = """
  chance.seed(seed);
  for (int program = 0; program < programs; program++) {
    bool ended = run_program(program, programs, [&] { CALL });
    if (!ended) return 1 + program;
  }
  return 0;
}
"""
PRODUCT = """
extern "C" int emulate(const TensorMap* maps, const char* weights, const float* factors, char* out, int num_rows,
                       int outputs, int units, int depth_rounds, int rounds, int out_tiles, int tiles, int programs,
                       int seed) {
""" + RUN.replace(
    "CALL",
    "product(maps[0], maps[1], weights, factors, out, num_rows, outputs, units, depth_rounds, rounds, out_tiles, "
    "tiles);",
)
EXPERTS = """
extern "C" int emulate(const TensorMap* map, const char* inputs, const char* weights, const float* factors,
                       const unsigned short* bias, char* out, const int* sorted_pairs, const int* starts, int outputs,
                       int units, int rounds, int width, int out_tiles, int top_k, int guesses, int programs,
                       int seed) {
""" + RUN.replace(
    "CALL",
    "experts_product(*map, inputs, weights, factors, bias, out, sorted_pairs, starts, outputs, units, rounds, width, "
    "out_tiles, top_k, guesses);",
)
RING = {"extern __shared__ char shared[];": "char* shared = arena + STATIC_BYTES;"}


def product_emulated(
    x: torch.Tensor,
    weight: CodedMatrix,
    out: torch.Tensor,
    *,
    tile: PackedTile,
    num_sms: int,
    gated: Activation | None = None,
    seed: int = 0,
) -> None:
    """As `packed_product`, over tensors of the CPU."""
    out_tiles = -(-weight.units // tile.tile_units)
    tiles = out_tiles * tile.splits
    numbers = (len(x), out.shape[-1], weight.units, weight.rounds, weight.rounds // tile.splits, out_tiles, tiles)
    maps = [_map(x, rows_to_read(x, tile.rows), tile.rows)] * 2
    if weight.data.dim() == 2:
        pairs = weight.data.view(torch.bfloat16)
        maps[1] = _map(pairs, len(pairs), 32 if weight.is_gated else 64)
    _run(
        _product(tile, gated, out.dtype == torch.float32),
        maps,
        (weight.data, weight.factors, out),
        (*numbers, min(tiles, num_sms), seed),
    )


def experts_emulated(
    inputs: torch.Tensor,
    weights: Coded,
    results: torch.Tensor,
    order: Order,
    *,
    tile: PackedTile,
    num_sms: int,
    gated: Gate | None = None,
    bias: torch.Tensor | None = None,
    seed: int = 0,
) -> None:
    """As `packed_experts_product`."""
    experts, units, rounds = weights.data.shape[:3]
    guesses = guesses_pay(len(order.sorted_pairs), experts)
    out_tiles = -(-units // tile.tile_units)
    numbers = (results.shape[1], units, rounds, inputs.shape[1], out_tiles, order.top_k, int(guesses))
    _run(
        _experts(tile, experts, gated, bias is not None),
        [_map(inputs, len(inputs), tile.rows)],
        (inputs, weights.data, weights.factors, bias, results, order.sorted_pairs, order.starts),
        (*numbers, num_sms, seed),
    )


def _map(x: torch.Tensor, rows: int, box_rows: int) -> Map:
    return Map(x.data_ptr(), (x.shape[1], rows, 1), (1, x.stride(0), 0), (DEPTH, box_rows, 1))


def _run(emulate: Any, maps: list[Map], tensors: tuple[torch.Tensor | None, ...], numbers: tuple[int, ...]) -> None:
    places = (None if each is None else each.data_ptr() for each in tensors)
    stuck = emulate((Map * len(maps))(*maps), *map(ctypes.c_void_p, places), *numbers)
    assert stuck == 0, f"program {stuck - 1} hangs"


@cache
def _product(tile: PackedTile, gated: Activation | None, is_float32: bool) -> Any:
    places = RING | {"__shared__ u64 barriers[2 * STAGES];": "u64* barriers = (u64*)arena;"}
    return _built(product_kernel(tile, gated, is_float32), places, PRODUCT)


@cache
def _experts(tile: PackedTile, experts: int, gated: Gate | None, has_bias: bool) -> Any:
    places = RING | {
        "__shared__ u64 barriers[3 * STAGES];": "u64* barriers = (u64*)arena;",
        "__shared__ int own_starts[EXPERTS + 1];": "int* own_starts = (int*)(arena + STATIC_BYTES / 2);",
    }
    return _built(experts_kernel(tile, experts, gated, has_bias=has_bias), places, EXPERTS)


def _built(kernel: NativeKernel, places: dict[str, str], entry: str) -> Any:
    constants = {**kernel.constants, "WARP_GROUPS": kernel.constants["GROUPS"]}
    with TemporaryDirectory() as folder:  # what is loaded needs its file no more
        return emulated(Path(folder), kernel, places, constants, entry)
