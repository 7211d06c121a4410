"""The mixture of experts of a layer on the device: its weights, the scratch that all layers share, and the choice
between reading the chosen experts' weights for a few tokens, our grouped matrix products for more, and torch's for
many. Nothing here waits for the device; only torch's products allocate, from its cache, which a graph may capture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from twostroke.backends.cuda.kernels import moe_decode, moe_grouped, moe_routing, moe_rows
from twostroke.backends.cuda.kernels.activation import gated
from twostroke.backends.cuda.kernels.moe_decode import DOWN_TILE, GATE_UP_TILE, GemvTile
from twostroke.backends.cuda.kernels.moe_grouped import GroupedTile
from twostroke.backends.cuda.kernels.moe_rows import NextNorm
from twostroke.backends.cuda.kernels.norms import rms_norm
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.models.spec import MoeSpec

Path = Literal["few", "grouped", "torch"]

FEW_TOKENS = 4
"""Up to here tokens seldom share an expert, and sorting would save nothing."""
TORCH_FROM_ROWS = 64
"""From so many rows an expert, on average, torch's grouped products are faster than ours, with the copies around them
(`bench/cuda/moe.py`)."""


@dataclass(frozen=True, slots=True)
class MoeWeights:
    router: torch.Tensor  # [experts, hidden]
    gate_up: torch.Tensor  # [experts, 2 * intermediate, hidden]: gate, then up
    down: torch.Tensor  # [experts, hidden, intermediate]

    @staticmethod
    def empty(moe: MoeSpec, hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> MoeWeights:
        """To be filled: `gate_up[e, :intermediate]` is expert e's gate, the rest of `gate_up[e]` its up."""
        experts, intermediate = moe.num_experts, moe.expert_intermediate_size
        return MoeWeights(
            router=torch.empty(experts, hidden_size, dtype=dtype, device=device),
            gate_up=torch.empty(experts, 2 * intermediate, hidden_size, dtype=dtype, device=device),
            down=torch.empty(experts, hidden_size, intermediate, dtype=dtype, device=device),
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
        self.chosen = integers(max_tokens, top_k)
        self.shares = torch.zeros(max_tokens, top_k, dtype=torch.float32, device=device)
        self.starts = integers(experts + 1)
        self.sorted_pairs = integers(pairs)
        self.rows = integers(max_tokens, top_k)
        self.activations = torch.zeros(pairs, moe.expert_intermediate_size, dtype=dtype, device=device)
        # A few tokens never need these: their experts are summed where they are computed.
        self.expert_outputs = torch.zeros(pairs, hidden_size, dtype=dtype, device=device)

    @staticmethod
    def num_bytes(moe: MoeSpec, hidden_size: int, max_tokens: int) -> int:
        """In 16-bit types, with what torch's products take beside it for their results."""
        pairs, intermediate = max_tokens * moe.experts_per_token, moe.expert_intermediate_size
        kept = 2 * pairs * (intermediate + hidden_size) + max_tokens * (
            4 * moe.num_experts + 16 * moe.experts_per_token
        )
        return kept + 2 * pairs * (2 * intermediate + hidden_size) * _are_many(moe, max_tokens)


@dataclass(frozen=True, slots=True)
class MoeTiles:
    """What a benchmark may choose; None: by the number of tokens."""

    few_gate_up: GemvTile = GATE_UP_TILE
    few_down: GemvTile = DOWN_TILE
    grouped_gate_up: GroupedTile | None = None
    grouped_down: GroupedTile | None = None


_TILES = MoeTiles()


class MoeBlock:
    def __init__(self, moe: MoeSpec, weights: MoeWeights, activation: Literal["silu", "gelu_tanh"] = "silu") -> None:
        self._moe = moe
        self._weights = weights
        self._activation = activation
        self._has_torch_products = has_torch_products(weights)

    def forward(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        scratch: MoeScratch,
        *,
        residual: torch.Tensor | None = None,
        next_norm: NextNorm | None = None,
        pdl: bool = False,
        path: Path | None = None,
        tiles: MoeTiles = _TILES,
    ) -> None:
        """x [num_tokens, hidden], normed -> out [num_tokens, hidden], on top of `residual` if there is one, which may
        be `out` itself; `x` may not, but `next_norm` may be written to it. All contiguous."""
        if path is None:
            path = self.choose_path(x.shape[0])
        logits = scratch.logits[: x.shape[0]]
        moe_routing.router_logits(x, self._weights.router, logits, pdl=pdl)
        if path == "few":
            self._few(x, out, scratch, logits, residual, pdl, tiles)
            if next_norm is not None:
                rms_norm(out, next_norm.weight, next_norm.out, eps=next_norm.eps, pdl=pdl)
            return
        num_tokens, num_pairs = x.shape[0], x.shape[0] * self._moe.experts_per_token
        chosen, shares, rows = scratch.chosen[:num_tokens], scratch.shares[:num_tokens], scratch.rows[:num_tokens]
        moe_routing.route(logits, chosen, shares, normalise=self._moe.normalise_weights, pdl=pdl)
        moe_routing.sort_by_expert(chosen, scratch.starts, scratch.sorted_pairs[:num_pairs], rows, pdl=pdl)
        if path == "grouped":
            expert_outputs = self._grouped(x, scratch, num_pairs, pdl, tiles)
        else:
            expert_outputs = self._torch_grouped(x, scratch, num_pairs, pdl)
        moe_rows.combine(expert_outputs, rows, shares, out, residual=residual, next_norm=next_norm, pdl=pdl)

    def choose_path(self, num_tokens: int) -> Path:
        if num_tokens <= FEW_TOKENS:
            return "few"
        return "torch" if self._has_torch_products and _are_many(self._moe, num_tokens) else "grouped"

    def _few(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        scratch: MoeScratch,
        logits: torch.Tensor,
        residual: torch.Tensor | None,
        pdl: bool,
        tiles: MoeTiles,
    ) -> None:
        top_k, weights = self._moe.experts_per_token, self._weights
        activations = scratch.activations[: x.shape[0] * top_k]
        gelu, tile = self._activation == "gelu_tanh", tiles.few_gate_up
        moe_decode.few_tokens_gate_up(
            x, logits, weights.gate_up, activations, top_k=top_k, gelu=gelu, tile=tile, pdl=pdl
        )
        moe_decode.few_tokens_down(
            activations,
            logits,
            weights.down,
            out,
            top_k=top_k,
            normalise=self._moe.normalise_weights,
            residual=residual,
            tile=tiles.few_down,
            pdl=pdl,
        )

    def _grouped(
        self, x: torch.Tensor, scratch: MoeScratch, num_pairs: int, pdl: bool, tiles: MoeTiles
    ) -> torch.Tensor:
        """[num_pairs, hidden], sorted by expert"""
        moe, weights = self._moe, self._weights
        top_k, experts = moe.experts_per_token, moe.num_experts
        gate_up_tile = tiles.grouped_gate_up or moe_grouped.choose_tile(num_pairs, experts, gated=True)
        down_tile = tiles.grouped_down or moe_grouped.choose_tile(num_pairs, experts, gated=False)
        order = (scratch.sorted_pairs[:num_pairs], scratch.starts)
        activations, outputs = scratch.activations[:num_pairs], scratch.expert_outputs[:num_pairs]
        inputs = x
        if gate_up_tile.gathered:
            inputs = outputs  # which hold nothing yet
            moe_rows.gather(x, scratch.sorted_pairs[:num_pairs], inputs, top_k=top_k, pdl=pdl)
        moe_grouped.grouped_matmul(
            inputs,
            weights.gate_up,
            activations,
            *order,
            top_k=top_k,
            gated=True,
            tile=gate_up_tile,
            gelu=self._activation == "gelu_tanh",
            pdl=pdl,
        )
        moe_grouped.grouped_matmul(
            activations, weights.down, outputs, *order, top_k=top_k, gated=False, tile=down_tile, pdl=pdl
        )
        return outputs

    def _torch_grouped(self, x: torch.Tensor, scratch: MoeScratch, num_pairs: int, pdl: bool) -> torch.Tensor:
        """[num_pairs, hidden], sorted by expert. The ends of the groups stay on the device."""
        weights, ends = self._weights, scratch.starts[1:]
        gathered, activations = scratch.expert_outputs[:num_pairs], scratch.activations[:num_pairs]
        top_k = self._moe.experts_per_token
        moe_rows.gather(x, scratch.sorted_pairs[:num_pairs], gathered, top_k=top_k, pdl=pdl)
        gate_up = functional.grouped_mm(gathered, weights.gate_up.transpose(1, 2), offs=ends)
        gated(gate_up, activations, kind=self._activation, pdl=pdl)
        return functional.grouped_mm(activations, weights.down.transpose(1, 2), offs=ends)


def has_torch_products(weights: MoeWeights) -> bool:
    """Whether torch multiplies groups in one kernel. Where it does not it reads the groups' sizes on the host and goes
    over them one by one: in another type than bfloat16, and on chips other than Hopper and the first Blackwell."""
    target = target_of(weights.down.device)
    widths_suit = all(matrix.shape[2] % 8 == 0 for matrix in (weights.gate_up, weights.down))
    is_fast = target.capability[0] in (9, 10) and weights.down.dtype == torch.bfloat16 and widths_suit
    return is_fast and hasattr(functional, "grouped_mm")


def _are_many(moe: MoeSpec, num_tokens: int) -> bool:
    return num_tokens * moe.experts_per_token >= TORCH_FROM_ROWS * moe.num_experts
