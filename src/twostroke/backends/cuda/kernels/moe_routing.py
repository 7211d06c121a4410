"""Which experts a token goes to, and where its row stands among the rows sorted by expert: one kernel chooses and
counts by blocks of tokens, the next gives rows. The order is stable, by expert, then by token, whichever program comes
first, so the same tokens always give the same order. Knows no expert's weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostroke.backends.cuda.kernels.expert_choice import PLAIN_TERMS, RouterTerms, in_best_groups, pick, scores_of
from twostroke.backends.cuda.kernels.target import dependent, target_of
from twostroke.backends.cuda.kernels.turns import prefetch_to_l2, start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import cdiv, next_power_of_2


class Order(NamedTuple):
    """Rows sorted by expert: a pair is a token and one of its experts."""

    sorted_pairs: torch.Tensor  # int32 [num_pairs]: the pair of each row
    starts: torch.Tensor  # int32 [experts + 1]: each expert's first row
    top_k: int  # experts a token; pair p is of token p // top_k


@dataclass(frozen=True, slots=True)
class RoutingTile:
    """What a program that chooses takes: `tokens` tokens, and one of `parts` parts of the product's depth, `depth`
    inputs at a time."""

    tokens: int
    parts: int
    depth: int
    num_warps: int = 4
    num_stages: int = 4

    def for_experts(self, padded: int, *, by_logits: bool = True) -> RoutingTile:
        """Tiles are set for 128 experts, of which the largest numbers are chosen; more of them need more registers and
        more room for a stage, and scores beside the numbers more registers."""
        factor = _breadth(padded)
        warps = self.num_warps * factor * (1 if by_logits else 2)
        return replace(self, num_warps=min(16, warps), depth=max(32, self.depth // factor))


_MOST_TOKENS = 64  # of a tile
_MOST_PARTS = 16
_PROGRAMS = 128
"""With parts, there are no more programs than this: about one a multiprocessor, and little to join."""


@cache
def choose_tile(num_tokens: int, *, is_wide: bool = False) -> RoutingTile:
    """A few tokens' programs would each read the whole router, so they share its depth; many tokens fill the device.
    `is_wide`: a token's numbers, and the scores beside them, are too many for as many tokens' to lie in registers."""
    tokens = 16 if num_tokens <= 2048 else _MOST_TOKENS // 2 if is_wide else _MOST_TOKENS
    blocks = cdiv(num_tokens, tokens)
    parts = next((parts for parts in (8, 4, 2) if blocks * parts <= _PROGRAMS), 1)
    if parts == 1:
        # Four warps of 16 tokens each have all their experts to themselves, so none waits for another while choosing.
        return RoutingTile(tokens, parts, depth=64, num_warps=4, num_stages=6)
    few = num_tokens <= 128
    return RoutingTile(tokens, parts, depth=256 if few else 64, num_stages=2 if few else 5)


class RoutingScratch:
    """What the two kernels hand on: which expert has which place with a token, counts by blocks of tokens, and the
    sums of a product cut into parts."""

    def __init__(self, num_experts: int, max_tokens: int, device: torch.device | str) -> None:
        padded, tokens = _padded(num_experts), cdiv(max_tokens, _MOST_TOKENS) * _MOST_TOKENS
        rows_of_sums = min(_PROGRAMS * _MOST_TOKENS, _MOST_PARTS * tokens)
        self.places = torch.zeros(tokens, padded, dtype=torch.int8, device=device)
        self.counts = torch.zeros(tokens // 16, padded, dtype=torch.int32, device=device)
        self.sums = torch.zeros(rows_of_sums, padded, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(_PROGRAMS, dtype=torch.int32, device=device)


def _padded(num_experts: int) -> int:
    return max(16, next_power_of_2(num_experts))  # a matrix instruction has no fewer columns


def _breadth(padded: int) -> int:
    return max(1, padded // 128)


@triton.jit
def dot(left, right, sums, PRECISION: tl.constexpr):
    if PRECISION == "ieee":
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision=PRECISION)


@triton.jit
def _router_sums(
    x, router, tokens, ids, first, num_tokens, hidden: tl.constexpr, experts: tl.constexpr, SPAN: tl.constexpr,
    EVEN: tl.constexpr, TOKENS: tl.constexpr, PADDED: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[TOKENS, PADDED], over SPAN inputs from the `first` on, all of which exist if EVEN. Tokens and experts beyond
    the last are that one again."""
    depth = first + tl.arange(0, DEPTH)
    inputs = x + tl.minimum(tokens, num_tokens - 1)[:, None].to(tl.int64) * hidden + depth[None, :]
    weights = router + tl.minimum(ids, experts - 1)[:, None] * hidden + depth[None, :]
    sums = tl.zeros([TOKENS, PADDED], tl.float32)
    for start in range(0, SPAN, DEPTH):
        if EVEN:
            input_block = tl.load(inputs + start)
            weight_block = tl.load(weights + start)
        else:
            is_input = (depth + start < hidden)[None, :]
            input_block = tl.load(inputs + start, mask=is_input, other=0.0)
            weight_block = tl.load(weights + start, mask=is_input, other=0.0)
        sums = dot(input_block, tl.trans(weight_block.to(input_block.dtype)), sums, PRECISION)
    return sums


