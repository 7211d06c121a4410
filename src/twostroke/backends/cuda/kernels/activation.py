"""The gate of an MLP: activation(gate) * up, the two halves of one fused product; and the share of an MLP that has one.
Mathematics in float32."""

from __future__ import annotations

from typing import Final, Literal

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels.expert_tiles import in_thousandths
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import cdiv, next_power_of_2
from twostroke.models.mlp_spec import Alone, ClampedGate

Activation = Literal["silu", "gelu_tanh"]
Gate = Activation | ClampedGate
"""What kernels in Triton compute; those in Gluon and for dense matrices have activations alone, and decline others."""
GATES: Final[dict[Activation | None, int]] = {None: 0, "silu": 1, "gelu_tanh": 2}
"""As kernels in CUDA C++ number them."""
CLAMPED: Final = 3

_BLOCK: Final = 1024


def gate_constants(gate: Gate | None) -> dict[str, int]:
    """Of kernels in CUDA C++ (gates.cuh)."""
    if not isinstance(gate, ClampedGate):
        return {"GATED": GATES[gate]}
    thousandths = in_thousandths(gate)
    assert thousandths is not None
    return {"GATED": CLAMPED, "GATE_LIMIT": thousandths[0], "GATE_ALPHA": thousandths[1]}


def activation_of(gate: Gate | None) -> Activation | None:
    """Of a gate that is no more than that."""
    assert not isinstance(gate, ClampedGate)
    return gate


def gated(
    gate_up: torch.Tensor,  # [num_tokens, 2 * intermediate]: gate, then up
    out: torch.Tensor,  # [num_tokens, intermediate]
    *,
    kind: Gate,
) -> None:
    """out = activation(gate) * up."""
    width = out.shape[1]
    gate_with(gate_up[:, :width], gate_up[:, width:], out, kind=kind)


def gate_with(
    gate: torch.Tensor,  # [num_tokens, width], any token stride
    up: torch.Tensor,  # [num_tokens, width], any token stride
    out: torch.Tensor,  # [num_tokens, width]; may be either
    *,
    kind: Gate,
) -> None:
    """out = activation(gate) * up."""
    num_tokens, width = out.shape
    if num_tokens == 0:
        return
    dependent(_gated, (num_tokens, cdiv(width, _BLOCK)), out.device)(
        gate, up, out, gate.stride(0), up.stride(0), out.stride(0), WIDTH=width, KIND=kind, BLOCK=_BLOCK, num_warps=4
    )


def activate_rows(
    rows: torch.Tensor,  # [num_tokens, width], changed
    *,
    kind: Alone,
) -> None:
    """rows = activation(rows)"""
    num_tokens, width = rows.shape
    if num_tokens == 0:
        return
    block = min(_BLOCK, next_power_of_2(width))
    dependent(_activate_rows, (num_tokens, cdiv(width, block)), rows.device)(
        rows, rows.stride(0), WIDTH=width, KIND=kind, BLOCK=block, num_warps=4
    )


def scale_by_gate(
    x: torch.Tensor,  # [num_tokens, hidden]
    gate: torch.Tensor,  # [1, hidden]
    rows: torch.Tensor,  # [num_tokens, width], changed; contiguous, as x is
) -> None:
    """rows *= sigmoid(x @ gate.T)"""
    (num_tokens, hidden), width = x.shape, rows.shape[1]
    if num_tokens == 0:
        return
    dependent(_scale_by_gate, (num_tokens,), x.device)(
        x, gate, rows, HIDDEN=hidden, WIDTH=width, BLOCK=min(_BLOCK, next_power_of_2(max(hidden, width))), num_warps=4
    )


def gate_by_sigmoid(
    rows: torch.Tensor,  # [num_tokens, width], changed
    gates: torch.Tensor,  # [num_tokens, width], any token stride
) -> None:
    """rows *= sigmoid(gates)"""
    num_tokens, width = rows.shape
    if num_tokens == 0:
        return
    block = min(_BLOCK, next_power_of_2(width))
    dependent(_gate_by_sigmoid, (num_tokens, cdiv(width, block)), rows.device)(
        rows, gates, rows.stride(0), gates.stride(0), WIDTH=width, BLOCK=block, num_warps=4
    )


@triton.jit
def activate_alone(x, KIND: tl.constexpr):
    """Of a float32 tensor; KIND: `Alone`."""
    if KIND == "squared_relu":
        positive = tl.maximum(x, 0.0)
        y = positive * positive
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    else:
        inner = x
        if KIND == "gelu_tanh":
            inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        y = x * tl.sigmoid(inner)
    return y


@triton.jit
def _activate_rows(rows, stride, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next_and_wait(PDL)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    own = rows + tl.program_id(0).to(tl.int64) * stride + columns
    y = activate_alone(tl.load(own, mask=mask, other=0.0).to(tl.float32), KIND)
    tl.store(own, y.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def _gate_by_sigmoid(
    rows, gates, rows_stride, gates_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    start_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate = tl.load(gates + token * gates_stride + columns, mask=mask, other=0.0).to(tl.float32)
    own = rows + token * rows_stride + columns
    value = tl.load(own, mask=mask, other=0.0).to(tl.float32) * tl.sigmoid(gate)
    tl.store(own, value.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def _scale_by_gate(x, gate, rows, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK):
        mask = start + columns < HIDDEN
        values = tl.load(x + token * HIDDEN + start + columns, mask=mask, other=0.0).to(tl.float32)
        sums += values * tl.load(gate + start + columns, mask=mask, other=0.0).to(tl.float32)
    share = tl.sigmoid(tl.sum(sums, 0))
    for start in tl.static_range(0, WIDTH, BLOCK):
        mask = start + columns < WIDTH
        place = rows + token * WIDTH + start + columns
        scaled = tl.load(place, mask=mask, other=0.0).to(tl.float32) * share
        tl.store(place, scaled.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def activate(gate, up, KIND: tl.constexpr):
    """activation(gate) * up, of float32 tensors of one shape; KIND: a `Gate`."""
    inner = gate
    if KIND == "gelu_tanh":
        # gelu's 0.5 * (1 + tanh(z)) is sigmoid(2z): one exponential, and no overflow.
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    elif KIND != "silu":
        gate = tl.minimum(gate, KIND.limit)
        inner = gate * KIND.alpha
        up = tl.minimum(tl.maximum(up, -KIND.limit), KIND.limit) + 1.0
    return gate * tl.sigmoid(inner) * up


@triton.jit
def _gated(
    gates, ups, out, gate_stride, up_stride, out_stride,
    WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate = tl.load(gates + token * gate_stride + columns, mask=mask).to(tl.float32)
    up = tl.load(ups + token * up_stride + columns, mask=mask).to(tl.float32)
    y = activate(gate, up, KIND)
    tl.store(out + token * out_stride + columns, y.to(out.dtype.element_ty), mask=mask)
