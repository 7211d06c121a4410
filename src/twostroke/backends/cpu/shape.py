"""What compiled code is specialised for: the few sizes that shape registers and loops. Everything else is read from
argument records, so models of the same shape share code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from twostroke.backends.cpu.kv_kind import KVKind
from twostroke.backends.cpu.tile_kinds import OPENED_GROUP_BYTES, TileKind
from twostroke.models.spec import DenseMlp, GroupedAttention, LatentAttention, Mlp, ModelSpec, MoeSpec

SPAN = 256
"""Positions whose attention scores are held at once."""
RUN = 16
"""Keys that lie side by side in a block."""
LANES = 16
_TILE_ROWS = 96
"""Query vectors that one piece of prefill's attention takes over each span: K and V are read from far away once."""

CHUNK_TILE = 512
"""Tokens of a chunk that share keys and values made of latents, for one head: making them takes longer than to attend
with less than some hundred of them."""

ROUTING_ARRAYS = 4
"""Of a number for each expert, that choosing some takes in scratch: scores, what they are worth, and no more groups
than experts, twice."""

CLAMPED, RELU_SQUARED = "clamped_", "relu2"


def mlps_of(spec: ModelSpec) -> list[Mlp]:
    return [layer.mlp for layer in spec.layers if layer.mlp is not None]


def plain_activation(spec: ModelSpec) -> str | None:
    """Of MLPs and experts without a gate; None: all have one."""
    dense = [mlp.expert if isinstance(mlp, MoeSpec) else mlp for mlp in mlps_of(spec)]
    dense += [mlp.shared for mlp in mlps_of(spec) if isinstance(mlp, MoeSpec) and mlp.shared is not None]
    plain = next((one for one in dense if not one.is_gated), None)
    return None if plain is None else "gelu" if plain.is_exact else activation_name(plain)


def activation_name(mlp: Mlp) -> str:
    """Of what joins gate and up: code is made for it, its numbers and all."""
    if mlp.squared_relu:
        return RELU_SQUARED
    return mlp.activation if mlp.clamp is None else f"{CLAMPED}{mlp.clamp.limit!r}_{mlp.clamp.alpha!r}"


def attending(spec: ModelSpec) -> GroupedAttention | LatentAttention:
    """The attention of the first layer that has one, which stands for all: layers that differ were declined."""
    found = (layer.attention for layer in spec.layers)
    return next(one for one in found if isinstance(one, GroupedAttention | LatentAttention))


def attended_widths(spec: ModelSpec) -> tuple[int, ...]:
    """Of what attention hands on to its output projections, in all layers that attend."""
    found = (layer.attention for layer in spec.layers)
    return tuple({attended_width(one): None for one in found if isinstance(one, GroupedAttention | LatentAttention)})


def attended_width(attention: GroupedAttention | LatentAttention) -> int:
    """The same of one."""
    if isinstance(attention, LatentAttention):
        return attention.num_heads * attention.value_dim
    return attention.query_width


def mlp_widths(spec: ModelSpec) -> dict[str, set[int]]:
    """The widths within a model's MLPs, by name."""
    mlps = mlps_of(spec)
    moes = [mlp for mlp in mlps if isinstance(mlp, MoeSpec)]
    return {
        "intermediate size": {mlp.intermediate_size for mlp in mlps if isinstance(mlp, DenseMlp)},
        "experts' intermediate size": {moe.expert_intermediate_size for moe in moes},
        "numbers that experts read": {moe.latent_size for moe in moes if moe.latent_size is not None},
        "shared expert's intermediate size": {moe.shared.intermediate_size for moe in moes if moe.shared is not None},
    }


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Latent attention: a token leaves `rank` numbers and `rotated_dim` rotated ones behind."""

    num_heads: int
    rank: int
    plain_dim: int
    rotated_dim: int
    value_dim: int

    @property
    def kept_width(self) -> int:
        """Of what is kept of a token, to a multiple of a vector: the rest is zero."""
        return -(-(self.rank + self.rotated_dim) // LANES) * LANES

    @property
    def key_dim(self) -> int:
        return self.plain_dim + self.rotated_dim


def latent_shape(own: LatentAttention) -> LatentShape:
    return LatentShape(own.num_heads, own.rank, own.plain_dim, own.rotated_dim, own.value_dim)


def convolution_name(taps: int, *, is_gated: bool) -> str:
    return f"convolve_{'gated' if is_gated else 'silu'}_{taps}"


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Of layers that keep a state."""

    taps: int
    rule: Literal["delta", "mamba"] | None
    """Of what comes behind the convolution; None: nothing does, and it is gated."""

    @property
    def key(self) -> str:
        return f"{self.rule or 'convolution'}-{self.taps}"


