"""Products with packed weights and what they must give: float32 products of the weights as they were packed. The same
cases run on a Hopper card and in its emulation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.backends.cuda.emulation import COMPILER
from tests.backends.cuda.packed_emulation import experts_emulated, product_emulated
from tests.backends.cuda.packed_reference import pack, unpacked
from torch.nn import functional

from twostroke.backends.cuda import native
from twostroke.backends.cuda.kernels.activation import Activation
from twostroke.backends.cuda.kernels.moe_routing import Order
from twostroke.backends.cuda.kernels.packed_products import packed_experts_product, packed_product
from twostroke.backends.cuda.kernels.packed_tiles import DENSE_ROWS, PackedTile
from twostroke.backends.cuda.kernels.packing import PackedMatrix

TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 1e-4}
"""Of the norm: what rounding results leaves, or what the order of a sum does."""
HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper device")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
SMS = 132
REPEATS = 1 if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ else 10
"""Launches of a kind that must give the same bits. Memcheck, which wants an allocation a tensor, looks at each."""


def by_kernel(device: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """The dense product and the experts', for tensors of this device."""
    return (packed_product, packed_experts_product) if device == "cuda" else (product_emulated, experts_emulated)


def packed_copy(weight: torch.Tensor, *, is_gated: bool = False) -> PackedMatrix:
    place = PackedMatrix.empty(tuple(weight.shape), weight.device, is_gated=is_gated)
    pack(weight, place)
    return place


def of_experts(packed: PackedMatrix, rows: int) -> list[torch.Tensor]:
    """[rows, depth] of each, as it was packed."""
    return [
        unpacked(PackedMatrix(data, factors, packed.is_gated), rows)
        for data, factors in zip(packed.data, packed.factors, strict=True)
    ]


def weights_at_random(*shape: int, device: str) -> torch.Tensor:
    """Rows of very different sizes, weights whose exponents span more than is kept, and zeros."""
    values = torch.randn(shape) * shape[-1] ** -0.5
    values *= torch.exp2(torch.randint(-3, 4, (*shape[:-1], 1)).float())
    values = torch.where(torch.rand(shape) < 0.05, values * 2.0**-13, values)
    values = torch.where(torch.rand(shape) < 0.02, torch.zeros(()), values)
    return values.to(torch.bfloat16).to(device)


def activated(sums: torch.Tensor, kind: Activation | None) -> torch.Tensor:
    if kind is None:
        return sums
    gate, up = sums.chunk(2, dim=-1)
    return (functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate="tanh")) * up


def assert_near(found: torch.Tensor, expected: torch.Tensor, kind: torch.dtype, roundings: int = 1) -> None:
    """After so many roundings of results to their type."""
    assert found.shape == expected.shape and not found.isnan().any(), f"{int(found.isnan().sum())} were not written"
    error = float((found.float() - expected).norm() / expected.norm())
    assert error < roundings * TOLERANCE[kind], f"error {error:.1e}"


