"""The forward pass of a decoder on a device. Decode tokens come first, prefill chunks follow; attention is called once
a phase on its own range. Two ways through a layer: matrix products for many tokens, fused kernels that stream each
weight once for a few. Nothing here waits, allocates or reads a number back, so that all can be captured in a graph."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from twostroke.backends.cuda.attention import Attention
from twostroke.backends.cuda.buffers import Buffers
from twostroke.backends.cuda.compile_ahead import is_abridged
from twostroke.backends.cuda.kernels.embedding import Positions, gather
from twostroke.backends.cuda.kernels.gemv import linear_few
from twostroke.backends.cuda.kernels.moe_combine import NextNorm
from twostroke.backends.cuda.kernels.norms import rms_norm
from twostroke.backends.cuda.kernels.prefill_tiles import PrefillWork
from twostroke.backends.cuda.kernels.rope import rope_and_store
from twostroke.backends.cuda.kv_store import KVStore
from twostroke.backends.cuda.moe import MoeBlock, MoeWeights
from twostroke.backends.cuda.packed_copies import PackedLayer
from twostroke.backends.cuda.packed_sizes import few_rows_of
from twostroke.backends.cuda.products import Products
from twostroke.backends.cuda.weights import LayerWeights, Weights
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import ModelSpec

FEW_LOGITS = 2
"""Tokens whose logits a fused kernel takes, as it takes few tokens' layers: cuBLAS has less to make up for there."""
NO_COPIES = PackedLayer()


