"""Which experts a router's numbers choose, within a kernel: scores, corrections, groups, and the best few in order.
Launches nothing and knows no weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twostroke.models.mlp_spec import PLAIN_ROUTING, Routing


@dataclass(frozen=True, slots=True, eq=False)
class RouterTerms:
    """What is added to a router's numbers, and how they become a choice."""

    routing: Routing = PLAIN_ROUTING
    bias: torch.Tensor | None = None  # float32 [experts]
    correction: torch.Tensor | None = None  # float32 [experts]
    scales: torch.Tensor | None = None  # float32 [experts]: what their shares are multiplied by at last

    @property
    def is_plain(self) -> bool:
        return self.routing == PLAIN_ROUTING and self.bias is None and self.scales is None

    @property
    def by_logits(self) -> bool:
        """Whether the largest numbers are the best scores, so that only the chosen ones' are worked out."""
        own = self.routing
        is_monotone = own.num_groups == 1 or own.ranked_by == 1
        return own.scoring == "softmax" and self.correction is None and is_monotone


PLAIN_TERMS = RouterTerms()


@triton.jit
def _reordered(bits):
    """Between the bits of a float and an integer of the same rank among integers; its own inverse."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def scores_of(logits, ids, experts: tl.constexpr, ROUTING: tl.constexpr):
    """[tokens, PADDED] to the same"""
    if ROUTING.scoring == "sigmoid":
        found = tl.sigmoid(logits)
    else:
        largest = tl.max(tl.where(ids < experts, logits, float("-inf")), 1)[:, None]
        exponentials = tl.where(ids < experts, tl.exp(logits - largest), 0.0)
        found = exponentials / tl.sum(exponentials, 1)[:, None]
    return found


@triton.jit
def in_best_groups(wanted, ids, experts: tl.constexpr, ROUTING: tl.constexpr):
    """wanted [tokens, PADDED] -> 1 where an expert lies in one of a token's best groups, else 0. Of equal groups the
    lower is the better."""
    num_groups: tl.constexpr = ROUTING.num_groups
    ranked_by: tl.constexpr = ROUTING.ranked_by
    groups_per_token: tl.constexpr = ROUTING.groups_per_token
    size: tl.constexpr = experts // num_groups
    padded: tl.constexpr = triton.next_power_of_2(num_groups)
    own_group = ids // size
    wanted = tl.where(wanted == wanted, wanted, float("-inf"))
    groups = tl.arange(0, padded)[None, :]
    best = tl.full([wanted.shape[0], padded], float("-inf"), tl.float32)
    for group in range(num_groups):
        left = tl.where(own_group == group, wanted, float("-inf"))
        top = tl.max(left, 1)[:, None]
        total = top
        for _ in tl.static_range(1, ranked_by):
            first = tl.min(tl.where(left == top, ids, 2**30), 1)[:, None]
            left = tl.where(ids == first, float("-inf"), left)
            top = tl.max(left, 1)[:, None]
            total += top
        best = tl.where(groups == group, total, best)
    found = tl.zeros([wanted.shape[0], wanted.shape[1]], tl.int32)
    for _ in range(groups_per_token):
        highest = tl.max(best, 1)[:, None]
        winner = tl.min(tl.where(best == highest, groups, 2**30), 1)[:, None]
        found += (own_group == winner).to(tl.int32)
        best = tl.where(groups == winner, float("-inf"), best)
    return found


@triton.jit
def pick(
    wanted, scores, ids, num_places, experts: tl.constexpr, top_k: tl.constexpr, PLACES: tl.constexpr,
    CORRECTED: tl.constexpr, NAMED: tl.constexpr,
):  # fmt: skip
    """[tokens, PADDED] -> the place of each expert with a token (0 for the most wanted, of equals for the lower;
    `top_k`: none), the scores by place [tokens, PLACES], and, if NAMED, the experts. What is not a number comes last,
    so that a spoilt row still goes to experts that exist. CORRECTED: scores are not what is wanted."""
    wanted = tl.where(wanted == wanted, wanted, float("-inf"))
    keys = _reordered(tl.where(wanted == 0.0, 0.0, wanted).to(tl.int32, bitcast=True))  # with one zero only
    # An expert that has its place keeps that as a key, below the key of no expert, which is below infinity's.
    lowest: tl.constexpr = -(2**31)
    keys = tl.where(ids < experts, keys, lowest + PLACES)
    slots = tl.arange(0, PLACES)[None, :]
    picked = tl.full([wanted.shape[0], PLACES], lowest, tl.int32)
    named = tl.zeros([wanted.shape[0], PLACES], tl.int32)
    place = 0
    while place < num_places:  # which is `top_k`: an unrolled loop's code would take longer to fetch than to run
        best = tl.max(keys, 1)[:, None]
        expert = tl.min(tl.where(keys == best, ids, 2**30), 1)[:, None]
        keys = tl.where(ids == expert, lowest + place, keys)
        if CORRECTED:
            best = tl.sum(tl.where(ids == expert, scores, 0.0), 1)[:, None].to(tl.int32, bitcast=True)
        picked = tl.where(slots == place, best, picked)
        if NAMED:
            named = tl.where(slots == place, expert, named)
        place += 1
    places = tl.where(keys < lowest + top_k, keys - lowest, top_k)
    if not CORRECTED:
        picked = _reordered(picked)
    return places, picked.to(tl.float32, bitcast=True), named
