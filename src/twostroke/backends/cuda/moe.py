"""The mixture of experts of a layer on the device: its weights, the scratch that all layers share, and the choice
between reading the chosen experts' weights for a few tokens and grouped matrix products for more. Nothing here waits
for the device or allocates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from twostroke.backends.cuda.kernels import moe_combine, moe_decode, moe_grouped, moe_routing
from twostroke.backends.cuda.kernels.activation import Activation
from twostroke.backends.cuda.kernels.grouped_tiles import HopperTile
from twostroke.backends.cuda.kernels.moe_combine import NextNorm
from twostroke.backends.cuda.kernels.moe_decode import DOWN_TILE, GATE_UP_TILE, GemvTile
from twostroke.backends.cuda.kernels.moe_grouped import GroupedTile
from twostroke.backends.cuda.kernels.moe_routing import RoutingScratch, RoutingTile
from twostroke.backends.cuda.kernels.norms import rms_norm
from twostroke.backends.cuda.kernels.packed_experts import packed_experts_product
from twostroke.backends.cuda.kernels.packed_tiles import EXPERT_ROWS, PackedTile, choose_experts_tile, experts_tile
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.matrix import Matrix, Plain
from twostroke.models.spec import MoeSpec

Path = Literal["few", "grouped"]

FEW_TOKENS = 4
"""Up to here tokens seldom share an expert, and sorting would save nothing."""


@dataclass(frozen=True, slots=True)
class MoeWeights:
    router: torch.Tensor  # [experts, hidden]
    gate_up: Matrix  # [experts, 2 * intermediate, hidden]: gate, then up
    down: Matrix  # [experts, hidden, intermediate]

    @staticmethod
    def empty(moe: MoeSpec, hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> MoeWeights:
        """To be filled: of `gate_up`, expert e's rows are its gate, then its up."""
        experts, intermediate = moe.num_experts, moe.expert_intermediate_size

        def empty(name: str, product: Product) -> Matrix:
            return Matrix(name, product, {"plain": Plain(torch.empty(product.shape, dtype=dtype, device=device))})

        return MoeWeights(
            router=torch.empty(experts, hidden_size, dtype=dtype, device=device),
            gate_up=empty("gate_up", Product("gated", intermediate, hidden_size, experts=experts)),
            down=empty("down", Product("join", hidden_size, intermediate, experts=experts)),
        )