@triton.jit
def _choose(
    logits, bias, correction, expert_scales, block, tokens, num_tokens, num_places, shares, chosen, places, counts,
    experts: tl.constexpr, top_k: tl.constexpr, NORMALISE: tl.constexpr, ROUTING: tl.constexpr, BY_LOGITS: tl.constexpr,
    TOKENS: tl.constexpr, PADDED: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """From logits [TOKENS, PADDED]: shares, places with the tokens of an expert side by side, and an expert's count;
    and the experts themselves, where there is room for them."""
    ids = tl.arange(0, PADDED)
    slots = tl.arange(0, PLACES)[None, :]
    is_token = (tokens < num_tokens)[:, None]
    if bias is not None:
        logits += tl.load(bias + ids, mask=ids < experts, other=0.0)[None, :]
    scores = logits
    if not BY_LOGITS:
        scores = scores_of(logits, ids[None, :], experts, ROUTING)
    wanted = scores
    if correction is not None:
        wanted = scores + tl.load(correction + ids, mask=ids < experts, other=0.0)[None, :]
    if ROUTING.num_groups > 1:
        wanted = tl.where(in_best_groups(wanted, ids[None, :], experts, ROUTING) > 0, wanted, float("-inf"))
    found, picked, named = pick(
        wanted, scores, ids[None, :], num_places, experts, top_k, PLACES, correction is not None,
        (chosen is not None) or (expert_scales is not None),
    )  # fmt: skip
    found = tl.where(is_token, found, top_k)
    own_places = places + block * (PADDED * TOKENS) + tl.arange(0, TOKENS)[:, None]
    tl.store(own_places + ids[None, :] * TOKENS, found.to(tl.int8))
    tl.store(counts + block * PADDED + ids, tl.sum((found < top_k).to(tl.int32), 0))
    mask = is_token & (slots < top_k)
    if BY_LOGITS:
        largest = tl.max(tl.where(slots == 0, picked, float("-inf")), 1)[:, None]
        if ROUTING.num_groups > 1 and not NORMALISE:  # the largest of all may lie in a group that was not chosen
            largest = tl.max(tl.where(ids[None, :] < experts, logits, float("-inf")), 1)[:, None]
        parts = tl.where(slots < top_k, tl.exp(picked - largest), 0.0)
        if NORMALISE:
            total = tl.sum(parts, 1)
        else:
            total = tl.sum(tl.where(ids[None, :] < experts, tl.exp(logits - largest), 0.0), 1)
        parts = parts / total[:, None]
    else:
        parts = tl.where(slots < top_k, picked, 0.0)
        if NORMALISE:
            parts = parts / tl.sum(parts, 1)[:, None]
    if ROUTING.share_scale != 1.0:
        parts *= ROUTING.share_scale
    if expert_scales is not None:
        parts *= tl.load(expert_scales + named, mask=mask, other=0.0)
    tl.store(shares + tokens[:, None] * top_k + slots, parts, mask=mask)
    if chosen is not None:
        tl.store(chosen + tokens[:, None] * top_k + slots, named, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_places"])
def _choose_kernel(
    x, router, bias, correction, expert_scales, part_sums, arrivals, shares, chosen, places, counts, num_tokens,
    num_places, hidden: tl.constexpr, experts: tl.constexpr, top_k: tl.constexpr, NORMALISE: tl.constexpr,
    ROUTING: tl.constexpr, BY_LOGITS: tl.constexpr, TOKENS: tl.constexpr, PADDED: tl.constexpr, PLACES: tl.constexpr,
    PARTS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: a block of tokens, all experts, and a part of the depth. The last of a block's programs to end adds
    the parts, always in the same order, and chooses."""
    span: tl.constexpr = (hidden + PARTS * DEPTH - 1) // (PARTS * DEPTH) * DEPTH
    is_even: tl.constexpr = PARTS * span == hidden
    part, block = tl.program_id(0), tl.program_id(1)
    within = tl.arange(0, TOKENS)
    tokens = block * TOKENS + within
    ids = tl.arange(0, PADDED)
    if PDL:
        gdc_launch_dependents()
        if PARTS > 1 and is_even:
            # Nobody's result, and pushed out of L2 by the last layer's experts.
            prefetch_to_l2(router + tl.minimum(ids, experts - 1)[:, None] * hidden + part * span, span)
        gdc_wait()
    sums = _router_sums(
        x, router, tokens, ids, part * span, num_tokens, hidden, experts, span, is_even, TOKENS, PADDED, DEPTH,
        PRECISION,
    )  # fmt: skip
    if PARTS == 1:
        _choose(
            sums, bias, correction, expert_scales, block, tokens, num_tokens, num_places, shares, chosen, places,
            counts, experts, top_k, NORMALISE, ROUTING, BY_LOGITS, TOKENS, PADDED, PLACES,
        )  # fmt: skip
    else:
        block_sums = part_sums + block * (PARTS * TOKENS * PADDED) + within[:, None] * PADDED + ids[None, :]
        tl.store(block_sums + part * (TOKENS * PADDED), sums)
        # Every thread's part is written before one thread says so, and read only after the last has said so.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + block, 1, sem="acq_rel", scope="gpu")
        if arrived == PARTS - 1:
            tl.debug_barrier()
            # Past the first-level cache, which may hold what was there before.
            logits = tl.load(block_sums, cache_modifier=".cg")
            for other in tl.static_range(1, PARTS):
                logits += tl.load(block_sums + other * (TOKENS * PADDED), cache_modifier=".cg")
            _choose(
                logits, bias, correction, expert_scales, block, tokens, num_tokens, num_places, shares, chosen,
                places, counts, experts, top_k, NORMALISE, ROUTING, BY_LOGITS, TOKENS, PADDED, PLACES,
            )  # fmt: skip
            tl.store(arrivals + block, 0)


@triton.jit(do_not_specialize=["num_blocks", "num_pairs"])
def _sort_kernel(
    places, counts, starts, sorted_pairs, rows, num_blocks, num_pairs, experts: tl.constexpr, top_k: tl.constexpr,
    TOKENS: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A pair is a token and one of its experts. A program: the pairs of a block of tokens, after all of experts before
    theirs, and those of their own expert in blocks before; all count for themselves, so none waits for another."""
    block = tl.program_id(0)
    ids = tl.arange(0, PADDED)
    within = tl.arange(0, TOKENS)
    start_next_and_wait(PDL)
    # An expert's tokens lie side by side: most of a thread's work stays within it.
    found = tl.load(places + block * (PADDED * TOKENS) + ids[:, None] * TOKENS + within[None, :]).to(tl.int32)
    all_pairs = tl.zeros([BLOCKS, PADDED], tl.int32)
    before = tl.zeros([BLOCKS, PADDED], tl.int32)
    first = 0
    while first < num_blocks:  # not a range: the interpreter makes none of a run-time number
        others = first + tl.arange(0, BLOCKS)[:, None]
        count = tl.load(counts + others * PADDED + ids[None, :], mask=others < num_blocks, other=0)
        all_pairs += count
        before += tl.where(others < block, count, 0)
        first += BLOCKS
    of_expert = tl.sum(all_pairs, 0)
    start = tl.cumsum(of_expert, 0) - of_expert
    if block == 0:
        tl.store(starts + ids, start, mask=ids < experts)
        tl.store(starts + experts, num_pairs)
    is_own = found < top_k
    own = is_own.to(tl.int32)
    row = (start + tl.sum(before, 0))[:, None] + tl.cumsum(own, 1) - own
    pair = (block * TOKENS + within)[None, :] * top_k + found
    tl.store(rows + pair, row, mask=is_own)
    tl.store(sorted_pairs + row, pair, mask=is_own)


def route(
    x: torch.Tensor,
    router: torch.Tensor,
    scratch: RoutingScratch,
    shares: torch.Tensor,
    order: Order,
    rows: torch.Tensor,
    *,
    normalise: bool,
    terms: RouterTerms = PLAIN_TERMS,
    tile: RoutingTile | None = None,
) -> None:
    """x [num_tokens, hidden] and router [experts, hidden] -> shares float32 [num_tokens, top_k], the likeliest expert
    first, the order, and rows int32 [num_tokens, top_k] (the row of each pair)."""
    is_wide = not terms.by_logits and _padded(len(router)) > 128
    tile = tile or choose_tile(len(x), is_wide=is_wide)
    choose_experts(x, router, scratch, shares, normalise=normalise, terms=terms, tile=tile)
    sort_by_expert(scratch, order, rows, tile=tile)


def choose_experts(
    x: torch.Tensor,
    router: torch.Tensor,
    scratch: RoutingScratch,
    shares: torch.Tensor,
    *,
    normalise: bool,
    tile: RoutingTile,
    terms: RouterTerms = PLAIN_TERMS,
    chosen: torch.Tensor | None = None,
) -> None:
    """-> shares, and what `sort_by_expert` reads, in blocks of the tile's tokens; and, where there is room for them,
    `chosen` int32 [num_tokens, top_k]: the experts, in the order of their shares."""
    (num_tokens, hidden), experts, top_k = x.shape, router.shape[0], shares.shape[1]
    blocks = cdiv(num_tokens, tile.tokens)
    if tile.parts > 1 and blocks * tile.parts > _PROGRAMS:
        raise ValueError(f"{blocks} blocks of tokens in {tile.parts} parts: more than {_PROGRAMS} programs")
    if top_k > 127:
        raise ValueError(f"{top_k} experts a token: places are kept in a byte, which holds 127")
    padded = _padded(experts)
    tile = tile.for_experts(padded, by_logits=terms.by_logits)
    depth = min(tile.depth, max(16, next_power_of_2(hidden)))
    num_stages = target_of(x.device).stages(tile.num_stages, (tile.tokens + padded) * depth * x.element_size())
    dependent(_choose_kernel, (tile.parts, blocks), x.device)(
        x, router, terms.bias, terms.correction, terms.scales, scratch.sums, scratch.arrivals, shares, chosen,
        scratch.places, scratch.counts, num_tokens, top_k, hidden, experts, top_k, NORMALISE=normalise,
        ROUTING=terms.routing, BY_LOGITS=terms.by_logits, TOKENS=tile.tokens, PADDED=padded,
        PLACES=next_power_of_2(top_k), PARTS=tile.parts, DEPTH=depth, PRECISION=dot_precision(x.dtype),
        num_warps=tile.num_warps, num_stages=num_stages,
    )  # fmt: skip


def sort_by_expert(scratch: RoutingScratch, order: Order, rows: torch.Tensor, *, tile: RoutingTile) -> None:
    """After `choose_experts` of these very tokens with the same tile."""
    (num_tokens, top_k), experts = rows.shape, order.starts.shape[0] - 1
    blocks, padded = cdiv(num_tokens, tile.tokens), _padded(experts)
    dependent(_sort_kernel, (blocks,), rows.device)(
        scratch.places, scratch.counts, order.starts, order.sorted_pairs, rows, blocks, num_tokens * top_k, experts,
        top_k, TOKENS=tile.tokens, PADDED=padded, BLOCKS=max(16, tile.tokens // _breadth(padded)),
        num_warps=min(16, (4 if tile.tokens <= 16 else 8) * _breadth(padded)),
    )  # fmt: skip


def dot_precision(dtype: torch.dtype) -> str:
    """Of `dot`: exact for float32, which tests compare closely, and in the interpreter, which cannot multiply bfloat16
    matrices. To 16-bit operands on a device the other means nothing."""
    return "ieee" if dtype == torch.float32 or triton.knobs.runtime.interpret else "tf32"
