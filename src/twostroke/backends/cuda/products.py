"""A layer's matrices times the rows of a step, with what stands between them: gates, norms, the residual stream. Knows
who multiplies: on Hopper kernels of our own, which start to read weights before the kernel ahead has ended, one for
some dozens of rows, one that reads a packed copy of the weights, if there is one, and one for more rows; cuBLAS where
it is as good or they cannot run."""

from __future__ import annotations

import torch

from twostroke.backends.cuda.kernels import packed_tiles
from twostroke.backends.cuda.kernels.activation import Activation, gated
from twostroke.backends.cuda.kernels.cluster_products import cluster_product
from twostroke.backends.cuda.kernels.cluster_tiles import (
    MAX_SPLIT_ROWS,
    PARTS,
    ClusterTile,
    choose_cluster_tile,
    long_gate_tiles,
)
from twostroke.backends.cuda.kernels.gluon_layouts import ELEMENT_TYPES
from twostroke.backends.cuda.kernels.hopper_products import product
from twostroke.backends.cuda.kernels.norms import add_rms_norm, rms_norm, sandwich
from twostroke.backends.cuda.kernels.packed_products import packed_product
from twostroke.backends.cuda.kernels.packed_tiles import PackedTile, choose_packed_tile
from twostroke.backends.cuda.kernels.packed_weights import PackedMatrix
from twostroke.backends.cuda.kernels.product_tiles import MAX_ROWS, MAX_SPLITS, ProductTile, choose_tile
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.native import why_not
from twostroke.models.spec import ModelSpec

AnyTile = ProductTile | ClusterTile | PackedTile


class ProductScratch:
    """Room for what a product leaves for the kernel behind it; layers run one after another and share it."""

    def __init__(self, spec: ModelSpec, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.found = torch.zeros(num_tokens, spec.hidden_size, dtype=dtype, device=device)
        self.gate_up = torch.zeros(num_tokens, 2 * spec.dense_width, dtype=dtype, device=device)
        self.sums = torch.zeros(_most_sums(spec), dtype=torch.float32, device=device)

    @staticmethod
    def num_bytes(spec: ModelSpec, num_tokens: int) -> int:
        return 2 * num_tokens * (spec.hidden_size + 2 * spec.dense_width) + 4 * _most_sums(spec)


def _most_sums(spec: ModelSpec) -> int:
    """Of a product cut along its depth: parts of some dozens of rows, or of some hundreds."""
    packed = packed_tiles.MAX_SPLITS * packed_tiles.MAX_DENSE_ROWS
    return max(MAX_SPLITS * MAX_ROWS, PARTS * MAX_SPLIT_ROWS, packed) * spec.hidden_size


class Products:
    def __init__(self, spec: ModelSpec, scratch: ProductScratch) -> None:
        target = target_of(scratch.found.device)
        is_able = target.is_hopper and scratch.found.dtype in ELEMENT_TYPES
        self._has_products = is_able
        self._has_clusters = is_able and why_not() is None
        self._num_sms = target.num_sms
        self._eps, self._activation, self._scratch = spec.norm_eps, spec.layers[0].mlp.activation, scratch

    def prepare(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Have the kernels for gates of a prompt compiled, however many rows it will have: on rows of nobody."""
        tiles = long_gate_tiles(out.shape[1], x.shape[1], self._num_sms) if self._has_clusters else ()
        for tile in tiles:
            self._multiply(x, weight, None, out, tile, gated=self._activation)
        gated(self._scratch.gate_up[: len(x)], out, kind=self._activation)  # behind cuBLAS

    def plain(
        self,
        x: torch.Tensor,  # [num_rows, width]
        weight: torch.Tensor,  # [outputs, width]
        bias: torch.Tensor | None,
        out: torch.Tensor,  # [num_rows, outputs]
        *,
        packed: PackedMatrix | None = None,
    ) -> None:
        tile = self._tile(x, len(weight), packed) if bias is None else None
        if tile is not None:
            self._multiply(x, weight, packed, out, tile)
        elif bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)

    def wide(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        *,
        packed: PackedMatrix | None = None,
    ) -> None:
        """With float32 results: in 16 bits many of a vocabulary's logits would be equal."""
        tile = self._tile(x, len(weight), packed, is_float32=True)
        if tile is not None:
            self._multiply(x, weight, packed, out, tile)
        elif x.is_cuda:
            torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        else:
            torch.mm(x.float(), weight.float().t(), out=out)

    def gated(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        *,
        packed: PackedMatrix | None = None,
    ) -> None:
        """out [num_rows, intermediate] = activation(x @ gate) * (x @ up); `weight` is gate, then up."""
        tile = self._tile(x, out.shape[1], packed, is_gated=True)
        if tile is not None:
            self._multiply(x, weight, packed, out, tile, gated=self._activation)
            return
        gate_up = self._scratch.gate_up[: len(x)]
        torch.mm(x, weight.t(), out=gate_up)
        gated(gate_up, out, kind=self._activation)

    def join(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        post_norm: torch.Tensor | None,
        next_norm: torch.Tensor | None,
        normed: torch.Tensor,
        *,
        packed: PackedMatrix | None = None,
    ) -> None:
        """What a block found joins the residual stream, which is then normed for the next block, if there is one."""
        out = None if next_norm is None else normed
        tile = self._tile(x, len(weight), packed, may_split=True) if bias is None else None
        if tile is None and post_norm is None:
            residual.addmm_(x, weight.t())
            if bias is not None:
                residual.add_(bias)
            if next_norm is not None:
                rms_norm(residual, next_norm, normed, eps=self._eps)
            return
        found = self._scratch.found[: len(x)]
        if tile is None:
            self.plain(x, weight, bias, found)
        else:
            sums = self._scratch.sums
            parts = tile.parts if isinstance(tile, ClusterTile) else tile.splits
            if parts > 1:
                found = sums[: parts * found.numel()].view(parts, *found.shape)
            elif isinstance(tile, ClusterTile):
                found = sums[: found.numel()].view(found.shape)
            self._multiply(x, weight, packed, found, tile)
        if post_norm is None:
            add_rms_norm(found, residual, next_norm, out, eps=self._eps)
        else:
            sandwich(found, post_norm, residual, next_norm, out, eps=self._eps)

    def _tile(
        self,
        x: torch.Tensor,
        outputs: int,
        packed: PackedMatrix | None,
        *,
        is_gated: bool = False,
        may_split: bool = False,
        is_float32: bool = False,
    ) -> AnyTile | None:
        num_rows, width = x.shape
        tile: AnyTile | None = None
        if packed is not None:
            size = (num_rows, *packed.data.shape[-3:-1], self._num_sms)
            tile = choose_packed_tile(*size, gated=is_gated, may_split=may_split, is_float32=is_float32)
        shape = (num_rows, outputs, width, self._num_sms)
        if tile is None and self._has_clusters:
            tile = choose_cluster_tile(*shape, gated=is_gated, may_split=may_split)
        if tile is None and self._has_products:
            return choose_tile(*shape, gated=is_gated, may_split=may_split)
        return tile

    def _multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        packed: PackedMatrix | None,
        out: torch.Tensor,
        tile: AnyTile,
        *,
        gated: Activation | None = None,
    ) -> None:
        if isinstance(tile, PackedTile):
            assert packed is not None
            packed_product(x, packed, out, tile=tile, num_sms=self._num_sms, gated=gated)
        elif isinstance(tile, ClusterTile):
            cluster_product(x, weight, out, tile=tile, num_sms=self._num_sms, gated=gated)
        else:
            product(x, weight, out, tile=tile, gated=gated)
