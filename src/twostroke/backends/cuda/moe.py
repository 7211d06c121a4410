"""The mixture of experts of a layer on the device: its weights, the scratch that all layers share, and how its kernels
follow each other. Which of them multiply is the table's to say. Nothing here waits for the device or allocates."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from twostroke.backends.cuda.kernels import moe_combine, moe_decode, moe_routing
from twostroke.backends.cuda.kernels.activation import Gate, activation_of
from twostroke.backends.cuda.kernels.expert_choice import RouterTerms
from twostroke.backends.cuda.kernels.expert_numbers import ExpertMatrix
from twostroke.backends.cuda.kernels.expert_tiles import FewTile, GroupedTile, HopperTile, UnpackedTile
from twostroke.backends.cuda.kernels.expert_units import ExpertUnits, dequantise_units_into
from twostroke.backends.cuda.kernels.float8_products import float8_matmul
from twostroke.backends.cuda.kernels.float8_room import RowRoom, padded_width, weights_in_float8
from twostroke.backends.cuda.kernels.float8_tiles import Float8Tile
from twostroke.backends.cuda.kernels.hopper_grouped import hopper_grouped_matmul
from twostroke.backends.cuda.kernels.moe_combine import NextNorm
from twostroke.backends.cuda.kernels.moe_decode import Routed
from twostroke.backends.cuda.kernels.moe_grouped import grouped_matmul
from twostroke.backends.cuda.kernels.moe_routing import Order, RoutingScratch
from twostroke.backends.cuda.kernels.norms import rms_norm
from twostroke.backends.cuda.kernels.packed_products import packed_experts_product
from twostroke.backends.cuda.kernels.packed_tiles import PackedTile
from twostroke.backends.cuda.kernels.product_kernels import NEEDS_ROOM
from twostroke.backends.cuda.kernels.rank_rows import keep_held
from twostroke.backends.cuda.matrix import Matrix
from twostroke.backends.cuda.tuned_table import Choices, KernelChoice
from twostroke.models.spec import MoeSpec


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Of an MLP beside the experts, that every token meets."""

    gate_up: Matrix  # [2 * intermediate, hidden]: gate, then up
    down: Matrix  # [hidden, intermediate]
    router: torch.Tensor | None  # [1, hidden]: of its share


@dataclass(frozen=True, slots=True)
class ExpertNorms:
    """Of router and experts that read the residual stream themselves, and of what they and the MLP beside them give."""

    router: torch.Tensor  # [hidden] each
    experts: torch.Tensor
    post_experts: torch.Tensor
    post_shared: torch.Tensor


@dataclass(frozen=True, slots=True)
class LatentPair:
    """Of experts that read and give fewer numbers than a token has: what brings tokens there, and results back."""

    down: Matrix  # [latent, hidden]
    up: Matrix  # [hidden, latent]


@dataclass(frozen=True, slots=True)
class MoeWeights:
    router: torch.Tensor  # [experts, hidden]
    gate_up: Matrix  # [experts, 2 * intermediate, hidden]: gate, then up; or latent in place of hidden, here and below
    down: Matrix  # [experts, hidden, intermediate]
    router_bias: torch.Tensor | None = None  # float32 [experts]
    router_correction: torch.Tensor | None = None  # float32 [experts]
    shared: SharedWeights | None = None
    norms: ExpertNorms | None = None
    scales: torch.Tensor | None = None  # float32 [experts]
    latent: LatentPair | None = None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        latent = () if self.latent is None else (self.latent.down, self.latent.up)
        shared = () if self.shared is None else (self.shared.gate_up, self.shared.down)
        return self.gate_up, self.down, *latent, *shared


