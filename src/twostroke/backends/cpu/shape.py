"""What compiled code is specialised for: the few sizes that shape registers and loops. Everything else is read from
argument records, so models of the same shape share code."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from twostroke.backends.cpu.kv_kind import KVKind
from twostroke.backends.cpu.tile_kinds import OPENED_GROUP_BYTES, TileKind
from twostroke.models.spec import Mlp

SPAN = 256
"""Positions whose attention scores are held at once."""
RUN = 16
"""Keys that lie side by side in a block."""
LANES = 16
_TILE_ROWS = 96
"""Query vectors that one piece of prefill's attention takes over each span: K and V are read from far away once."""

CLAMPED = "clamped_"


def activation_name(mlp: Mlp) -> str:
    """Of what joins gate and up: code is made for it, its numbers and all."""
    return mlp.activation if mlp.clamp is None else f"{CLAMPED}{mlp.clamp.limit!r}_{mlp.clamp.alpha!r}"


@dataclass(frozen=True, slots=True)
class KernelShape:
    head_dim: int
    queries_per_kv_head: int
    block_size: int
    activation: str
    soft_capped: bool
    """Attention scores pass a soft cap."""
    tile_kinds: tuple[TileKind, ...]
    kv_kind: KVKind = KVKind.F16
    has_sinks: bool = False
    """Each head has a score of nothing, beside those of the keys."""
    both_ways: bool = False
    """Tokens see those behind them, too."""
    plain_activation: str | None = None
    """Of an encoder, whose MLP has no gate; None: it is none."""

    @property
    def attention_key(self) -> str:
        """What code that attends is specialised for."""
        cap = "capped" if self.soft_capped else "plain"
        sizes = f"{self.head_dim}x{self.queries_per_kv_head}x{self.block_size}"
        further = ("-sinks" if self.has_sinks else "") + ("-both-ways" if self.both_ways else "")
        return f"{sizes}-{self.kv_kind.value}-{cap}{further}"

    @property
    def block_bytes(self) -> int:
        """K and V of one block and one KV head."""
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
        return self.heads_together * self.head_dim + 2 * LANES

    def scratch_bytes(self, accumulators: int, depth: int) -> int:
        """What one thread needs at most: to open a panel of weights this deep, or to attend."""
        panel = 4096 + depth // 32 * OPENED_GROUP_BYTES * 4  # four columns, and what a few tiles leave to be joined
        return max(panel, AttentionScratch.of(self, accumulators).total)


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
        span = 4 * shape.heads_together * shape.queries_together(accumulators) * SPAN
        return cls(*accumulate((vectors, vectors, state, state, span, span)))
