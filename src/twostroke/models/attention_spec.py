"""How tokens meet each other, as a model declares it: attention over keys and values that heads share, or over one
vector a token that both are made of. Knows no file format and no arithmetic. Standard library alone; others take these
names from `models/spec.py`."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.models.mlp_spec import Shapes
from twostroke.models.rope_spec import RopeSpec


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Llama 4 and Mistral 4: a query at position p is multiplied by `1 + beta * log(1 + p // context)`, so that it
    stays as sharp among more keys."""

    beta: float
    context: int


@dataclass(frozen=True, slots=True)
class WideNorms:
    """Of a rank (`models/shard.py`) whose queries and keys are normed together with other ranks': by the squares of
    all."""

    query_width: int
    """On all ranks together; and of keys, each counted once."""
    kv_width: int
    counts_keys: bool
    """Of several ranks that hold the same keys, one adds their squares."""


KV_TENSORS = ("k", "v", "k_bias", "v_bias", "k_norm")
"""That keys and values are made with."""


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Query heads that share keys and values in groups of `queries_per_kv_head`, in order."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    window: int | None = None
    """Sliding window: a query at q reads keys above `q - window`."""
    own_scale: float | None = None
    """What scores are multiplied by; None: 1 / sqrt(head_dim)."""
    softcap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    """A bias on the output projection."""
    qk_norm: bool = False
    """RMSNorm over each head of q and k, before rope."""
    norms_rotated: bool = False
    """Hunyuan: that norm is behind rope."""
    norm_spans_heads: bool = False
    """MiniMax M2, OLMo 2: that norm is over all heads of a token together."""
    wide_norms: WideNorms | None = None
    """Where that norm is over heads of several ranks; None: all heads are here."""
    value_norm: bool = False
    """Gemma 4: an RMSNorm over each head's values, too, without a weight."""
    keys_are_values: bool = False
    """Gemma 4: values are what keys are before norm and rope; they have no matrix."""
    shares_kv_of: int | None = None
    """Gemma 4: the layer whose keys and values it reads. It has none of its own, and keeps none."""
    has_sinks: bool = False
    """gpt-oss: a learnt score a head, beside those of the keys."""
    output_gate: bool = False
    """Qwen3-Next: what heads found passes by the sigmoid of one more projection, number by number."""
    growth: QueryGrowth | None = None
    is_causal: bool = True
    """Else tokens see each other both ways, and a window reaches as far ahead as back: an encoder."""

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.own_scale is None else self.own_scale

    @property
    def row_heads(self) -> int:
        """Of matrices that hold several of its tensors, head after head."""
        return self.num_heads

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Of all keys of a token, and of all values."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_values(self) -> int:
        """Numbers that one token leaves behind."""
        return 2 * self.kv_width if self.shares_kv_of is None else 0

    @property
    def norm_widths(self) -> tuple[int, int]:
        """Of what queries and keys are normed by."""
        return (self.query_width, self.kv_width) if self.norm_spans_heads else (self.head_dim, self.head_dim)

    def tensor_shapes(self, hidden: int) -> Shapes:
        query, kv = self.query_width, self.kv_width
        shapes: Shapes = {"q": (query, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, query)}
        if self.qkv_bias:
            shapes |= {"q_bias": (query,), "k_bias": (kv,), "v_bias": (kv,)}
        if self.output_gate:
            shapes["q_gate"] = (query, hidden)
        if self.output_bias:
            shapes["o_bias"] = (hidden,)
        if self.qk_norm:
            shapes |= {f"{name}_norm": (width,) for name, width in zip("qk", self.norm_widths, strict=True)}
        if self.has_sinks:
            shapes["sinks"] = (self.num_heads,)
        return {name: shape for name, shape in shapes.items() if name not in self.absent}

    @property
    def made(self) -> tuple[str, ...]:
        """Of queries, keys and values, those that it has a matrix for."""
        return tuple(name for name in ("q", "k", "v") if name not in self.absent)

    @property
    def absent(self) -> tuple[str, ...]:
        """Tensors that a layer has none of, since others stand in for them."""
        if self.shares_kv_of is not None:
            return KV_TENSORS
        return ("v", "v_bias") if self.keys_are_values else ()


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """DeepSeek's: keys and values of all heads are made from one vector a token, of `rank` numbers and a few rotated
    ones, which is all that is kept of it; queries may go through a low rank, too."""

    num_heads: int
    rank: int
    plain_dim: int
    """Of a head's keys, what is not rotated."""
    rotated_dim: int
    """Of a head's keys, what is rotated: all heads have the same."""
    value_dim: int
    rope: RopeSpec
    """Of the rotated ones."""
    query_rank: int | None = None
    own_scale: float | None = None
    """What scores are multiplied by; None: 1 / sqrt(key_dim)."""
    growth: QueryGrowth | None = None
    norm_eps: float = 1e-6
    """Of the norms within low ranks: all makers leave theirs at this, whatever the layers' own is."""

    @property
    def scale(self) -> float:
        return self.key_dim**-0.5 if self.own_scale is None else self.own_scale

    @property
    def query_width(self) -> int:
        return self.num_heads * self.key_dim

    @property
    def key_dim(self) -> int:
        return self.plain_dim + self.rotated_dim

    @property
    def expanded_width(self) -> int:
        """Of all heads' keys, but for what is rotated, and values, as they are made from the latent."""
        return self.num_heads * (self.plain_dim + self.value_dim)

    @property
    def kv_values(self) -> int:
        return self.rank + self.rotated_dim

    def tensor_shapes(self, hidden: int) -> Shapes:
        query = self.num_heads * self.key_dim
        shapes: Shapes = {"q": (query, hidden)}
        if self.query_rank is not None:
            shapes = {"q_a": (self.query_rank, hidden), "q_a_norm": (self.query_rank,), "q_b": (query, self.query_rank)}
        return shapes | {
            "kv_a": (self.rank + self.rotated_dim, hidden),
            "kv_a_norm": (self.rank,),
            "kv_b": (self.expanded_width, self.rank),
            "o": (hidden, self.num_heads * self.value_dim),
        }