class MoeScratch:
    """Room for the intermediate results of one layer; layers run one after another and share it."""

    def __init__(
        self,
        moe: MoeSpec,
        hidden_size: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
        unpacked_weights: int = 0,
        *,
        in_float8: bool = False,
    ) -> None:
        """`unpacked_weights`: of the largest matrix of all experts that is brought to floats for long prompts.
        `in_float8`: whether rows may be rounded to float8."""
        experts, top_k, pairs = moe.num_experts, moe.experts_per_token, max_tokens * moe.experts_per_token

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.logits = torch.zeros(max_tokens, experts, dtype=torch.float32, device=device)
        self.routing = RoutingScratch(experts, max_tokens, device)
        self.shares = torch.zeros(max_tokens, top_k, dtype=torch.float32, device=device)
        self.starts = integers(experts + 1)
        self._held_starts = None if moe.held is None else integers(len(moe.held_experts) + 1)
        self._first_held = moe.held_experts.start
        self.sorted_pairs = integers(pairs)
        self.rows = integers(max_tokens, top_k)
        self.chosen = integers(max_tokens, top_k)
        self.activations = torch.zeros(pairs, moe.expert_intermediate_size, dtype=dtype, device=device)
        # A few tokens never need these: their experts are summed where they are computed.
        width = moe.expert_hidden(hidden_size)
        self.expert_outputs = torch.zeros(pairs, width, dtype=dtype, device=device)
        # Of tokens whose experts read fewer numbers: those, and what the experts found.
        latent = (2, 0 if moe.latent_size is None else max_tokens, width)
        self.latent_rows, self.latent_found = torch.zeros(latent, dtype=dtype, device=device)
        self.unpacked = torch.zeros(unpacked_weights, dtype=dtype, device=device)
        widest = max(max_tokens * padded_width(hidden_size), pairs * padded_width(moe.expert_intermediate_size))
        self.rounded = RowRoom(widest if in_float8 else 0, device)
        # What a router of its own norm reads, and then what the experts give, which no stream takes as it is.
        self.beside = torch.zeros(max_tokens if moe.has_own_norms else 0, hidden_size, dtype=dtype, device=device)
        self._top_k = top_k

    def order(self, num_pairs: int) -> Order:
        """Of all experts."""
        return Order(self.sorted_pairs[:num_pairs], self.starts, self._top_k)

    def held_order(self, num_pairs: int) -> Order:
        """Of those that this rank holds: rows stay where they are, and those of other experts are nobody's."""
        if self._held_starts is None:
            return self.order(num_pairs)
        own = self.starts[self._first_held :][: len(self._held_starts)]
        return Order(self.sorted_pairs[:num_pairs], self._held_starts.copy_(own), self._top_k)