class Dense:
    """One matrix, whose rows may be no whole number of units."""

    def __init__(
        self,
        outputs: int,
        width: int,
        device: str,
        kind: Activation | None = None,
        *,
        given: torch.Tensor | None = None,
        input_scale: float = 1.0,
        num_silent: int = 0,
    ) -> None:
        """`given`: its weights, where they are not drawn; `num_silent`: inputs, the first, that are zeros."""
        self.outputs, self.width, self.device, self.kind = outputs, width, device, kind
        self.input_scale, self.num_silent = input_scale, num_silent
        rows = outputs * (2 if kind else 1)
        weight = weights_at_random(rows, width, device=device) if given is None else given.to(device)
        self.packed = packed_copy(weight, is_gated=kind is not None)
        self.weight = unpacked(self.packed, rows).float()

    def check(
        self,
        num_rows: int,
        tile: PackedTile,
        dtype: torch.dtype,
        *,
        num_sms: int,
        times: int = 1,
        has_room: bool = False,
    ) -> None:
        """So many times, with the same bits each time."""
        multiply, _ = by_kernel(self.device)
        buffer = (torch.randn(tile.rows + 8, self.width) * self.input_scale).to(torch.bfloat16).to(self.device)
        buffer[:, : self.num_silent] = 0.0
        buffer[num_rows:] = float("nan")  # what lies behind the rows must not matter
        x = buffer[:num_rows] if has_room else buffer[:num_rows].clone()
        expected = activated(x.float() @ self.weight.T, self.kind)
        shape = (num_rows, self.outputs) if tile.splits == 1 else (tile.splits, num_rows, self.outputs)
        first = None
        for _ in range(times):
            guard = torch.full((1 + shape[0], *shape[1:]), float("nan"), dtype=dtype, device=self.device)
            out = guard[: shape[0]]
            multiply(x, self.packed, out, tile=tile, num_sms=num_sms, gated=self.kind)
            assert_near(out if tile.splits == 1 else out.sum(0), expected, dtype)
            assert guard[shape[0] :].isnan().all(), "written behind the last row"
            first = out if first is None else first
            assert torch.equal(out, first)


class Experts:
    def __init__(self, num_experts: int, outputs: int, width: int, device: str, kind: Activation | None) -> None:
        self.outputs, self.width, self.device, self.kind = outputs, width, device, kind
        rows = outputs * (2 if kind else 1)
        weights = weights_at_random(num_experts, rows, width, device=device)
        self.packed = packed_copy(weights, is_gated=kind is not None)
        self.weights = [weight.float() for weight in of_experts(self.packed, rows)]

    def check(self, counts: list[int], tile: PackedTile, *, num_sms: int, top_k: int = 3, times: int = 1) -> None:
        """`counts`: rows of each expert. Gates take tokens' own rows, others theirs in order."""
        _, multiply = by_kernel(self.device)
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(self.device)
        num_pairs = sum(counts)
        num_tokens = -(-num_pairs // top_k)
        pairs = torch.randperm(num_tokens * top_k)[:num_pairs].to(torch.int32).to(self.device)
        inputs = torch.randn(num_tokens if self.kind else num_pairs, self.width).to(torch.bfloat16).to(self.device)
        sources = (inputs[pairs.long() // top_k] if self.kind else inputs).float()
        sums = [part @ weight.T for part, weight in zip(sources.split(counts), self.weights, strict=True)]
        expected = activated(torch.cat(sums), self.kind)
        first = None
        for _ in range(times):
            guard = torch.full((num_pairs + 1, self.outputs), float("nan"), dtype=torch.bfloat16, device=self.device)
            out = guard[:num_pairs]
            order = Order(pairs, starts, top_k)
            multiply(inputs, self.packed, out, order, tile=tile, num_sms=num_sms, gated=self.kind)
            assert_near(out, expected, torch.bfloat16)
            assert guard[num_pairs].isnan().all(), "written behind the last row"
            first = out if first is None else first
            assert torch.equal(out, first)


def counts_of_rows(rows: int, experts: int) -> list[list[int]]:
    """Routings of all kinds, for tiles of so many rows."""
    drawn = torch.randint(0, 2 * rows, (experts,)).tolist()
    drawn[0] = 1
    return [
        [rows] * experts,  # every guess of a first tile is right
        [0] * (experts - 1) + [2 * rows + 3],  # one has all rows, and every guess is wrong
        [1] + [0] * (experts - 1),  # fewer tiles than programs
        [rows + 1, 0] + [2] * (experts - 2),  # a guess is wrong from the second expert on
        drawn,
    ]


def compile_all(kernels: Iterable[native.NativeKernel]) -> None:
    """NVRTC compiles beside itself; a test would wait for one after another."""
    with ThreadPoolExecutor(12) as threads:
        list(threads.map(lambda kernel: kernel.compile(), kernels))


def held_rows(rows: int) -> int:
    return next(size for size in DENSE_ROWS if rows <= size)
