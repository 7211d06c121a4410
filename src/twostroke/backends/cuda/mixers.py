"""How tokens of a layer meet each other: between its first product and its last, queries are turned, what is kept goes
to the store, and each phase attends by its own kernels. Grouped attention here, latent attention in `latent.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from twostroke.backends.cuda.attention import Attention
from twostroke.backends.cuda.kernels.activation import gate_by_sigmoid
from twostroke.backends.cuda.kernels.latent_store import LatentKV, Turning
from twostroke.backends.cuda.kernels.norms import norm_spans
from twostroke.backends.cuda.kernels.paged import AttentionShape, Scoring
from twostroke.backends.cuda.kernels.prefill_tiles import PrefillWork
from twostroke.backends.cuda.kernels.rope import HeadRules, rope_and_store
from twostroke.backends.cuda.kv_store import KVStore
from twostroke.backends.cuda.latent import LatentKernels, LatentPath
from twostroke.backends.cuda.layer_matrices import attention_of
from twostroke.backends.cuda.products import Products
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import GroupedAttention, LatentAttention, ModelSpec, QueryGrowth

if TYPE_CHECKING:
    from twostroke.backends.cuda.buffers import Buffers
    from twostroke.backends.cuda.layer_weights import MixWeights
    from twostroke.backends.cuda.rows import ModelRows
    from twostroke.backends.cuda.weights import Weights


Kernels = tuple[Attention | LatentKernels, ...]
"""Of a model's attention: one for each size of heads, in the order of the layers that have them first."""


def kernels_of(
    spec: ModelSpec,
    page: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_rows: int,
    num_queries: int,
    max_drafts: int,
    scaled: str,
) -> Kernels:
    """`num_queries`: of a step that verifies drafts, at most; `scaled`: what a number of the cache is multiplied by."""
    if isinstance(own := attention_of(spec), LatentAttention):
        return (LatentKernels(own, page, dtype, device, max(num_rows, num_queries)),)
    shapes = (
        AttentionShape(*sizes, page, dtype, 1 + max_drafts, scaled, is_causal=spec.is_causal)
        for sizes in _head_sizes(spec)
    )
    return tuple(Attention(shape, device, num_rows, num_queries) for shape in shapes)


def _sizes_of(own: GroupedAttention) -> tuple[int, int, int]:
    return own.num_heads, own.num_kv_heads, own.head_dim


def _head_sizes(spec: ModelSpec) -> list[tuple[int, int, int]]:
    attentions = (layer.attention for layer in spec.layers)
    return list(dict.fromkeys(_sizes_of(own) for own in attentions if isinstance(own, GroupedAttention)))


def windows_of(spec: ModelSpec) -> tuple[tuple[int | None, ...], ...]:
    """By the attention's kernels, those of their layers."""
    attentions = [layer.attention for layer in spec.layers]
    grouped = [own for own in attentions if isinstance(own, GroupedAttention)]
    if not grouped:
        return ((None,),)
    sizes = _head_sizes(spec)
    return tuple(tuple(dict.fromkeys(own.window for own in grouped if _sizes_of(own) == one)) for one in sizes)


