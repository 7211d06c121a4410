"""How the keys of a whole batch of decodes are cut into work items of about one size: on the device, so that one
captured graph serves every context, and once a step for all layers. Knows positions and windows; attends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, log2

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from twostroke.backends.cuda.attention_table import settings_for
from twostroke.backends.cuda.kernels.paged import WalkConfig
from twostroke.backends.cuda.kernels.target import dependent, target_of

MOST_PROGRAMS_PER_SM = 12
"""That scratch has room for."""
ITEM_FIELDS = 4
"""Integers an item: token (-1: the item is nobody's), number among the token's items, their number, nothing. Sixteen
bytes, which never lie across two lines of memory."""
WRITTEN_AT_ONCE = tl.constexpr(32)
"""Items of a token."""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How far a batch's keys are cut; host-known numbers only, the cuts themselves are made on the device."""

    target_items: int  # work items, a KV head, that a batch is cut into when its sequences alone are fewer
    smallest_tokens: int  # no item is cut shorter than this
    max_items: int  # never more items than this, whatever the contexts: the height of the grid
    fine_items: int = 0
    """What it is cut into instead where items would have `long_tokens` or more on average; 0: nothing else."""
    long_tokens: int = 0

    def in_blocks(self, block: int) -> tuple[int, int, int, int]:
        """As kernels take it."""
        return self.target_items, self.fine_items, self.long_tokens // block, ceil(self.smallest_tokens / block)


@dataclass(frozen=True, slots=True)
class CutRule:
    """A row of the table. Many sequences need no cuts: the last to begin even out what the first leave. Of few, that
    all run at once, those longer than most are cut in two. Few long ones are cut further: an SM runs two or three
    programs at once, and the last would have it to themselves for long, which does not fill the memory's bandwidth."""

    items_per_sm: int
    smallest_tokens: int
    items_per_token: float = 0.0  # a batch is cut into this many items or `items_per_sm`, whichever is more
    long_tokens: int = 0  # of an item on average, from where on the next two are the rule; 0: never
    long_items_per_sm: int = 0
    long_items_per_token: int = 0

    def plan(self, num_tokens: int, kv_heads: int, num_sms: int) -> SplitPlan:
        """An item more than the sequences need exits at once, so the grid stays near both numbers."""
        target = max(most_items(kv_heads, num_sms, self.items_per_sm), int(self.items_per_token * num_tokens))
        fine = 0
        if self.long_tokens:
            fine = max(most_items(kv_heads, num_sms, self.long_items_per_sm), self.long_items_per_token * num_tokens)
        return SplitPlan(target, self.smallest_tokens, num_tokens + max(target, fine), fine, self.long_tokens)


@cache
def split_plan(num_tokens: int, kv_heads: int, num_sms: int, card: str = "", *, window: int | None) -> SplitPlan:
    """`card`: whose own measurements go first. `window`: of the layers that read these keys; None: none."""
    facts = {"tokens": num_tokens, "programs_per_sm": num_tokens * kv_heads // num_sms, "window": window or 0}
    return CutRule(**settings_for("decode cuts", card, **facts)).plan(num_tokens, kv_heads, num_sms)


def most_items(kv_heads: int, num_sms: int, programs_per_sm: int) -> int:
    """Work items of a KV head, where an SM has `programs_per_sm` programs."""
    return max(1, programs_per_sm * num_sms // kv_heads)


@cache
def decode_config(head_dim: int, num_tokens: int, device: torch.device, *, window: int | None) -> WalkConfig:
    """Layers with a window may walk otherwise than those without, so cuts are made for each. `bench/cuda/attention.py`
    measures the alternatives, `bench/cuda/marginal.py` some of them inside a step."""
    target = target_of(device)
    facts = {"head_dim": head_dim, "tokens": num_tokens, "window": window or 0}
    return WalkConfig(**settings_for("decode", target.name, **facts, **target.room))


@triton.jit
def key_blocks(position, last, window, BLOCK: tl.constexpr):
    """The first block of keys that queries from `position` to `last` read, and how many."""
    first = position * 0
    if window is not None:
        first = tl.maximum(position - window + 1, 0) // BLOCK
    return first, last // BLOCK + 1 - first


@triton.jit
def _load_held(numbers, held):
    """Zero where nothing is held; None: all is."""
    if held is None:
        return tl.load(numbers)
    else:
        return tl.load(numbers, mask=held, other=0)


@triton.jit
def query_span(positions, token, held, QUERIES: tl.constexpr):
    """Where the first and the last of a sequence's queries stand. Those that are not used stand at 0. `held`: of
    several sequences, which there are."""
    first = _load_held(positions + token * QUERIES, held)
    last = first
    for number in tl.static_range(1, QUERIES):
        last = tl.maximum(last, _load_held(positions + token * QUERIES + number, held))
    return first, last


@triton.jit
def splits_of(blocks, chunk):
    """Into how many items a sequence is cut: none below a quarter more than a chunk, at most one more than it fills."""
    return tl.maximum((blocks + chunk * 3 // 4) // chunk, 1)


@triton.jit(do_not_specialize=["window", "num_tokens", "target_items", "fine_items", "long_blocks", "smallest_blocks"])
def _cut_kernel(
    positions, count, items, window, num_tokens, target_items, fine_items, long_blocks, smallest_blocks,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As many programs as there is room for items. The first write those of a token each, side by side; the last, where
    no item is, that it is nobody's. Longest first: a device that starts with them ends with the short ones, evenly."""
    program = tl.program_id(0)
    if PDL:
        # No trigger: attention reads the items before it waits, and what stands between them triggers early.
        gdc_wait()
    if count is not None:
        num_tokens = tl.load(count)
    index = tl.arange(0, WIDTH)
    held = index < num_tokens
    first_query, last_query = query_span(positions, index, held, QUERIES)
    _, blocks = key_blocks(first_query, last_query, window, BLOCK)
    total = tl.sum(tl.where(held, blocks, 0), 0)
    is_long = (fine_items > 0) & (total // tl.maximum(target_items, num_tokens) >= long_blocks)
    chunk = tl.maximum(tl.cdiv(total, tl.where(is_long, fine_items, target_items)), smallest_blocks)
    each = tl.where(held, splits_of(blocks, chunk), 0)
    if program < num_tokens:
        longest = tl.cdiv(blocks, tl.maximum(each, 1))  # of a token's items, in blocks
        is_own = index == program
        own_longest = tl.sum(tl.where(is_own, longest, 0), 0)
        is_before = (longest > own_longest) | ((longest == own_longest) & (index < program))
        first = tl.sum(tl.where(is_before, each, 0), 0)
        splits = tl.sum(tl.where(is_own, each, 0), 0)
        for start in range(0, splits, WRITTEN_AT_ONCE):
            split = start + tl.arange(0, WRITTEN_AT_ONCE)
            fields = items + (first + split) * 4
            is_item = split < splits
            tl.store(fields, split * 0 + program, mask=is_item)
            tl.store(fields + 1, split, mask=is_item)
            tl.store(fields + 2, split * 0 + splits, mask=is_item)
    elif program >= tl.sum(each, 0):
        tl.store(items + program * 4, -1)


def cut_contexts(
    positions: torch.Tensor,  # int32 [num_tokens * queries]
    items: torch.Tensor,  # int32 [max_items, ITEM_FIELDS], written
    plan: SplitPlan,
    config: WalkConfig,
    *,
    window: int | None = None,
    count: torch.Tensor | None = None,
    queries: int = 1,
) -> None:
    """Cut a batch's keys into work items: once a step, for all layers of that window. `count` (int32 [1]): how many of
    the tokens, the first, have any; None: all. `queries`: of each token, at places side by side."""
    num_tokens = len(positions) // queries
    dependent(_cut_kernel, (plan.max_items,), positions.device)(
        positions, count, items, window, num_tokens, *plan.in_blocks(config.block),
        BLOCK=config.block, WIDTH=plan_width(num_tokens), QUERIES=queries, num_warps=1 if num_tokens <= 32 else 4,
    )  # fmt: skip


def plan_width(num_tokens: int) -> int:
    """Few widths, so that few variants are compiled."""
    return 32 if num_tokens <= 32 else 4 ** ceil(log2(num_tokens) / 2)