class MoeScratch:
    """Room for the intermediate results of one layer; layers run one after another and share it."""

    def __init__(
        self, moe: MoeSpec, hidden_size: int, max_tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        experts, top_k, pairs = moe.num_experts, moe.experts_per_token, max_tokens * moe.experts_per_token

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.logits = torch.zeros(max_tokens, experts, dtype=torch.float32, device=device)
        self.routing = RoutingScratch(experts, max_tokens, device)
        self.shares = torch.zeros(max_tokens, top_k, dtype=torch.float32, device=device)
        self.starts = integers(experts + 1)
        self.sorted_pairs = integers(pairs)
        self.rows = integers(max_tokens, top_k)
        self.activations = torch.zeros(pairs, moe.expert_intermediate_size, dtype=dtype, device=device)
        # A few tokens never need these: their experts are summed where they are computed.
        self.expert_outputs = torch.zeros(pairs, hidden_size, dtype=dtype, device=device)

    @staticmethod
    def num_bytes(moe: MoeSpec, hidden_size: int, max_tokens: int) -> int:
        """In 16-bit types."""
        pairs = max_tokens * moe.experts_per_token
        experts = moe.num_experts
        routing = 4 * (max_tokens * experts + experts + 1) + RoutingScratch.num_bytes(experts, max_tokens)
        return pairs * (2 * (moe.expert_intermediate_size + hidden_size) + 12) + routing


@dataclass(frozen=True, slots=True)
class MoeTiles:
    """What a benchmark may choose; None: by the number of tokens."""

    few_gate_up: GemvTile = GATE_UP_TILE
    few_down: GemvTile = DOWN_TILE
    routing: RoutingTile | None = None
    grouped_gate_up: GroupedTile | HopperTile | PackedTile | None = None
    grouped_down: GroupedTile | HopperTile | PackedTile | None = None


_TILES = MoeTiles()


def choose_path(num_tokens: int) -> Path:
    return "few" if num_tokens <= FEW_TOKENS else "grouped"


class MoeBlock:
    def __init__(
        self,
        moe: MoeSpec,
        weights: MoeWeights,
        activation: Activation = "silu",
    ) -> None:
        self._moe = moe
        self._weights = weights
        self._activation = activation

    def forward(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        scratch: MoeScratch,
        *,
        residual: torch.Tensor | None = None,
        next_norm: NextNorm | None = None,
        path: Path | None = None,
        tiles: MoeTiles = _TILES,
    ) -> None:
        """x [num_tokens, hidden], normed -> out [num_tokens, hidden], on top of `residual` if there is one, which may
        be `out` itself; `x` may not, but `next_norm` may be written to it. All contiguous."""
        if path is None:
            path = choose_path(x.shape[0])
        if path == "few":
            self._few(x, out, scratch, residual, tiles)
            if next_norm is not None:
                rms_norm(out, next_norm.weight, next_norm.out, eps=next_norm.eps)
            return
        num_tokens, num_pairs = x.shape[0], x.shape[0] * self._moe.experts_per_token
        shares, rows = scratch.shares[:num_tokens], scratch.rows[:num_tokens]
        moe_routing.route(
            x,
            self._weights.router,
            scratch.routing,
            shares,
            scratch.starts,
            scratch.sorted_pairs[:num_pairs],
            rows,
            normalise=self._moe.normalise_weights,
            tile=tiles.routing,
        )
        expert_outputs = self._grouped(x, scratch, num_pairs, tiles)
        moe_combine.combine(expert_outputs, rows, shares, out, residual=residual, next_norm=next_norm)

    def prepare(self, scratch: MoeScratch) -> None:
        """Have every kernel of the grouped products compiled, whichever sizes of step follow: on rows of nobody."""
        scratch.starts.zero_()
        x = scratch.expert_outputs[:1]  # as wide as a token, and nobody's
        gates, downs = self._weights.gate_up, self._weights.down
        for tile in moe_grouped.tiles_for(gates.weight, gated=True):
            self._grouped(x, scratch, 1, MoeTiles(grouped_gate_up=tile))
        for tile in moe_grouped.tiles_for(downs.weight, gated=False):
            self._grouped(x, scratch, 1, MoeTiles(grouped_down=tile))
        if gates.packed is None and downs.packed is None:
            return
        for rows in EXPERT_ROWS:
            gate_up = None if gates.packed is None else experts_tile(rows, gated=True)
            down = None if downs.packed is None else experts_tile(rows, gated=False)
            self._grouped(x, scratch, 1, MoeTiles(grouped_gate_up=gate_up, grouped_down=down))

    def _few(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        scratch: MoeScratch,
        residual: torch.Tensor | None,
        tiles: MoeTiles,
    ) -> None:
        top_k, weights = self._moe.experts_per_token, self._weights
        logits = scratch.logits[: x.shape[0]]
        moe_routing.router_logits(x, weights.router, logits)
        activations = scratch.activations[: x.shape[0] * top_k]
        kind, tile = self._activation, tiles.few_gate_up
        moe_decode.few_tokens_gate_up(x, logits, weights.gate_up.weight, activations, top_k=top_k, kind=kind, tile=tile)
        moe_decode.few_tokens_down(
            activations,
            logits,
            weights.down.weight,
            out,
            top_k=top_k,
            normalise=self._moe.normalise_weights,
            residual=residual,
            tile=tiles.few_down,
        )

    def _grouped(self, x: torch.Tensor, scratch: MoeScratch, num_pairs: int, tiles: MoeTiles) -> torch.Tensor:
        """[num_pairs, hidden], sorted by expert"""
        weights = self._weights
        order = (scratch.sorted_pairs[:num_pairs], scratch.starts)
        activations, outputs = scratch.activations[:num_pairs], scratch.expert_outputs[:num_pairs]
        self._multiply(x, weights.gate_up, activations, order, tiles.grouped_gate_up)
        self._multiply(activations, weights.down, outputs, order, tiles.grouped_down)
        return outputs

    def _multiply(
        self,
        inputs: torch.Tensor,
        matrix: Matrix,
        results: torch.Tensor,
        order: tuple[torch.Tensor, torch.Tensor],
        tile: GroupedTile | HopperTile | PackedTile | None,
    ) -> None:
        """By the packed copy of the weights, if there is one and the rows are few enough for it."""
        num_pairs, top_k = len(order[0]), self._moe.experts_per_token
        gated, packed, weights = matrix.product.is_gated, matrix.packed, matrix.weight
        if tile is None and packed is not None:
            tile = choose_experts_tile(num_pairs, len(weights), packed.data.shape[-2], gated=gated)
        if tile is None:
            tile = moe_grouped.tile_for(num_pairs, weights, gated=gated)
        kind = self._activation if gated else None
        if isinstance(tile, PackedTile):
            assert packed is not None
            num_sms = target_of(inputs.device).num_sms
            packed_experts_product(inputs, packed, results, *order, top_k=top_k, tile=tile, num_sms=num_sms, gated=kind)
            return
        moe_grouped.grouped_matmul(inputs, weights, results, *order, top_k=top_k, tile=tile, gated=kind)