class GroupedPath:
    """Query heads that share keys and values."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        kv: KVStore,
        kernels: tuple[Attention, ...],
        rows: ModelRows,
        max_context: int,
        first: int,
    ) -> None:
        """`first`: as `Scoring` has it."""
        self._kernels, self._eps, device = kernels, spec.norm_eps, weights.embedding.device
        attentions = enumerate(layer.attention for layer in spec.layers)
        self._heads = heads = {index: own for index, own in attentions if isinstance(own, GroupedAttention)}
        self._paged = {index: kv.paged(index, rows.tables[kv.group_of[index]]) for index in heads}
        sizes = _head_sizes(spec)
        self._number = {index: sizes.index(_sizes_of(own)) for index, own in heads.items()}
        """Of a layer's kernels."""

        def sinks_of(index: int) -> torch.Tensor | None:
            mix = weights.layers[index].mix
            return None if mix is None else mix.sinks

        self._scorings = {
            index: Scoring(own.scale, own.window, own.softcap, first, own.is_causal, sinks_of(index))
            for index, own in heads.items()
        }
        ropes, growths = ({own.rope for own in heads.values()}, {own.growth for own in heads.values()})
        self._rotations = {rope: rotation(rope, max_context, device) for rope in ropes}
        self._growths = {growth: growth_of(growth, max_context, device) for growth in growths}

    def prepare(self, layer: MixWeights, most_rows: int) -> None:
        """Nothing but what steps meet."""

    def store(
        self, index: int, layer: MixWeights, qkv: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Queries are rotated to where they are read; keys and values go to the store. Returns queries  # [num_tokens,
        heads, head_dim]"""
        own = self._heads[index]
        cos_sin, growth = self._rotations[own.rope], self._growths[own.growth]
        norms, kv, eps = (layer.q_norm, layer.k_norm), self._paged[index], self._eps
        heads = qkv[:, : _made_width(own)]  # gates, where there are any, stand behind them
        if own.norm_spans_heads and layer.q_norm is not None and layer.k_norm is not None:
            norm_spans(heads, layer.q_norm, layer.k_norm, eps=eps)
            norms = (None, None)
        rope_and_store(heads, cos_sin, positions, rows, kv, *norms, eps=eps, growth=growth, rules=_rules_of(own))
        return heads[:, : own.query_width].unflatten(1, (own.num_heads, own.head_dim))

    def decode(
        self,
        index: int,
        layer: MixWeights,
        queries: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        out: torch.Tensor,
        width: int,
    ) -> None:
        """Of the first tokens of a step  # out [num_tokens, heads * head_dim]"""
        kernels = self._kernels[self._number[index]]
        kernels.decode(queries, self._paged[index], rows, positions, out, self._scorings[index], width)

    def prefill(
        self, index: int, layer: MixWeights, queries: torch.Tensor, work: PrefillWork, out: torch.Tensor
    ) -> None:
        """All of a step's chunks."""
        number = self._number[index]
        self._kernels[number].prefill(queries, self._paged[index], work.at(number), out, self._scorings[index])

    def gate(self, index: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """What heads found passes a gate, where a layer has one."""
        own = self._heads[index]
        if own.output_gate:
            gate_by_sigmoid(out, qkv[:, _made_width(own) :])


def _made_width(own: GroupedAttention) -> int:
    """Of the queries, keys and values that a layer makes."""
    return own.query_width + (len(own.made) - 1) * own.kv_width


def _rules_of(own: GroupedAttention) -> HeadRules:
    return HeadRules(norms_turned=own.norms_rotated, norms_values=own.value_norm, made=len(own.made))


def mixers_of(
    spec: ModelSpec,
    weights: Weights,
    kv: KVStore,
    kernels: Kernels,
    buffers: Buffers,
    rows: ModelRows,
    max_context: int,
    products: Products,
    first: int = 0,
) -> GroupedPath | LatentPath:
    """`first`: decodes read nothing before this position, but for their own; with keys and values, only if they have
    windows."""
    grouped = tuple(one for one in kernels if isinstance(one, Attention))
    if grouped:
        return GroupedPath(spec, weights, kv, grouped, rows, max_context, first)
    (latent,) = (one for one in kernels if isinstance(one, LatentKernels))
    own, device = attention_of(spec), weights.embedding.device
    assert isinstance(own, LatentAttention) and buffers.latent is not None
    growth = growth_of(own.growth, max_context, device)
    turning = Turning(rotation(own.rope, max_context, device), own.rope.pairs_neighbours, growth)
    latents = [LatentKV(part, rows.tables[group]) for (part,), group in zip(kv.parts, kv.group_of, strict=True)]
    return LatentPath(latent, buffers.latent, products, latents, turning, first)


def growth_of(growth: QueryGrowth | None, max_context: int, device: torch.device) -> torch.Tensor | None:
    """What the queries of every position are multiplied by # [max_context] float32"""
    if growth is None:
        return None
    contexts = 1 + torch.arange(max_context, dtype=torch.float64, device=device) // growth.context
    return (1 + growth.beta * contexts.log()).to(torch.float32)


def rotation(rope: RopeSpec, max_context: int, device: torch.device) -> torch.Tensor:
    """Cosines, then sines, of every position # [max_context, rope dim] float32. Angles in float64: at position 100,000
    a float32 angle is off by a hundredth of a radian."""
    frequencies = torch.tensor(rope.inverse_frequencies(max_context), dtype=torch.float64, device=device)
    angles = torch.arange(max_context, dtype=torch.float64, device=device)[:, None] * frequencies
    both = torch.cat([angles.cos(), angles.sin()], dim=1) * rope.attention_factor
    return both.to(torch.float32).contiguous()
