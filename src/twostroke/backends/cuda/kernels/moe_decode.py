"""A mixture of experts for a few tokens: the router's logits, and two kernels that read the chosen experts' weights and
no others. Each of their programs works out a plain routing itself, which costs less than a kernel in between; any other
was worked out before. Deterministic: a program sums all experts of its outputs, in order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels.activation import Gate, activate
from twostroke.backends.cuda.kernels.expert_numbers import ExpertMatrix, parts_of, stored_sums
from twostroke.backends.cuda.kernels.expert_tiles import FewTile
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait, wait_and_start_next
from twostroke.backends.cuda.kernels.whole_numbers import cdiv, next_power_of_2


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """Where a few tokens go: by logits, from which programs work it out, or as `choose_experts` found it."""

    top_k: int
    logits: torch.Tensor | None = None  # float32 [num_tokens, experts]
    chosen: torch.Tensor | None = None  # int32 [num_tokens, top_k]
    shares: torch.Tensor | None = None  # float32 [num_tokens, top_k]


@triton.jit
def ranks_of_experts(logits, ids):
    """[experts] -> the place of each expert when the likeliest comes first and of equals the lower. Counted
    rather than sorted: a place is the number of experts before it. What is not a number comes last, so that a spoilt
    row still goes to experts that exist."""
    logits = tl.where(logits == logits, logits, float("-inf"))
    others, own = logits[:, None], logits[None, :]  # summed over the slower axis: mostly within a thread
    before = (others > own) | ((others == own) & (ids[:, None] < ids[None, :]))
    return tl.sum(before.to(tl.int32), 0)


@triton.jit
def _few_logits_kernel(
    x, router, logits, hidden: tl.constexpr, experts: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    depth = tl.arange(0, BLOCK_DEPTH)
    rows = router + ids[:, None] * hidden + depth[None, :]
    is_expert = (ids < experts)[:, None]
    # The router's weights are nobody's result: their first block is on its way while the kernel before still runs.
    weights = tl.load(rows, mask=is_expert & (depth < hidden)[None, :], other=0.0)
    start_next_and_wait(PDL)
    sums = tl.zeros([BLOCK_EXPERTS, BLOCK_DEPTH], tl.float32)
    for start in tl.static_range(0, hidden, BLOCK_DEPTH):
        values = tl.load(x + token.to(tl.int64) * hidden + start + depth, mask=start + depth < hidden, other=0.0)
        if start > 0:
            weights = tl.load(rows + start, mask=is_expert & (start + depth < hidden)[None, :], other=0.0)
        sums += weights.to(tl.float32) * values.to(tl.float32)[None, :]
    tl.store(logits + token * experts + ids, tl.sum(sums, 1), mask=ids < experts)


@triton.jit
def _gate_up_kernel(
    x, logits, chosen, gate_up, highs, scales, offsets, tops, bias, activations, hidden: tl.constexpr,
    intermediate: tl.constexpr, experts: tl.constexpr, top_k: tl.constexpr, KIND: tl.constexpr, OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr, EXPERTS_PADDED: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: a pair (token, slot) and a block of its expert's intermediate values. FORM: of weights in few bits;
    None: they are floats."""
    pair = tl.program_id(1)
    token = pair // top_k
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    ids = tl.arange(0, EXPERTS_PADDED)
    # The trigger comes after the wait: whatever starts then may read the logits, as `_down_kernel` does.
    wait_and_start_next(PDL)
    if chosen is not None:
        expert = tl.load(chosen + pair)
    else:
        values = tl.load(logits + token * experts + ids, mask=ids < experts, other=float("-inf"))
        ranks = ranks_of_experts(values, ids)
        expert = tl.sum(tl.where(ranks == pair % top_k, ids, 0), 0)
    is_output = (outputs < intermediate)[:, None]
    mask = outputs < intermediate
    if FORM is not None:
        rows = expert.to(tl.int64) * (2 * intermediate) + tl.where(mask, outputs, 0)
        gate_sums = tl.zeros([OUTPUTS, DEPTH // 32], tl.float32)
        up_sums = tl.zeros([OUTPUTS, DEPTH // 32], tl.float32)
        own_inputs = x + token.to(tl.int64) * hidden
        for start in range(0, hidden, DEPTH):
            gate_sums += stored_sums(
                gate_up, highs, scales, offsets, tops, rows, own_inputs, start, hidden, FORM, OUTPUTS, DEPTH
            )
            up_sums += stored_sums(
                gate_up, highs, scales, offsets, tops, rows + intermediate, own_inputs, start, hidden, FORM, OUTPUTS,
                DEPTH,
            )  # fmt: skip
        gate, up = tl.sum(gate_sums, 1), tl.sum(up_sums, 1)
    else:
        gate, up = _gate_and_up(x, gate_up, expert, token, outputs, is_output, hidden, intermediate, OUTPUTS, DEPTH)
    if bias is not None:
        own_bias = bias + expert * (2 * intermediate) + outputs
        gate += tl.load(own_bias, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(own_bias + intermediate, mask=mask, other=0.0).to(tl.float32)
    result = activate(gate, up, KIND)
    tl.store(activations + pair * intermediate + outputs, result.to(activations.dtype.element_ty), mask=mask)


@triton.jit
def _gate_and_up(
    x, gate_up, expert, token, outputs, is_output, hidden: tl.constexpr, intermediate: tl.constexpr,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """[OUTPUTS] each, of float weights"""
    depth = tl.arange(0, DEPTH)
    gate_rows = gate_up + expert.to(tl.int64) * (2 * intermediate * hidden) + outputs[:, None] * hidden + depth[None, :]
    up_rows = gate_rows + intermediate * hidden
    gate_sums = tl.zeros([OUTPUTS, DEPTH], tl.float32)
    up_sums = tl.zeros([OUTPUTS, DEPTH], tl.float32)
    for start in tl.static_range(0, hidden, DEPTH):
        is_depth = start + depth < hidden
        mask = is_output & is_depth[None, :]
        gate_weights = tl.load(gate_rows + start, mask=mask, other=0.0)
        up_weights = tl.load(up_rows + start, mask=mask, other=0.0)
        inputs = tl.load(x + token.to(tl.int64) * hidden + start + depth, mask=is_depth, other=0.0).to(tl.float32)
        gate_sums += gate_weights.to(tl.float32) * inputs[None, :]
        up_sums += up_weights.to(tl.float32) * inputs[None, :]
    return tl.sum(gate_sums, 1), tl.sum(up_sums, 1)


@triton.jit
def _down_kernel(
    activations, logits, chosen, shares, down, highs, scales, offsets, tops, bias, residual, out, hidden: tl.constexpr,
    intermediate: tl.constexpr, experts: tl.constexpr, top_k: tl.constexpr, NORMALISE: tl.constexpr,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, EXPERTS_PADDED: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: a token and a block of outputs, over all the token's experts."""
    token = tl.program_id(1)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    ids = tl.arange(0, EXPERTS_PADDED)
    depth = tl.arange(0, DEPTH)
    is_output = (outputs < hidden)[:, None]
    places = outputs[:, None] * intermediate + depth[None, :]
    # Before the wait, while `_gate_up_kernel` still runs: it let this one start only after the routing was written.
    if chosen is not None:
        expert = tl.load(chosen + token * top_k)
    else:
        own_logits = logits + token * experts
        values = tl.load(own_logits + ids, mask=ids < experts, other=float("-inf"))
        ranks = ranks_of_experts(values, ids)
        largest = tl.max(values, 0)
        total = tl.sum(tl.exp(values - largest), 0)
        if NORMALISE:
            total = tl.sum(tl.where(ranks < top_k, tl.exp(values - largest), 0.0), 0)
        expert = tl.sum(tl.where(ranks == 0, ids, 0), 0)
    mask = outputs < hidden
    if FORM is None:
        rows = down + expert.to(tl.int64) * (hidden * intermediate) + places
        weights = tl.load(rows, mask=is_output & (depth < intermediate)[None, :], other=0.0)
        sums = tl.zeros([OUTPUTS, DEPTH], tl.float32)
    else:
        readable = tl.where(mask, outputs, 0)
        sums = tl.zeros([OUTPUTS, DEPTH // 32], tl.float32)
    wait_and_start_next(PDL)
    biases = tl.zeros([OUTPUTS], tl.float32)
    for slot in tl.static_range(top_k):
        if slot > 0:
            if chosen is not None:
                expert = tl.load(chosen + token * top_k + slot)
            else:
                expert = tl.sum(tl.where(ranks == slot, ids, 0), 0)
            if FORM is None:
                rows = down + expert.to(tl.int64) * (hidden * intermediate) + places
        if chosen is not None:
            share = tl.load(shares + token * top_k + slot)
        else:
            share = tl.exp(tl.load(own_logits + expert) - largest) / total
        if bias is not None:
            biases += share * tl.load(bias + expert * hidden + outputs, mask=mask, other=0.0).to(tl.float32)
        inputs = activations + (token * top_k + slot) * intermediate
        if FORM is not None:
            own_rows = expert.to(tl.int64) * hidden + readable
            for start in range(0, intermediate, DEPTH):
                sums += share * stored_sums(
                    down, highs, scales, offsets, tops, own_rows, inputs, start, intermediate, FORM, OUTPUTS, DEPTH
                )
        else:
            for start in tl.static_range(0, intermediate, DEPTH):
                is_depth = start + depth < intermediate
                if slot > 0 or start > 0:
                    weights = tl.load(rows + start, mask=is_output & is_depth[None, :], other=0.0)
                values = tl.load(inputs + start + depth, mask=is_depth, other=0.0).to(tl.float32) * share
                sums += weights.to(tl.float32) * values[None, :]
    result = tl.sum(sums, 1) + biases
    target = token.to(tl.int64) * hidden + outputs
    if residual is not None:
        result += tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + target, result.to(out.dtype.element_ty), mask=mask)


def router_logits(x: torch.Tensor, router: torch.Tensor, logits: torch.Tensor) -> None:
    """x [num_tokens, hidden] times router [experts, hidden] -> logits float32 [num_tokens, experts]. For few tokens:
    each reads the whole router."""
    num_tokens, hidden = x.shape
    experts = router.shape[0]
    dependent(_few_logits_kernel, (num_tokens, cdiv(experts, 4)), x.device)(
        x, router, logits, hidden, experts, BLOCK_EXPERTS=4, BLOCK_DEPTH=min(1024, next_power_of_2(hidden)),
        num_warps=4,
    )  # fmt: skip


def few_tokens_gate_up(
    x: torch.Tensor,
    routed: Routed,
    gate_up: torch.Tensor | ExpertMatrix,
    activations: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    kind: Gate = "silu",
    tile: FewTile,
) -> None:
    """x [num_tokens, hidden], gate_up [experts, 2 * intermediate, hidden], bias [experts, 2 * intermediate]
    -> activations [num_tokens * top_k, intermediate], a token's slots side by side, the likeliest first."""
    (num_tokens, hidden), top_k = x.shape, routed.top_k
    parts, form = parts_of(gate_up)
    experts, intermediate = parts.data.shape[0], parts.data.shape[1] // 2
    dependent(_gate_up_kernel, (cdiv(intermediate, tile.outputs), num_tokens * top_k), x.device)(
        x, routed.logits, routed.chosen, *parts, bias, activations, hidden, intermediate, experts, top_k, KIND=kind,
        OUTPUTS=tile.outputs, DEPTH=min(tile.depth, next_power_of_2(hidden)), EXPERTS_PADDED=next_power_of_2(experts),
        FORM=form, num_warps=tile.num_warps,
    )  # fmt: skip


def few_tokens_down(
    activations: torch.Tensor,
    routed: Routed,
    down: torch.Tensor | ExpertMatrix,
    out: torch.Tensor,
    *,
    normalise: bool,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tile: FewTile,
) -> None:
    """activations as `few_tokens_gate_up` wrote them, down [experts, hidden, intermediate], bias [experts, hidden] ->
    out [num_tokens, hidden], on top of `residual` if there is one (`out` itself, perhaps). It must directly follow that
    kernel. `normalise`: of routing by logits."""
    (num_tokens, hidden), top_k, intermediate = out.shape, routed.top_k, activations.shape[1]
    parts, form = parts_of(down)
    experts = len(parts.data)
    dependent(_down_kernel, (cdiv(hidden, tile.outputs), num_tokens), out.device)(
        activations, routed.logits, routed.chosen, routed.shares, *parts, bias, residual, out, hidden, intermediate,
        experts, top_k, NORMALISE=normalise, OUTPUTS=tile.outputs,
        DEPTH=min(tile.depth, next_power_of_2(intermediate)), EXPERTS_PADDED=next_power_of_2(experts),
        FORM=form, num_warps=tile.num_warps,
    )  # fmt: skip
