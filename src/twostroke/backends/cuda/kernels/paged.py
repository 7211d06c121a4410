"""What attention's kernels are told in common: the shape of the heads, where keys and values lie, how scores are made
of products; and what a kernel for prompts says of itself. Launches nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import torch

from twostroke.backends.cuda.kernels.target import Target
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2

if TYPE_CHECKING:
    from twostroke.backends.cuda.kernels.prefill_tiles import PrefillScratch, PrefillWork, Tiling

LOG2_E: Final = 1.4426950408889634
NO_SCALES: Final = "none"
HEAD_SCALES: Final = "a head"
TOKEN_SCALES: Final = "a token and head"
"""What numbers of the cache are multiplied by: nothing, as those of 16 bits; a scale of each head, known when a model
is loaded; or one of each token and head, which is found as the token is stored."""
SCALE_BYTES: Final = 4
"""Of a token's scale: float32, the least that a card copies asynchronously."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What of a model and its KV layout the kernels depend on. A constant of those in Triton, which read its properties
    too."""

    heads: int
    kv_heads: int
    head_dim: int
    page: int  # tokens of a block of the cache
    dtype: torch.dtype
    queries: int = 1
    """Tokens of a sequence that decode attends in one walk over its keys: its last, and drafts behind that."""
    scaled: str = NO_SCALES
    """What a number of the cache is multiplied by."""
    is_causal: bool = True
    """Else tokens of a chunk see each other both ways; it is then all of its text."""

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def elements(self) -> int:
        """Of a group's heads."""
        return self.group * self.head_dim

    @property
    def head_elements(self) -> int:
        """Of a page, from one head to the next. Scales of its tokens lie behind a head's numbers of one byte."""
        return self.page * (self.head_dim + (SCALE_BYTES if self.scaled == TOKEN_SCALES else 0))

    @property
    def page_elements(self) -> int:
        return self.kv_heads * self.head_elements

    @property
    def head_scales(self) -> int:
        """The same for the scales of tokens, as far as they lie apart."""
        return self.head_elements // SCALE_BYTES

    @property
    def page_scales(self) -> int:
        return self.page_elements // SCALE_BYTES

    @property
    def width(self) -> int:
        """A head's size, padded to what Triton takes."""
        return max(16, next_power_of_2(self.head_dim))

    @property
    def precision(self) -> str:
        """Of products: float32 stays as exact as it is."""
        return "ieee" if self.dtype == torch.float32 else "tf32"

    @property
    def walkers(self) -> int:
        """Heads of a group, of all queries of a sequence, that walk over the keys of decode together."""
        return self.queries * self.group

    @property
    def walker_rows(self) -> int:
        """The same, padded to what a tensor-core product takes at least."""
        return max(16, next_power_of_2(self.walkers))

    @property
    def joined_heads(self) -> int:
        """The same, padded, where parts of decodes are joined."""
        return next_power_of_2(self.walkers)

    @property
    def joined_items(self) -> int:
        """Parts of decodes are joined this many at a time: 8192 numbers in registers."""
        return max(1, min(16, 8192 // (self.joined_heads * self.width)))


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV:
    """One layer's keys and values, and the pages of each row."""

    keys: torch.Tensor  # [num_blocks + 1, kv_heads, page, head_dim], contiguous but for scales between heads
    values: torch.Tensor
    table: torch.Tensor  # int32 [num_rows, table_len]
    key_scales: torch.Tensor | None = None  # float32 [kv_heads], or of each token [num_blocks + 1, kv_heads, page]
    value_scales: torch.Tensor | None = None

    @property
    def scaled(self) -> str:
        if self.key_scales is None:
            return NO_SCALES
        return HEAD_SCALES if self.key_scales.ndim == 1 else TOKEN_SCALES

    def shape_for(self, queries: torch.Tensor, width: int = 1) -> AttentionShape:
        """Raises where a kernel would read amiss."""
        _, heads, head_dim = queries.shape
        _, kv_heads, page, _ = self.keys.shape
        shape = AttentionShape(heads, kv_heads, head_dim, page, queries.dtype, width, self.scaled)
        strides = (shape.page_elements, shape.head_elements, head_dim, 1)
        if not (_lies(self.keys, strides) and _lies(self.values, strides) and queries.stride(1) == head_dim):
            raise ValueError("Attention wants contiguous caches and contiguous heads of a token.")
        return shape


def _lies(part: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """An axis of one place has any stride."""
    found = zip(part.shape, part.stride(), strides, strict=True)
    return all(size == 1 or own == wanted for size, own, wanted in found)


@dataclass(frozen=True, slots=True)
class WalkConfig:
    """How one program walks its keys. A constant of kernels in Triton; `bench/cuda/attention.py` measures others."""

    block: int
    """Keys a round. Of decode, 64 take the fewest instructions; a single sequence is cut finer than that."""
    warps: int
    stages: int
    """Triton's number. Of decode, 3, 5 and 7 keep about 1, 2 and 3 rounds of loads in flight behind the block table."""
    ahead: int = 0  # rounds of keys and values that decode asks into L2 while the kernel ahead still runs


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer weighs the keys of a query."""

    scale: float
    window: int | None = None  # a query reads this many keys, its own included; None: all before it
    softcap: float | None = None
    first: int = 0  # decodes with a window read no key before this position, but for their own
    is_causal: bool = True  # else every key of a query's chunk, or those less than a window away on either side
    sinks: torch.Tensor | None = field(default=None, compare=False)
    """float32 [heads]: a score of each head that is weighed with those of the keys, and has no value; None: none."""

    @property
    def factor(self) -> float:
        """What a score, capped or not, is multiplied by on its way into exp2."""
        return (self.scale if self.softcap is None else self.softcap) * LOG2_E

    @property
    def cap_factor(self) -> float | None:
        """What a score is multiplied by on its way into the cap (`attention_math.py`); None: there is none."""
        return None if self.softcap is None else 2 * LOG2_E * self.scale / self.softcap


class PrefillKernel(Protocol):
    """What attends the chunks of prompts. A module is one."""

    NAME: str

    def declines(self, shape: AttentionShape, target: Target) -> str | None:
        """Why it does not take a model on a device, or None."""

    def tiling(self, shape: AttentionShape, num_tokens: int, num_sms: int) -> Tiling:
        """How a step of `num_tokens` prompt tokens is cut into tiles."""

    def attend(
        self,
        queries: torch.Tensor,  # [num_tokens, heads, head_dim], any token stride
        kv: PagedKV,
        work: PrefillWork,
        out: torch.Tensor,  # [num_tokens, heads * head_dim], contiguous
        scoring: Scoring,
        scratch: PrefillScratch,
    ) -> None:
        """Query i of a segment stands at position `start + i` and reads every key of its row up to there that its
        window shows, the segment's own included: they are in the cache already."""
