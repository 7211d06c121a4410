"""How the keys of a whole batch of decodes are cut into work items of about one size: on the device, so that one
captured graph serves every context, and once a step for all layers. Knows positions and windows; attends nothing."""

# ruff: noqa: N803, SIM108
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from twostroke.backends.cuda.kernels.target import dependent, target_of

PROGRAMS_PER_SM = 2
"""That a batch is cut into where its sequences alone are fewer; `bench/cuda/marginal.py` measures others."""
MANY_PROGRAMS = 4
"""An SM, from where on some are yet to begin when the first, the longest, are done: these even out what those leave."""
ITEMS_OF_FEW = 1.2
"""A sequence, where fewer programs all run at once: those longer than most are cut in two, and none of equals is."""
LONG_ITEM_TOKENS = 1920
"""On average, from where on few sequences are cut further: an SM runs two or three programs at once, and of long ones
the last would have it to themselves for long, which does not fill the memory's bandwidth."""
PROGRAMS_PER_SM_OF_LONG = 6
ITEMS_OF_LONG = 3
"""A sequence: such a batch is cut into whichever is more."""
MOST_PROGRAMS_PER_SM = 12
"""That scratch has room for."""
LARGE_ROUNDS_BYTES = 72 << 10
"""Of shared memory that a program with rounds of 64 keys takes, about."""
ITEM_FIELDS = 4
"""Integers an item, one of them idle: sixteen bytes, which never lie across two lines of memory."""
WRITTEN_AT_ONCE = tl.constexpr(32)
"""Items of a token."""


@dataclass(frozen=True)
class DecodeConfig:
    """How one program walks its keys."""

    block: int
    """Keys a round."""
    warps: int
    stages: int
    """Triton's number: 3, 5 and 7 keep about 1, 2 and 3 rounds of loads in flight behind the block table."""
    keys_first: bool
    """Whether K is the left operand of the first product (asynchronous on Hopper) instead of the queries."""
    ahead: int = 0
    """Rounds of keys and values asked into L2 while the kernel ahead still runs."""


@dataclass(frozen=True)
class SplitPlan:
    """How far a batch's keys are cut; host-known numbers only, the cuts themselves are made on the device."""

    target_items: int
    """Work items, a KV head, that a batch is cut into when its sequences alone are fewer."""
    smallest_tokens: int
    """No item is cut shorter than this."""
    max_items: int
    """Never more items than this, whatever the contexts: the height of the grid."""
    fine_items: int = 0
    """What it is cut into instead where items would have `long_tokens` or more on average; 0: nothing else."""
    long_tokens: int = 0

    def in_blocks(self, block: int) -> tuple[int, int, int, int]:
        """As kernels take it."""
        return self.target_items, self.fine_items, self.long_tokens // block, ceil(self.smallest_tokens / block)


def split_plan(num_tokens: int, kv_heads: int, num_sms: int) -> SplitPlan:
    """Items of about one length, none shorter than 64 tokens (32 for a single sequence, where latency is all). An item
    more than the sequences need exits at once, so the grid stays near both numbers."""
    target, fine = most_items(kv_heads, num_sms, PROGRAMS_PER_SM), 0
    if num_tokens * kv_heads < MANY_PROGRAMS * num_sms:
        target = max(target, int(ITEMS_OF_FEW * num_tokens))
        if LONG_ITEM_TOKENS and num_tokens > 1:
            fine = max(most_items(kv_heads, num_sms, PROGRAMS_PER_SM_OF_LONG), ITEMS_OF_LONG * num_tokens)
    smallest = 32 if num_tokens == 1 else 64
    return SplitPlan(
        target_items=target,
        smallest_tokens=smallest,
        max_items=num_tokens + max(target, fine),
        fine_items=fine,
        long_tokens=LONG_ITEM_TOKENS,
    )


