"""What compiled code is specialised for: the few sizes that shape registers and loops. Everything else is read from
argument records, so models of the same shape share code."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.backends.cpu.arguments import TileKind

SPAN = 256
"""Positions whose attention scores are held at once."""


@dataclass(frozen=True, slots=True)
class KernelShape:
    head_dim: int
    queries_per_kv_head: int
    block_size: int
    activation: str
    soft_capped: bool
    """Attention scores pass a soft cap."""
    tile_kinds: tuple[TileKind, ...]

    @property
    def key(self) -> str:
        kinds = "+".join(kind.name for kind in self.tile_kinds)
        cap = "capped" if self.soft_capped else "plain"
        sizes = f"{self.head_dim}x{self.queries_per_kv_head}x{self.block_size}"
        return f"{sizes}-{self.activation}-{cap}-{kinds}"

    @property
    def block_bytes(self) -> int:
        """K and V of one block and one KV head."""
        return 2 * 2 * self.block_size * self.head_dim

    @property
    def value_offset(self) -> int:
        """Bytes from K to V within them."""
        return 2 * self.block_size * self.head_dim

    @property
    def heads_together(self) -> int:
        """Query heads of one KV head that share each load of K and V: the largest divisor up to 8."""
        return max(count for count in range(1, 9) if self.queries_per_kv_head % count == 0)

    def queries_together(self, accumulators: int) -> int:
        """Tokens of a prefill chunk that share them too."""
        return max(1, min(8, accumulators // 4) // self.heads_together)

    @property
    def head_groups_per_kv_head(self) -> int:
        return self.queries_per_kv_head // self.heads_together

    @property
    def span_result_floats(self) -> int:
        """What one span of one query leaves for merging, for one group of heads: weighted sums, maxima, sums."""
        return self.heads_together * (self.head_dim + 2)

    def scratch_bytes(self, accumulators: int, depth: int) -> int:
        """What one thread needs at most: to open a panel of weights this deep, or to attend."""
        # Four columns: eight times 64 bytes, and 32 floats, each; and what a few tiles leave to be joined.
        panel = 4096 + depth // 32 * (512 + 4 * 32) * 4
        rows = self.heads_together * self.queries_together(accumulators)
        attention = 4 * rows * (SPAN + 2 * self.head_dim)  # scores, a span's weighted sums, the running ones
        return max(panel, attention)