@dataclass(frozen=True, slots=True, eq=False)
class TokenArrays:
    """What every layer needs to know of the step's tokens: int32 on the device, [num_tokens] each."""

    token_ids: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    """FROM_ROW, as are token ids, where a row alone knows."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Decodes:
    """The tokens of a step, the first, that are attended as decodes."""

    slots: int
    """At most so many: what a graph has room for."""
    count: torch.Tensor | None = None
    """int32 [1] on the device: how many there are; None: as many as slots."""


class Decoder:
    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        kv: KVStore,
        attention: Attention,
        buffers: Buffers,
        tables: torch.Tensor,
        last_tokens: torch.Tensor,
        records: torch.Tensor,
        max_context: int,
        few_rows: int | None = None,
    ) -> None:
        """`few_rows`: up to how many tokens take the fused kernels; None: by the model's size."""
        if few_rows is None:
            is_whole = all(layer.packed is not None and layer.packed.is_whole for layer in weights.layers)
            few_rows = few_rows_of(spec, is_whole=is_whole)
        self._few_rows = few_rows
        self._few_logits = 0 if weights.packed_head.head is not None else min(FEW_LOGITS, few_rows)
        self._spec, self._weights, self._kv, self._attention = spec, weights, kv, attention
        self._buffers, self._tables, self._last_tokens, self._records = buffers, tables, last_tokens, records
        self._products = Products(spec, buffers.products)
        ropes = {layer.grouped.rope for layer in spec.layers}
        shapes = spec.tensor_shapes()
        in_layers = sum(prod(size) for name, size in shapes.items() if name not in ("embedding", "output"))
        if (moe := spec.moe) is not None:
            in_experts = sum(prod(size) for name, size in shapes.items() if ".experts." in name)
            in_layers -= in_experts * (moe.num_experts - moe.experts_per_token) // moe.num_experts
        self.multiply_adds_per_token = in_layers
        kinds = {layer: index for index, layer in reversed(list(enumerate(spec.layers)))}
        self._distinct_layers = sorted({*kinds.values(), spec.num_layers - 1})  # behind the last there is no norm
        self._windows = tuple(dict.fromkeys(layer.window for layer in spec.layers))
        self._experts = [
            MoeBlock(own.moe, layer.mlp, own.moe.activation, layer.packed)
            if own.moe and isinstance(layer.mlp, MoeWeights)
            else None
            for own, layer in zip(spec.layers, weights.layers, strict=True)
        ]
        self._rotations = {rope: rotation(rope, max_context, weights.embedding.device) for rope in ropes}

    def prepare(self) -> None:
        """Have kernels compiled which no set of steps is sure to meet all of: the decodes' cuts, the gates' and the
        experts', which layers share."""
        self._attention.prepare(self._windows)
        if not isinstance(mlp := self._weights.layers[0].mlp, MoeWeights):
            x, out = self._buffers.normed[:1], self._buffers.activated[:1]
            self._products.prepare(x, mlp.gate_up, out)
        experts, scratch = next((block for block in self._experts if block is not None), None), self._buffers.experts
        if experts is not None and scratch is not None:
            experts.prepare(scratch)

    def forward(
        self,
        tokens: TokenArrays,
        decodes: Decodes,
        prefill: PrefillWork | None,
        *,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute every token and write its keys and values. Returns the residual stream # [num_tokens, hidden], or of
        the tokens `wanted` alone (int32 indices): the last layer then goes on with those, once all keys are written."""
        weights = self._weights
        residual = self._buffers.residual[: len(tokens)]
        scale = self._spec.embedding_scale
        positions = None
        if decodes.slots:  # which know where they stand by their rows
            positions = Positions(tokens.positions, self._records, self._buffers.positions[: len(tokens)])
            tokens = TokenArrays(tokens.token_ids, tokens.rows, positions.found)
        ids = (tokens.token_ids, tokens.rows, self._last_tokens)
        gather(weights.embedding, *ids, residual, scale=scale, positions=positions)
        if decodes.slots:
            self._attention.cut_decodes(tokens.positions[: decodes.slots], self._windows, count=decodes.count)
        few = self._are_few(len(tokens))
        normed = self._buffers.normed[: len(tokens)]
        if not few:
            rms_norm(residual, weights.layers[0].attention_norm, normed, eps=self._spec.norm_eps)
        for index in self._distinct_layers if is_abridged() else range(len(weights.layers)):
            layer = weights.layers[index]
            qkv = self._buffers.qkv[: len(tokens)]
            if few:
                norm, eps = layer.attention_norm, self._spec.norm_eps
                linear_few(residual, layer.qkv, qkv, norm_weight=norm, eps=eps, bias=layer.qkv_bias)
            else:
                packed = (layer.packed or NO_COPIES).qkv
                self._products.plain(normed, layer.qkv, layer.qkv_bias, qkv, packed=packed)
            is_last = index == len(weights.layers) - 1
            self._rotate_and_store(index, layer, qkv, tokens)
            if is_last and wanted is not None and len(wanted) == 0:
                return residual[:0]  # a chunk inside a prompt: its keys are all that is wanted of it
            mixed = self._attend(index, qkv, tokens, decodes.slots, prefill)
            if is_last and wanted is not None:
                mixed, residual = self._select(mixed, residual, wanted)
                few, normed = self._are_few(len(wanted)), self._buffers.normed[: len(wanted)]
            if few:
                self._finish_few(index, layer, mixed, residual)
            else:
                self._finish_many(index, layer, mixed, residual, normed)
        return residual

    def logits(self, residual: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] float32"""
        spec, weights = self._spec, self._weights
        logits = self._buffers.logits[: len(residual)]
        if len(residual) <= self._few_logits:
            linear_few(residual, weights.head, logits, norm_weight=weights.final_norm, eps=spec.norm_eps)
        else:
            normed = self._buffers.normed[: len(residual)]
            rms_norm(residual, weights.final_norm, normed, eps=spec.norm_eps)
            self._products.wide(normed, weights.head, logits, packed=weights.packed_head.head)
        if spec.logits_softcap is not None:
            logits.div_(spec.logits_softcap).tanh_().mul_(spec.logits_softcap)
        return logits

    def _are_few(self, num_tokens: int) -> bool:
        return num_tokens <= self._few_rows and not self._spec.layers[0].sandwich_norms

    def _select(
        self, mixed: torch.Tensor, residual: torch.Tensor, wanted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen_mixed = self._buffers.selected_attention[: len(wanted)]
        chosen_residual = self._buffers.selected[: len(wanted)]
        torch.index_select(mixed, 0, wanted, out=chosen_mixed)
        torch.index_select(residual, 0, wanted, out=chosen_residual)
        return chosen_mixed, chosen_residual

    def _finish_few(self, index: int, layer: LayerWeights, mixed: torch.Tensor, residual: torch.Tensor) -> None:
        """A layer after its attention: each product with the norm before it and the sum after it in one kernel."""
        count, eps, buffers, mlp = len(residual), self._spec.norm_eps, self._buffers, layer.mlp
        linear_few(mixed, layer.o, residual, bias=layer.o_bias, residual=residual)
        if isinstance(mlp, MoeWeights):
            normed = buffers.normed[:count]
            rms_norm(residual, layer.mlp_norm, normed, eps=eps)
            self._mix_experts(index, normed, residual, None)
            return
        activated, kind = buffers.activated[:count], self._spec.layers[index].mlp.activation
        linear_few(residual, mlp.gate_up, activated, norm_weight=layer.mlp_norm, eps=eps, gated=kind)
        linear_few(activated, mlp.down, residual, residual=residual)

    def _finish_many(
        self,
        index: int,
        layer: LayerWeights,
        mixed: torch.Tensor,
        residual: torch.Tensor,
        normed: torch.Tensor,
    ) -> None:
        """The same by matrix products; `normed` leaves as the next layer's input."""
        mlp, layers, products = layer.mlp, self._weights.layers, self._products
        packed = layer.packed or NO_COPIES
        post_norm, next_norm = layer.post_attention_norm, layer.mlp_norm
        products.join(mixed, layer.o, layer.o_bias, residual, post_norm, next_norm, normed, packed=packed.o)
        behind = layers[index + 1].attention_norm if index + 1 < len(layers) else None
        if isinstance(mlp, MoeWeights):
            following = None if behind is None else NextNorm(behind, normed, self._spec.norm_eps)
            self._mix_experts(index, normed, residual, following)
            return
        activated = self._buffers.activated[: len(residual)]
        products.gated(normed, mlp.gate_up, activated, packed=packed.gate_up)
        post_norm = layer.post_mlp_norm
        products.join(activated, mlp.down, None, residual, post_norm, behind, normed, packed=packed.down)

    def _mix_experts(
        self, index: int, normed: torch.Tensor, residual: torch.Tensor, next_norm: NextNorm | None
    ) -> None:
        experts, scratch = self._experts[index], self._buffers.experts
        assert experts is not None and scratch is not None
        experts.forward(normed, residual, scratch, residual=residual, next_norm=next_norm)

    def _rotate_and_store(self, index: int, layer: LayerWeights, qkv: torch.Tensor, tokens: TokenArrays) -> None:
        """Queries are rotated to where they are read; keys and values go to the store."""
        attention, kv = self._spec.layers[index].grouped, self._kv
        rope_and_store(
            qkv,
            self._rotations[attention.rope],
            tokens.positions,
            tokens.rows,
            self._tables[kv.group_of[index]],
            kv.keys[index],
            kv.values[index],
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            rope_dim=attention.rope.dim,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self._spec.norm_eps,
        )

    def _attend(
        self,
        index: int,
        qkv: torch.Tensor,
        tokens: TokenArrays,
        decode_slots: int,
        prefill: PrefillWork | None,
    ) -> torch.Tensor:
        """Each phase by its own path  # [num_tokens, heads * head_dim]"""
        own, kv = self._spec.layers[index].grouped, self._kv
        keys, values, table = kv.keys[index], kv.values[index], self._tables[kv.group_of[index]]
        queries = qkv.view(len(tokens), -1, own.head_dim)[:, : own.num_heads]
        out = self._buffers.attention[: len(tokens)]
        scale, softcap, window = own.scale, own.softcap, own.window
        if decode_slots:
            self._attention.decode(
                queries[:decode_slots],
                keys,
                values,
                table,
                tokens.rows[:decode_slots],
                tokens.positions[:decode_slots],
                out[:decode_slots],
                scale=scale,
                window=window,
                softcap=softcap,
            )
        if prefill is not None:
            self._attention.prefill(
                queries, keys, values, table, prefill, out, scale=scale, window=window, softcap=softcap
            )
        return out


def rotation(rope: RopeSpec, max_context: int, device: torch.device) -> torch.Tensor:
    """Cosines, then sines, of every position # [max_context, rope dim] float32. Angles in float64: at position 100,000
    a float32 angle is off by a hundredth of a radian."""
    frequencies = torch.tensor(rope.inverse_frequencies(max_context), dtype=torch.float64, device=device)
    angles = torch.arange(max_context, dtype=torch.float64, device=device)[:, None] * frequencies
    both = torch.cat([angles.cos(), angles.sin()], dim=1) * rope.attention_factor
    return both.to(torch.float32).contiguous()
