"""Latent attention of a model on a device: one latent a token is all that is kept of it. Prompts expand their own
chunk's; what lies before it, and all that decodes read, stays as it is, and queries come to it. Owns the scratch that
its kernels share. Nothing here waits for the device or allocates once it is made, so every call may be captured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from twostroke.backends.cuda.attention import INTERPRETED_SMS, meet_plans
from twostroke.backends.cuda.kernels.decode_attention import DecodeScratch
from twostroke.backends.cuda.kernels.decode_cuts import cut_contexts, split_plan
from twostroke.backends.cuda.kernels.head_products import multiply_heads
from twostroke.backends.cuda.kernels.latent_decode import attend_latent_decode, latent_config, latent_shape
from twostroke.backends.cuda.kernels.latent_prefill import ChunkShape, attend_chunks, attend_context, chunk_tiling
from twostroke.backends.cuda.kernels.latent_store import LatentKV, Turning, turn_and_keep
from twostroke.backends.cuda.kernels.norms import rms_norm
from twostroke.backends.cuda.kernels.prefill_tiles import PrefillWork, Tiling
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.matrix import Matrix
from twostroke.backends.cuda.products import Products
from twostroke.models.spec import LatentAttention

if TYPE_CHECKING:
    from twostroke.backends.cuda.layer_weights import MixWeights


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
    """Beside the first product, of queries (or of their low rank) and of what is kept, and the last."""

    kv_norm: torch.Tensor  # [rank]
    expand: Matrix  # [heads * (plain + value), rank]: of each head its keys, then its values
    query_norm: torch.Tensor | None  # [query rank]
    query_expand: Matrix | None  # [heads * (plain + rotated), query rank]

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (self.expand,) if self.query_expand is None else (self.expand, self.query_expand)


class LatentBuffers:
    """Between the kernels of one layer; layers run one after another and share it."""

    def __init__(self, own: LatentAttention, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.zeros((num_tokens, *shape), dtype=dtype, device=device)

        self.latents, self.rotated = empty(own.rank), empty(own.rotated_dim)
        self.expanded = empty(own.expanded_width)
        self.absorbed = empty(own.num_heads, own.rank + own.rotated_dim)
        self.mixed = empty(own.num_heads, own.rank)
        self.log_sums = torch.zeros(num_tokens, own.num_heads, dtype=torch.float32, device=device)
        self.query_latents = empty(own.query_rank or 0)
        self.queries = empty(own.query_width if own.query_rank is not None else 0)


class LatentKernels:
    """As `Attention` is for keys and values. Queries of drafts go apart, each as if it were a sequence."""

    def __init__(
        self, own: LatentAttention, page: int, dtype: torch.dtype, device: torch.device | str, max_decode_tokens: int
    ) -> None:
        self.own, self.device = own, torch.device(device)
        self._target = target_of(self.device)
        self.shape = latent_shape(own.num_heads, own.rank, page, dtype, self._target.shared_bytes)
        self.chunk = ChunkShape(own.num_heads, own.plain_dim, own.rotated_dim, own.value_dim, dtype)
        self.num_sms = self._target.num_sms if self.device.type == "cuda" else INTERPRETED_SMS
        self.prefill_choice = "prefill attention: latents, expanded for a chunk and absorbed before it, in Triton"
        self._scratch = DecodeScratch(max_decode_tokens, self.shape, self.device, self.num_sms)
        self._items = self._scratch.new_items()

    def prepare(self, windows: Iterable[int | None]) -> None:
        """Have every kernel of `cut_decodes` compiled."""
        meet_plans(lambda positions: self.cut_decodes(positions, windows), self._scratch.max_tokens, self.device)

    def cut_decodes(
        self,
        positions: torch.Tensor,
        windows: Iterable[int | None],
        *,
        count: torch.Tensor | None = None,
        width: int = 1,
    ) -> None:
        """As `Attention.cut_decodes`; there are no windows."""
        number = len(positions)
        if number > 1:
            plan = split_plan(number, self.shape.kv_heads, self.num_sms, target_of(self.device).name, window=None)
            config = latent_config(self.shape, number, self.device)
            cut_contexts(positions, self._items, plan, config, count=count)

    def tiling(self, num_tokens: int) -> Tiling:
        return chunk_tiling(self.own.num_heads, num_tokens, self._target, self.num_sms)

    def decode(
        self,
        absorbed: torch.Tensor,
        kv: LatentKV,
        rows: torch.Tensor,
        positions: torch.Tensor,
        mixed: torch.Tensor,
        first: int,
    ) -> None:
        items = None if len(absorbed) == 1 else self._items
        scale, shape, room = self.own.scale, self.shape, self._scratch
        attend_latent_decode(absorbed, kv, rows, positions, mixed, scale, room, items, shape=shape, first=first)


class LatentPath:
    """What every layer does between its first product and its last."""

    def __init__(
        self,
        kernels: LatentKernels,
        buffers: LatentBuffers,
        products: Products,
        kv: Sequence[LatentKV],
        turning: Turning,
        first: int,
    ) -> None:
        """`first`: decodes read no latent before this position, but for their own."""
        self._kernels, self._buffers, self._products, self._kv, self._turning = kernels, buffers, products, kv, turning
        self._own, self._first = kernels.own, first

    def store(
        self, index: int, layer: MixWeights, qkv: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """From the first product to what is kept, and to queries  # [num_tokens, heads, plain + rotated]"""
        own, buffers, number, weights = self._own, self._buffers, len(qkv), layer.latent
        assert weights is not None
        queries, kept = qkv.split([qkv.shape[1] - own.kv_values, own.kv_values], dim=1)
        if weights.query_norm is not None and weights.query_expand is not None:
            normed, expanded = buffers.query_latents[:number], buffers.queries[:number]
            rms_norm(queries, weights.query_norm, normed, eps=own.norm_eps)
            self._products.apply(normed, weights.query_expand, expanded)
            queries = expanded
        by_head = queries.unflatten(1, (own.num_heads, own.key_dim))
        latents, rotated, eps = buffers.latents[:number], buffers.rotated[:number], own.norm_eps
        kv, absorbed = self._kv[index], buffers.absorbed[:number]
        turn_and_keep(
            by_head, kept, weights.kv_norm, self._turning, positions, rows, kv, latents, rotated, absorbed, eps=eps
        )
        return by_head

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
        """Of the first tokens of a step  # out [num_tokens, heads * value]"""
        buffers, number = self._buffers, len(queries)
        absorbed, mixed = buffers.absorbed[:number], buffers.mixed[:number]
        self._absorb(layer, queries, absorbed)
        self._kernels.decode(absorbed, self._kv[index], rows, positions, mixed, self._first)
        self._expand_values(layer, mixed, out)

    def prefill(
        self, index: int, layer: MixWeights, queries: torch.Tensor, work: PrefillWork, out: torch.Tensor
    ) -> None:
        """All of a step's chunks. How many tokens are decodes only the device knows: theirs are brought to values once
        more, from what decode left of them."""
        buffers, number, scale, weights = self._buffers, len(queries), self._own.scale, layer.latent
        assert weights is not None
        expanded, log_sums = buffers.expanded[:number], None
        self._products.apply(buffers.latents[:number], weights.expand, expanded)
        if work.has_prefix:
            absorbed, mixed, log_sums = buffers.absorbed[:number], buffers.mixed[:number], buffers.log_sums[:number]
            self._absorb(layer, queries, absorbed)
            attend_context(absorbed, self._kv[index], work, mixed, log_sums, scale, shape=self._kernels.shape)
            self._expand_values(layer, mixed, out)
        rotated = buffers.rotated[:number]
        attend_chunks(queries, expanded, rotated, work, out, log_sums, scale, shape=self._kernels.chunk)

    def gate(self, index: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """It has none."""

    def prepare(self, layer: MixWeights, most_rows: int) -> None:
        """Have kernels of the products compiled which no set of steps is sure to meet all of."""
        buffers, weights = self._buffers, layer.latent
        assert weights is not None
        places = [(weights.expand, buffers.latents, buffers.expanded)]
        if weights.query_expand is not None:
            places.append((weights.query_expand, buffers.query_latents, buffers.queries))
        for matrix, inputs, results in places:
            for rows in (rows for rows in self._products.long_rows(matrix) if rows <= most_rows):
                self._products.apply(inputs[:rows], matrix, results[:rows])

    def _absorb(self, layer: MixWeights, queries: torch.Tensor, absorbed: torch.Tensor) -> None:
        """Queries in the latents' space: keys are not made, what makes them is multiplied to the queries instead. What
        is rotated was brought there before."""
        own = self._own
        keys = self._by_head(layer)[:, : own.plain_dim]  # [heads, plain, rank]
        multiply_heads(queries[..., : own.plain_dim], keys, absorbed[..., : own.rank])

    def _expand_values(self, layer: MixWeights, mixed: torch.Tensor, out: torch.Tensor) -> None:
        own = self._own
        values = self._by_head(layer)[:, own.plain_dim :]  # [heads, value, rank]
        multiply_heads(mixed, values.transpose(1, 2), out.unflatten(1, (own.num_heads, own.value_dim)))

    def _by_head(self, layer: MixWeights) -> torch.Tensor:
        """[heads, plain + value, rank]"""
        assert layer.latent is not None
        return layer.latent.expand.weight.unflatten(0, (self._own.num_heads, -1))