def most_items(kv_heads: int, num_sms: int, programs_per_sm: int) -> int:
    """Work items, a KV head, of so many programs an SM."""
    return max(1, programs_per_sm * num_sms // kv_heads)


def decode_config(head_dim: int, num_tokens: int, device: torch.device) -> DecodeConfig:
    """`bench/cuda/attention.py` measures the alternatives, `bench/cuda/marginal.py` some of them inside a step. Rounds
    of 64 keys take the fewest instructions; a single sequence is cut finer than that."""
    if head_dim > 128:
        return DecodeConfig(block=32, warps=4, stages=3, keys_first=False)
    shared_bytes = target_of(device).shared_bytes
    has_room = shared_bytes is None or shared_bytes >= PROGRAMS_PER_SM * LARGE_ROUNDS_BYTES
    block = 64 if num_tokens > 1 and has_room else 32
    return DecodeConfig(block, warps=2, stages=5, keys_first=False, ahead=1)


@triton.jit
def key_blocks(position, window, HAS_WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """The first block of keys that a query reads, and how many."""
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0) // BLOCK
    else:
        first = position * 0
    return first, position // BLOCK + 1 - first


@triton.jit
def _splits_of(blocks, chunk):
    """Into how many items a sequence is cut: none below a quarter more than a chunk, at most one more than it fills."""
    return tl.maximum((blocks + chunk * 3 // 4) // chunk, 1)


@triton.jit
def _blocks_an_item(total, num_tokens, target_items, fine_items, long_blocks, smallest_blocks):
    """Of so many blocks in all: what an item is to have, about."""
    is_long = (fine_items > 0) & (total // tl.maximum(target_items, num_tokens) >= long_blocks)
    return tl.maximum(tl.cdiv(total, tl.where(is_long, fine_items, target_items)), smallest_blocks)


@triton.jit
def locate(
    item,
    positions,
    window,
    target_items,
    fine_items,
    long_blocks,
    smallest_blocks,
    HAS_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of a batch of one token: its number (that of nobody where there are fewer items), the item's own, their count."""
    _, blocks = key_blocks(tl.load(positions), window, HAS_WINDOW, BLOCK)
    chunk = _blocks_an_item(blocks, 1, target_items, fine_items, long_blocks, smallest_blocks)
    splits = _splits_of(blocks, chunk)
    return tl.where(item < splits, 0, 1), item, splits


@triton.jit(do_not_specialize=["window", "num_tokens", "target_items", "fine_items", "long_blocks", "smallest_blocks"])
def _cut_kernel(
    positions,
    count,
    items,
    window,
    num_tokens,
    target_items,
    fine_items,
    long_blocks,
    smallest_blocks,
    HAS_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    """As many programs as there is room for items. The first write those of a token each, side by side; the last, where
    no item is, that it is nobody's. Longest first: a device that starts with them ends with the short ones, evenly."""
    program = tl.program_id(0)
    if PDL:
        # No trigger: attention reads the items before it waits, and what stands between them triggers early.
        gdc_wait()
    if HAS_COUNT:
        num_tokens = tl.load(count)
    index = tl.arange(0, WIDTH)
    held = index < num_tokens
    _, blocks = key_blocks(tl.load(positions + index, mask=held, other=0), window, HAS_WINDOW, BLOCK)
    total = tl.sum(tl.where(held, blocks, 0), 0)
    chunk = _blocks_an_item(total, num_tokens, target_items, fine_items, long_blocks, smallest_blocks)
    each = tl.where(held, _splits_of(blocks, chunk), 0)
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
        tl.store(items + program * 4, WIDTH)


def cut_contexts(
    positions: torch.Tensor,  # int32 [num_tokens]
    items: torch.Tensor,  # int32 [max_items, 4], written
    *,
    kv_heads: int,
    head_dim: int,
    num_sms: int,
    window: int | None = None,
    count: torch.Tensor | None = None,
    plan: SplitPlan | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """Cut a batch's keys into work items: once a step, for all layers of that window. A token alone needs none made.
    `count` (int32 [1]): how many of the positions, the first, have any; None: all."""
    num_tokens = len(positions)
    if num_tokens == 1:
        return
    config = config or decode_config(head_dim, num_tokens, positions.device)
    plan = plan or split_plan(num_tokens, kv_heads, num_sms)
    dependent(_cut_kernel, (plan.max_items,), positions.device)(
        positions,
        positions if count is None else count,
        items,
        window or 0,
        num_tokens,
        *plan.in_blocks(config.block),
        HAS_WINDOW=window is not None,
        BLOCK=config.block,
        WIDTH=plan_width(num_tokens),
        HAS_COUNT=count is not None,
        num_warps=1 if num_tokens <= 32 else 4,
    )


def plan_width(num_tokens: int) -> int:
    """Few widths, so that few variants are compiled."""
    if num_tokens == 1:
        return 1
    return 32 if num_tokens <= 32 else 4 ** ceil(log2(num_tokens) / 2)
