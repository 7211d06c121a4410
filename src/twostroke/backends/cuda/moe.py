"""The mixture of experts of a layer on the device: its weights, the scratch that all layers share, and the choice
between reading the chosen experts' weights for a few tokens and grouped matrix products for more. Nothing here waits
for the device or allocates after construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton

from twostroke.backends.cuda.kernels import moe_decode, moe_grouped, moe_routing
from twostroke.backends.cuda.kernels.moe_decode import DOWN_TILE, GATE_UP_TILE, GemvTile
from twostroke.backends.cuda.kernels.moe_grouped import GroupedTile
from twostroke.models.spec import MoeSpec

Path = Literal["few", "grouped"]

FEW_TOKENS = 4
"""Up to here tokens seldom share an expert, and sorting would save nothing."""
_LEAST_CHUNK, _CHUNK, _CHUNK_FROM_TOKENS = 16, 32, 1024


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
        self.places = integers(max_tokens, top_k)
        self.counts = integers(triton.cdiv(max_tokens, _LEAST_CHUNK), experts)
        self.starts = integers(experts + 1)
        self.tile_ends = integers(experts)
        self.sorted_pairs = integers(pairs)
        self.rows = integers(max_tokens, top_k)
        self.activations = torch.zeros(pairs, moe.expert_intermediate_size, dtype=dtype, device=device)
        # A few tokens never need these: their experts are summed where they are computed.
        self.expert_outputs = torch.zeros(pairs, hidden_size, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class MoeTiles:
    """What a benchmark may choose; None: by the number of tokens."""

    few_gate_up: GemvTile = GATE_UP_TILE
    few_down: GemvTile = DOWN_TILE
    grouped_gate_up: GroupedTile | None = None
    grouped_down: GroupedTile | None = None
    """Of as many rows as `grouped_gate_up`: the rows are sorted for both at once."""


_TILES = MoeTiles()


class MoeBlock:
    def __init__(self, moe: MoeSpec, weights: MoeWeights, activation: Literal["silu", "gelu_tanh"] = "silu") -> None:
        self._moe = moe
        self._weights = weights
        self._gelu = activation == "gelu_tanh"

    def forward(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        scratch: MoeScratch,
        *,
        residual: torch.Tensor | None = None,
        pdl: bool = False,
        path: Path | None = None,
        tiles: MoeTiles = _TILES,
    ) -> None:
        """x [num_tokens, hidden], normed -> out [num_tokens, hidden], on top of `residual` if there is one, which may
        be `out` itself; `x` may not. All contiguous."""
        num_tokens = x.shape[0]
        if path is None:
            path = "few" if num_tokens <= FEW_TOKENS else "grouped"
        logits = scratch.logits[:num_tokens]
        moe_routing.router_logits(x, self._weights.router, logits, pdl=pdl)
        if path == "few":
            self._few(x, out, scratch, logits, residual, pdl, tiles)
        else:
            self._grouped(x, out, scratch, logits, residual, pdl, tiles)

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
        top_k = self._moe.experts_per_token
        activations = scratch.activations[: x.shape[0] * top_k]
        moe_decode.few_tokens_gate_up(
            x, logits, self._weights.gate_up, activations, top_k=top_k, gelu=self._gelu, tile=tiles.few_gate_up, pdl=pdl
        )
        moe_decode.few_tokens_down(
            activations,
            logits,
            self._weights.down,
            out,
            top_k=top_k,
            normalise=self._moe.normalise_weights,
            residual=residual,
            tile=tiles.few_down,
            pdl=pdl,
        )

    def _grouped(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        scratch: MoeScratch,
        logits: torch.Tensor,
        residual: torch.Tensor | None,
        pdl: bool,
        tiles: MoeTiles,
    ) -> None:
        moe, weights, num_tokens = self._moe, self._weights, x.shape[0]
        top_k, num_pairs = moe.experts_per_token, num_tokens * moe.experts_per_token
        gate_up_tile = tiles.grouped_gate_up or moe_grouped.choose_tile(num_pairs, moe.num_experts, gated=True)
        down_tile = tiles.grouped_down or moe_grouped.choose_tile(num_pairs, moe.num_experts, gated=False)
        if gate_up_tile.rows != down_tile.rows:
            raise ValueError(f"tiles of {gate_up_tile.rows} and of {down_tile.rows} rows: both need as many")
        chosen, shares, rows = scratch.chosen[:num_tokens], scratch.shares[:num_tokens], scratch.rows[:num_tokens]
        places, sorted_pairs = scratch.places[:num_tokens], scratch.sorted_pairs[:num_pairs]
        chunk = _LEAST_CHUNK if num_tokens < _CHUNK_FROM_TOKENS else _CHUNK
        moe_routing.route(
            logits, chosen, shares, places, scratch.counts, normalise=moe.normalise_weights, chunk=chunk, pdl=pdl
        )
        moe_routing.sort_by_expert(
            chosen,
            places,
            scratch.counts,
            scratch.starts,
            scratch.tile_ends,
            sorted_pairs,
            rows,
            chunk=chunk,
            tile_tokens=gate_up_tile.rows,
            pdl=pdl,
        )
        order = (sorted_pairs, scratch.starts, scratch.tile_ends)
        activations, outputs = scratch.activations[:num_pairs], scratch.expert_outputs[:num_pairs]
        moe_grouped.grouped_matmul(
            x,
            weights.gate_up,
            activations,
            *order,
            top_k=top_k,
            gated=True,
            tile=gate_up_tile,
            gelu=self._gelu,
            pdl=pdl,
        )
        moe_grouped.grouped_matmul(
            activations, weights.down, outputs, *order, top_k=top_k, gated=False, tile=down_tile, pdl=pdl
        )
        moe_grouped.combine(outputs, rows, shares, out, residual=residual, pdl=pdl)