@dataclass(frozen=True, slots=True)
class KernelShape:
    head_dim: int
    """Of keys; of latent attention, what is kept of a token."""
    queries_per_kv_head: int
    block_size: int
    activation: str
    soft_capped: bool
    """Attention scores pass a soft cap."""
    tile_kinds: tuple[TileKind, ...]
    kv_kind: KVKind = KVKind.F16
    has_sinks: bool = False
    """Each head has a score of nothing, beside those of the keys."""
    recurrent: RecurrentShape | None = None
    both_ways: bool = False
    """Tokens see those behind them, too."""
    plain_activation: str | None = None
    """Of MLPs without a gate, as an encoder's are; None: there are none."""
    num_experts: int = 0
    """0: its MLPs are dense."""
    norms_over_ranks: bool = False
    """Some of its norms are over numbers of several ranks, of which this is one."""
    own_value_dim: int | None = None
    """None: values are as wide as keys."""
    latent: LatentShape | None = None
    """All heads read one vector a token, which is key and value to them; the sizes above are those of that reading."""

    @staticmethod
    def of_latents(latent: LatentShape, block_size: int, activation: str, **others: Any) -> KernelShape:
        return KernelShape(
            latent.kept_width,
            latent.num_heads,
            block_size,
            activation,
            soft_capped=False,
            own_value_dim=latent.rank,
            latent=latent,
            **others,
        )

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.own_value_dim is None else self.own_value_dim

    @property
    def expanded(self) -> KernelShape:
        """What prefill reads: keys and values that were made of latents, one head at a time."""
        assert self.latent is not None
        own = self.latent
        return replace(self, head_dim=own.key_dim, queries_per_kv_head=1, own_value_dim=own.value_dim, latent=None)

    @property
    def attention_key(self) -> str:
        """What code that attends is specialised for."""
        cap = "capped" if self.soft_capped else "plain"
        sizes = f"{self.head_dim}x{self.queries_per_kv_head}x{self.block_size}"
        further = ("-sinks" if self.has_sinks else "") + ("-both-ways" if self.both_ways else "")
        key, own = f"{sizes}-{self.kv_kind.value}-{cap}{further}", self.latent
        if own is None:
            return key
        return f"{key}-latent-{own.rank}x{own.plain_dim}x{own.rotated_dim}x{own.value_dim}"

    @property
    def block_bytes(self) -> int:
        """K and V of one block and one KV head, or its latents."""
        if self.latent is not None:
            return self.block_size * self.head_dim * self.kv_kind.element_bytes
        return self.block_size * self.kv_kind.token_bytes(self.head_dim)

    @property
    def value_offset(self) -> int:
        """Bytes from K to V within them."""
        return self.block_size * self.head_dim * self.kv_kind.element_bytes

    @property
    def scales_offset(self) -> int:
        """Bytes from K to the scales, of kinds that have them: [block_size] of K, then of V."""
        return 2 * self.value_offset

    @property
    def heads_together(self) -> int:
        """Query heads of one KV head that share each load of K and V: the largest divisor up to 8."""
        return max(count for count in range(1, 9) if self.queries_per_kv_head % count == 0)

    def queries_together(self, accumulators: int) -> int:
        """Tokens of a prefill chunk that share them too."""
        return max(1, min(8, accumulators // 4) // self.heads_together)

    def queries_a_tile(self, accumulators: int) -> int:
        """Tokens of a prefill chunk that one piece of work takes at most, a few together at a time."""
        together = self.queries_together(accumulators)
        return together * max(1, _TILE_ROWS // (together * self.heads_together))

    @property
    def head_groups_per_kv_head(self) -> int:
        return self.queries_per_kv_head // self.heads_together

    @property
    def span_result_floats(self) -> int:
        """What one span of one query leaves for merging, for one group of heads: weighted sums, maxima, sums."""
        return self.heads_together * self.value_dim + 2 * LANES

    def scratch_bytes(self, accumulators: int, depth: int) -> int:
        """What one thread needs at most: to open a panel of weights this deep, or to attend."""
        panel = 4096 + depth // 32 * OPENED_GROUP_BYTES * 4  # four columns, and what a few tiles leave to be joined
        panel = max(panel, 4 * ROUTING_ARRAYS * (self.num_experts + LANES))
        if self.latent is None:
            return max(panel, AttentionScratch.of(self, accumulators).total)
        places = LatentScratch.of(self, accumulators), LatentScratch.of_expanded(self, accumulators)
        return max(panel, *(place.total for place in places))

    def span_bytes(self, accumulators: int) -> int:
        """Of the scores of a span, of as many rows as are computed together; their weights take as much at most."""
        return 4 * self.heads_together * self.queries_together(accumulators) * SPAN


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """How the layers of a KV group attend."""

    num_kv_heads: int
    shape: KernelShape


def layer_shape(base: KernelShape, own: GroupedAttention) -> KernelShape:
    """Of the code that a layer attends with; `base`: of the model's first that attends."""
    return replace(
        base,
        head_dim=own.head_dim,
        queries_per_kv_head=own.queries_per_kv_head,
        soft_capped=own.softcap is not None,
        has_sinks=own.has_sinks,
        both_ways=not own.is_causal,
    )


def heads_by_layer(spec: ModelSpec, base: KernelShape) -> dict[int, LayerHeads]:
    found = {index: layer.attention for index, layer in enumerate(spec.layers)}
    return {
        index: LayerHeads(own.num_kv_heads, layer_shape(base, own))
        for index, own in found.items()
        if isinstance(own, GroupedAttention)
    }


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Where the parts of a thread's scratch begin while it attends, in bytes."""

    running: int  # f32 [tile rows][head_dim], after the prepared queries
    maxima: int  # f32 [tile rows], with room for a whole vector after the last
    sums: int  # f32 [tile rows], too
    scores: int  # f32 [rows together][SPAN]
    weights: int  # [rows together][SPAN]
    total: int

    @classmethod
    def of(cls, shape: KernelShape, accumulators: int) -> AttentionScratch:
        rows = shape.queries_a_tile(accumulators) * shape.heads_together
        vectors, state = 4 * rows * shape.head_dim, 4 * LANES * (rows // LANES + 2)
        span = shape.span_bytes(accumulators)
        return cls(*accumulate((vectors, vectors, state, state, span, span)))


@dataclass(frozen=True, slots=True)
class LatentScratch:
    """The same of latent attention: of a decode over latents, or of a chunk over keys and values made of them."""

    values: int  # of a span, made of latents; its keys lie before them where they are made, too
    queries: int  # f32 [rows][head_dim] at most
    running: int  # f32 [rows][value_dim]
    maxima: int
    sums: int
    scores: int
    total: int

    @classmethod
    def of(cls, shape: KernelShape, accumulators: int) -> LatentScratch:
        assert shape.latent is not None
        values = SPAN * shape.value_dim * shape.kv_kind.element_bytes
        return cls._after(0, values, shape, shape.latent.num_heads, accumulators)

    @classmethod
    def of_expanded(cls, shape: KernelShape, accumulators: int) -> LatentScratch:
        own = shape.expanded
        number_bytes = expanded_bytes(shape.kv_kind)
        keys, values = (SPAN * width * number_bytes for width in (own.head_dim, own.value_dim))
        return cls._after(keys, values, own, CHUNK_TILE, accumulators)

    @classmethod
    def _after(cls, keys: int, values: int, shape: KernelShape, rows: int, accumulators: int) -> LatentScratch:
        queries, running = 4 * rows * shape.head_dim, 4 * rows * shape.value_dim
        state, span = 4 * LANES * (rows // LANES + 2), shape.span_bytes(accumulators)
        return cls(*accumulate((keys, values, queries, running, state, state, 2 * span)))


def expanded_bytes(kind: KVKind) -> int:
    """Of a number of keys and values that are made of latents: exact where latents are multiplied as f32."""
    return 2 if kind is KVKind.BF16 else 4
