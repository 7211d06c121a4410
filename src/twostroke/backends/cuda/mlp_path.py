"""What follows attention in a layer: an MLP, experts, or experts beside an MLP. Nothing here waits, allocates or reads
a number back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from twostroke.backends.cuda.buffers import Buffers
from twostroke.backends.cuda.kernels.activation import scale_by_gate
from twostroke.backends.cuda.kernels.moe_combine import NextNorm
from twostroke.backends.cuda.kernels.norms import add_rms_norm, rms_norm
from twostroke.backends.cuda.latent_experts import mix_latent_experts, prepare_latent_experts
from twostroke.backends.cuda.layer_weights import LayerWeights
from twostroke.backends.cuda.matrix import Matrix
from twostroke.backends.cuda.moe import ExpertNorms, MoeBlock, MoeWeights, SharedWeights
from twostroke.backends.cuda.products import Products, Stream
from twostroke.backends.cuda.ranked_experts import mix_held_experts
from twostroke.backends.cuda.ranks import CardRanks
from twostroke.backends.cuda.tuned_table import Choices
from twostroke.models.spec import ModelSpec


class MlpPath:
    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[LayerWeights],
        buffers: Buffers,
        products: Products,
        choices: Choices,
        ranks: CardRanks | None = None,
    ) -> None:
        """`ranks`: all those that hold a part of each."""
        self._spec, self._buffers, self._products, self._ranks = spec, buffers, products, ranks
        self._experts = [
            MoeBlock(own.moe, layer.mlp, choices) if own.moe and isinstance(layer.mlp, MoeWeights) else None
            for own, layer in zip(spec.layers, layers, strict=True)
        ]

    def prepare(self) -> None:
        """Have the experts' kernels compiled, which layers share."""
        experts, scratch = next((block for block in self._experts if block is not None), None), self._buffers.experts
        if experts is not None and scratch is not None:
            experts.prepare(scratch)

    def prepare_layer(
        self, layer: LayerWeights, stream_of: Callable[[int], Stream], each: Callable[[Matrix], list[int]]
    ) -> None:
        """Have its long products' kernels compiled. `each`: the numbers of rows that meet all of a matrix's."""
        buffers, products = self._buffers, self._products
        scratch, latent = buffers.experts, layer.mlp.latent if isinstance(layer.mlp, MoeWeights) else None
        if latent is not None and scratch is not None:
            prepare_latent_experts(latent, scratch, products, stream_of, layer.mlp_norm)
        mlp = layer.mlp.shared if isinstance(layer.mlp, MoeWeights) else layer.mlp
        if mlp is not None:
            width = mlp.gate_up.product.outputs
            for rows in each(mlp.gate_up):
                out = buffers.activated_of(rows, width)
                products.multiply(stream_of(rows), layer.mlp_norm, mlp.gate_up, out)
            for rows in each(mlp.down):
                inputs, following = buffers.activated_of(rows, width), layer.mlp_norm
                products.join(inputs, mlp.down, stream_of(rows), layer.post_mlp_norm, following)

    def go_through(
        self, index: int, layer: LayerWeights, stream: Stream, behind: LayerWeights | None, scale: torch.Tensor | None
    ) -> None:
        """What a layer's MLP or experts find joins the stream. `behind`: the layer that reads it next."""
        mlp, products, num_rows = layer.mlp, self._products, len(stream.residual)
        next_norm = None if behind is None else behind.first_norm
        if isinstance(mlp, MoeWeights):
            if mlp.norms is not None:
                self._mix_experts_beside(index, layer, mlp, mlp.norms, stream, next_norm, scale)
                return
            if behind is not None and products.fuses(behind.first_matrix, num_rows):
                next_norm = None
            self._mix_experts(index, layer, stream, next_norm)
        elif mlp is not None:
            activated = self._buffers.activated_of(num_rows, mlp.gate_up.product.outputs)
            products.multiply(stream, layer.mlp_norm, mlp.gate_up, activated)
            products.join(activated, mlp.down, stream, layer.post_mlp_norm, next_norm, scale, self._ranks)
            products.end(stream, layer.after_mlp)

    def _mix_experts(self, index: int, layer: LayerWeights, stream: Stream, next_norm: torch.Tensor | None) -> None:
        experts, scratch, residual = self._experts[index], self._buffers.experts, stream.residual
        assert experts is not None and scratch is not None
        if self._ranks is not None and isinstance(layer.mlp, MoeWeights):
            shared, activated = layer.mlp.shared, None
            if shared is not None:
                activated = self._buffers.activated_of(len(residual), shared.gate_up.product.outputs)
            norms = layer.mlp_norm, next_norm
            mix_held_experts(
                experts, layer.mlp, scratch, self._products, stream, *norms, activated=activated, ranks=self._ranks
            )
            return
        normed = self._products.normed(stream, layer.mlp_norm)
        latent = None
        if isinstance(layer.mlp, MoeWeights):
            latent = layer.mlp.latent
            if layer.mlp.shared is not None:
                self._add_shared(layer, layer.mlp.shared, stream, normed)
        if latent is not None:
            mix_latent_experts(experts, latent, scratch, self._products, stream, normed, next_norm)
            return
        following = None if next_norm is None else NextNorm(next_norm, normed, self._spec.norm_eps)
        experts.forward(normed, residual, scratch, residual=residual, next_norm=following)
        stream.normed_by = next_norm

    def _mix_experts_beside(
        self,
        index: int,
        layer: LayerWeights,
        mlp: MoeWeights,
        norms: ExpertNorms,
        stream: Stream,
        next_norm: torch.Tensor | None,
        scale: torch.Tensor | None,
    ) -> None:
        """Router and experts read the stream through norms of their own, beside the MLP that every token meets. What
        either gives is normed, then their sum."""
        experts, scratch, products = self._experts[index], self._buffers.experts, self._products
        residual, room, eps, num_rows = stream.residual, stream.room, self._spec.norm_eps, len(stream.residual)
        shared, found = mlp.shared, products.found(num_rows)
        assert experts is not None and scratch is not None and shared is not None
        activated = self._buffers.activated_of(num_rows, shared.gate_up.product.outputs)
        products.multiply(stream, layer.mlp_norm, shared.gate_up, activated)
        products.apply(activated, shared.down, found)
        if self._ranks is not None:
            self._ranks.add_up(found)
        stream.normed_by, routed = None, scratch.beside[:num_rows]
        rms_norm(residual, norms.router, routed, eps=eps, gain=self._spec.hidden_size**-0.5)
        rms_norm(residual, norms.experts, room, eps=eps)
        experts.forward(room, routed, scratch, for_router=routed)
        if self._ranks is not None:
            self._ranks.add_up(routed)
        rms_norm(found, norms.post_shared, found, eps=eps)
        add_rms_norm(routed, found, None, None, eps=eps, post_weight=norms.post_experts)
        products.add(found, stream, layer.post_mlp_norm, next_norm, scale)

    def _add_shared(self, layer: LayerWeights, shared: SharedWeights, stream: Stream, normed: torch.Tensor) -> None:
        """What every token's own MLP finds joins the residual stream; `normed` stays as it is, for the experts."""
        activated = self._buffers.activated_of(len(normed), shared.gate_up.product.outputs)
        self._products.multiply(stream, layer.mlp_norm, shared.gate_up, activated)
        if shared.router is not None:
            scale_by_gate(normed, shared.router, activated)
        self._products.join(activated, shared.down, stream, None, None)