class MoeBlock:
    def __init__(self, moe: MoeSpec, weights: MoeWeights, choices: Choices) -> None:
        self._moe, self._weights, self._choices = moe, weights, choices
        self._held_share = len(moe.held_experts) / moe.num_experts
        self._gate: Gate = moe.activation if moe.clamp is None else moe.clamp
        self._alone = moe.expert.alone
        self._terms = RouterTerms(moe.routing, weights.router_bias, weights.router_correction, weights.scales)

    def forward(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        scratch: MoeScratch,
        *,
        residual: torch.Tensor | None = None,
        next_norm: NextNorm | None = None,
        for_router: torch.Tensor | None = None,
    ) -> None:
        """x [num_tokens, what experts read], normed -> out, of the same shape, on top of `residual` if there is one,
        which may be `out` itself; `x` may not, but `next_norm` may be written to it. `for_router`: what the router
        reads, and not `x`; it may be `out`. All contiguous."""
        for_router = x if for_router is None else for_router
        num_tokens, moe, weights = len(x), self._moe, self._weights
        num_pairs = num_tokens * moe.experts_per_token
        gates = self._choice(weights.gate_up, num_pairs)
        if isinstance(gates.tile, FewTile):
            self._few(x, for_router, out, scratch, residual, gates.tile)
            if next_norm is not None:
                rms_norm(out, next_norm.weight, next_norm.out, eps=next_norm.eps)
            return
        shares, rows, order = scratch.shares[:num_tokens], scratch.rows[:num_tokens], scratch.order(num_pairs)
        router, normalise = weights.router, moe.normalise_weights
        moe_routing.route(
            for_router, router, scratch.routing, shares, order, rows, normalise=normalise, terms=self._terms
        )
        activations, outputs = scratch.activations[:num_pairs], scratch.expert_outputs[:num_pairs]
        downs = self._choice(weights.down, num_pairs)
        if moe.held is not None:
            order = scratch.held_order(num_pairs)
            outputs.zero_()  # of experts that other ranks hold
        self.multiply(x, weights.gate_up, activations, order, gates, scratch)
        self.multiply(activations, weights.down, outputs, order, downs, scratch)
        moe_combine.combine(outputs, rows, shares, out, residual=residual, next_norm=next_norm)

    def prepare(self, scratch: MoeScratch) -> None:
        """Have every kernel of the grouped products compiled, whichever sizes of step follow: on rows of nobody."""
        scratch.starts.zero_()
        order, x = scratch.held_order(1), scratch.expert_outputs[:1]  # as wide as a token, and nobody's
        activations, weights = scratch.activations[:1], self._weights
        for matrix, places in ((weights.gate_up, (x, activations)), (weights.down, (activations, x))):
            for _, choice in self._choices.later_lines(matrix.product, matrix.form_names, 0):
                # Steps of few tokens are all launched at start; what no step is long enough for has no room.
                is_too_long = choice.kernel.name in NEEDS_ROOM and not len(scratch.unpacked)
                if not isinstance(choice.tile, FewTile) and not is_too_long:
                    self.multiply(places[0], matrix, places[1], order, choice, scratch)

    def multiply(
        self,
        inputs: torch.Tensor,
        matrix: Matrix,
        results: torch.Tensor,
        order: Order,
        choice: KernelChoice,
        scratch: MoeScratch,
    ) -> None:
        """See `grouped_matmul`."""
        tile, kind, weights = choice.tile, self._gate if matrix.product.is_gated else None, None
        if isinstance(tile, PackedTile):
            coded, num_sms = matrix.coded_experts, self._choices.card.num_sms
            packed_experts_product(
                inputs, coded, results, order, tile=tile, num_sms=num_sms, gated=kind, bias=matrix.bias
            )
            return
        if isinstance(tile, Float8Tile):
            self._multiply_in_float8(inputs, matrix, results, order, tile, scratch)
            return
        if isinstance(tile, UnpackedTile):
            units, tile = matrix.low_bit, tile.inner
            assert isinstance(units, ExpertUnits)
            weights = scratch.unpacked[: prod(matrix.product.shape)].view(matrix.product.shape)
            dequantise_units_into(units, weights)
        if isinstance(tile, HopperTile):
            floats = matrix.weight if weights is None else weights
            hopper_grouped_matmul(inputs, floats, results, order, tile=tile, gated=activation_of(kind))
        else:
            assert isinstance(tile, GroupedTile)
            held = matrix.for_experts if weights is None else weights
            bias, alone = matrix.bias, self._alone if matrix.product.role == "activated" else None
            grouped_matmul(
                inputs, held, results, order, tile=tile, bias=bias, gated=kind or alone, has_up=kind is not None
            )

    def _multiply_in_float8(
        self,
        inputs: torch.Tensor,
        matrix: Matrix,
        results: torch.Tensor,
        order: Order,
        tile: Float8Tile,
        scratch: MoeScratch,
    ) -> None:
        held, role = matrix.low_bit, matrix.product.role
        assert isinstance(held, ExpertUnits | ExpertMatrix)
        kind = {"gated": self._gate, "activated": self._alone}.get(role)
        weights, rows = weights_in_float8(held, scratch.unpacked), scratch.rounded.rounded(inputs)
        float8_matmul(
            rows,
            weights,
            results,
            tile=tile,
            order=order,
            gathers=kind is not None,
            bias=matrix.bias,
            gated=kind,
            has_up=role == "gated",
        )

    def _choice(self, matrix: Matrix, num_pairs: int) -> KernelChoice:
        return self._choices.of(matrix.product, max(1, round(num_pairs * self._held_share)), matrix.form_names)

    def _few(
        self,
        x: torch.Tensor,
        for_router: torch.Tensor,
        out: torch.Tensor,
        scratch: MoeScratch,
        residual: torch.Tensor | None,
        tile: FewTile,
    ) -> None:
        routed, weights = self._route_few(for_router, scratch), self._weights
        activations = scratch.activations[: len(x) * routed.top_k]
        gate_up, down = weights.gate_up, weights.down
        moe_decode.few_tokens_gate_up(
            x, routed, gate_up.for_experts, activations, bias=gate_up.bias, kind=self._gate, tile=tile
        )
        normalise = self._moe.normalise_weights
        moe_decode.few_tokens_down(
            activations,
            routed,
            down.for_experts,
            out,
            normalise=normalise,
            bias=down.bias,
            residual=residual,
            tile=tile,
        )

    def _route_few(self, x: torch.Tensor, scratch: MoeScratch) -> Routed:
        top_k, router, num_tokens = self._moe.experts_per_token, self._weights.router, len(x)
        if self._terms.is_plain and self._moe.held is None:
            logits = scratch.logits[:num_tokens]
            moe_decode.router_logits(x, router, logits)
            return Routed(top_k, logits)
        shares, chosen = scratch.shares[:num_tokens], scratch.chosen[:num_tokens]
        tile, normalise = moe_routing.choose_tile(num_tokens), self._moe.normalise_weights
        moe_routing.choose_experts(
            x, router, scratch.routing, shares, normalise=normalise, terms=self._terms, tile=tile, chosen=chosen
        )
        if self._moe.held is not None:
            keep_held(chosen, shares, self._moe.held_experts.start, len(self._moe.held_experts))
        return Routed(top_k, chosen=chosen, shares=shares)
