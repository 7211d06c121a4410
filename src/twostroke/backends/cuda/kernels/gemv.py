# mypy: disable-error-code="assignment, var-annotated"
"""Matrix products for a few rows, which are as fast as weights can be read: the norm before, and the bias, gate or
residual after, ride along. Under a dependent launch a program has its first weights on their way before it waits for
the kernel ahead: weights never change. How a product is cut is a table's to say."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostroke.backends.cuda.kernels.activation import Activation, activate
from twostroke.backends.cuda.kernels.gemv_config import GEMV_ROWS, GemvConfig, fit
from twostroke.backends.cuda.kernels.target import dependent, target_of
from twostroke.backends.cuda.kernels.whole_numbers import cdiv, next_power_of_2

ROWS = tl.constexpr(GEMV_ROWS)
"""Of a product by tensor cores."""


def linear_few(
    x: torch.Tensor,  # [num_rows, width]
    weight: torch.Tensor,  # [outputs, width], contiguous; with gated [2 * outputs, width]: gate, then up
    out: torch.Tensor,  # [num_rows, outputs], of any float type
    *,
    norm_weight: torch.Tensor | None = None,  # [width]
    eps: float = 0.0,
    bias: torch.Tensor | None = None,  # [outputs]; with gated [2 * outputs]
    residual: torch.Tensor | None = None,  # [num_rows, outputs]; may be out itself
    gated: Activation | None = None,
    config: GemvConfig,
) -> None:
    """out = norm(x) @ weight.T + bias, gated, plus residual; what is None is left out. For 1 to GEMV_ROWS rows."""
    num_rows, width = x.shape
    outputs = out.shape[1]
    assert 1 <= num_rows <= GEMV_ROWS and weight.is_contiguous()
    config = fit(config, width, weight.element_size())
    constants: dict[str, object] = {
        "WIDTH": width, "GATED": gated, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "EARLY_TRIGGER": config.early_trigger,
    }  # fmt: skip
    if config.method == "fma":
        kernel, rows = _fma_rows, next_power_of_2(num_rows)
        constants |= {"TILES": cdiv(width, config.block_k), "PREFETCH_TILES": config.prefetch_tiles, "ROWS": rows}
    else:
        # A row's products with the norm's weights may leave float16's range before they are scaled.
        scale_first = norm_weight is not None and x.dtype == torch.float16
        # The interpreter's dot would take bfloat16 for integers.
        widen = target_of(x.device).interpreted
        kernel = _dot_rows
        constants |= {
            "WARPS": config.num_warps,
            "STAGES": config.num_stages,
            "SCALE_FIRST": scale_first,
            "WIDEN": widen,
        }
    residual_stride = 0 if residual is None else residual.stride(0)
    dependent(kernel, (cdiv(outputs, config.block_n),), x.device)(
        x, norm_weight, weight, bias, residual, out, eps, num_rows, outputs, x.stride(0), residual_stride,
        out.stride(0), **constants, num_warps=config.num_warps,
    )  # fmt: skip


@triton.jit
def _to_add(tensor, stride, n, num_rows, outputs, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    """A residual's or a bias's part, [BLOCK_N, ROWS]; zeros where there is none. Loaded long before it is needed."""
    if tensor is None:
        part = tl.zeros([BLOCK_N, ROWS], tl.float32)
    else:
        row = tl.arange(0, ROWS)[None, :].to(tl.int64)
        mask = (row < num_rows) & (n[:, None] < outputs)
        part = tl.load(tensor + row * stride + n[:, None], mask=mask, other=0.0).to(tl.float32)
    return part


@triton.jit
def _finish(
    y, up, factor, bias_part, residual_part, bias, out, out_stride, n, num_rows, outputs,
    GATED: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What follows the sums, [BLOCK_N, ROWS]: the norm's factor, if any, the bias, the gate and the residual."""
    if factor is not None:
        y *= factor
    y += bias_part
    if GATED is not None:
        if factor is not None:
            up *= factor
        up += _to_add(bias, 0, n + outputs, num_rows, 2 * outputs, BLOCK_N, ROWS)
        y = activate(y, up, GATED)
    row = tl.arange(0, ROWS)[None, :].to(tl.int64)
    mask = (row < num_rows) & (n[:, None] < outputs)
    tl.store(out + row * out_stride + n[:, None], (y + residual_part).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _wait(PDL: tl.constexpr, EARLY_TRIGGER: tl.constexpr):
    if PDL:
        if EARLY_TRIGGER:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _tile(pointers, k, START: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile of weights or inputs; only the last one of a width that the block does not divide pays for a mask."""
    if START + BLOCK_K <= WIDTH:
        tile = tl.load(pointers + START)
    else:
        tile = tl.load(pointers + START, mask=k + START < WIDTH, other=0.0)
    return tile


@triton.jit
def _weights(
    ahead, pointers, k, TILE: tl.constexpr, PREFETCH_TILES: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr
):
    """A tile that is on its way already, or is fetched now."""
    if TILE < PREFETCH_TILES:
        found = ahead[TILE]
    else:
        found = _tile(pointers, k[None, :], TILE * BLOCK_K, WIDTH, BLOCK_K)
    return found.to(tl.float32)


@triton.jit
def _stack(parts, COUNT: tl.constexpr, LEVELS: tl.constexpr):
    """Tensors of one shape as one tensor with them along LEVELS more axes of 2, the first the most significant, so
    that a single reduction between threads serves all."""
    for level in tl.static_range(LEVELS):
        joined = ()
        for i in tl.static_range(COUNT >> (level + 1)):
            joined = joined + (tl.join(parts[i], parts[i + (COUNT >> (level + 1))]),)
        parts = joined
    return parts[0]


@triton.jit
def _partial_sums(products, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sums over the 8 inputs that lie in one thread."""
    return tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // 8, 8]), 2)


@triton.jit(do_not_specialize=["num_rows", "outputs"])
def _fma_rows(
    x, norm_weight, weight, bias, residual, out, eps, num_rows, outputs, x_stride, residual_stride, out_stride,
    WIDTH: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILES: tl.constexpr,
    PREFETCH_TILES: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr, EARLY_TRIGGER: tl.constexpr,
):  # fmt: skip
    """ROWS: num_rows or more, a power of two."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Programs past the end read the last output's weights again: no mask, and no store.
    weight_rows = weight + tl.minimum(n, outputs - 1).to(tl.int64)[:, None] * WIDTH
    up_offset = outputs.to(tl.int64) * WIDTH
    w_pointers = weight_rows + k[None, :]
    w_ahead = ()
    up_ahead = ()
    for tile in tl.static_range(PREFETCH_TILES):
        w_ahead = w_ahead + (_tile(w_pointers, k[None, :], tile * BLOCK_K, WIDTH, BLOCK_K),)
        if GATED is not None:
            up_ahead = up_ahead + (_tile(w_pointers + up_offset, k[None, :], tile * BLOCK_K, WIDTH, BLOCK_K),)
    bias_part = _to_add(bias, 0, n, num_rows, outputs, BLOCK_N, ROWS)
    _wait(PDL, EARLY_TRIGGER)
    residual_part = _to_add(residual, residual_stride, n, num_rows, outputs, BLOCK_N, ROWS)

    sums = ()
    up_sums = ()
    squares = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32),)
        up_sums = up_sums + (tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32),)
        squares = squares + (tl.zeros([BLOCK_K], tl.float32),)
    for tile in tl.static_range(TILES):
        w = _weights(w_ahead, w_pointers, k, tile, PREFETCH_TILES, WIDTH, BLOCK_K)
        if GATED is not None:
            up_w = _weights(up_ahead, w_pointers + up_offset, k, tile, PREFETCH_TILES, WIDTH, BLOCK_K)
        if norm_weight is not None:
            scale = _tile(norm_weight + k, k, tile * BLOCK_K, WIDTH, BLOCK_K).to(tl.float32)
        new_sums = ()
        new_up_sums = ()
        new_squares = ()
        for row in tl.static_range(ROWS):
            x_row = x + tl.minimum(row, num_rows - 1) * x_stride
            value = _tile(x_row + k, k, tile * BLOCK_K, WIDTH, BLOCK_K).to(tl.float32)
            if norm_weight is not None:
                new_squares = new_squares + (squares[row] + value * value,)
                value *= scale
            new_sums = new_sums + (sums[row] + _partial_sums(w * value[None, :], BLOCK_N, BLOCK_K),)
            if GATED is not None:
                up_sum = _partial_sums(up_w * value[None, :], BLOCK_N, BLOCK_K)
                new_up_sums = new_up_sums + (up_sums[row] + up_sum,)
        sums = new_sums
        if GATED is not None:
            up_sums = new_up_sums
        if norm_weight is not None:
            squares = new_squares
    if PDL and not EARLY_TRIGGER:
        gdc_launch_dependents()

    levels: tl.constexpr = (ROWS > 1) + (ROWS > 2) + (ROWS > 4)
    y = tl.reshape(tl.sum(_stack(sums, ROWS, levels), 1), [BLOCK_N, ROWS])
    factor = None
    if norm_weight is not None:
        total = tl.reshape(tl.sum(_stack(squares, ROWS, levels), 0, keep_dims=True), [1, ROWS])
        factor = tl.rsqrt(total / WIDTH + eps)
    up = None
    if GATED is not None:
        up = tl.reshape(tl.sum(_stack(up_sums, ROWS, levels), 1), [BLOCK_N, ROWS])
    _finish(y, up, factor, bias_part, residual_part, bias, out, out_stride, n, num_rows, outputs, GATED, BLOCK_N, ROWS)


@triton.jit
def _part(pointers, in_range, MASKED: tl.constexpr):
    return tl.load(pointers, mask=in_range, other=0.0) if MASKED else tl.load(pointers)


@triton.jit
def _dot(w, value, sums, WIDEN: tl.constexpr):
    if WIDEN:
        w = w.to(tl.float32)
        value = value.to(tl.float32)
    return tl.dot(w, value, sums, input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows", "outputs"])
def _dot_rows(
    x, norm_weight, weight, bias, residual, out, eps, num_rows, outputs, x_stride, residual_stride, out_stride,
    WIDTH: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
    STAGES: tl.constexpr, SCALE_FIRST: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
    EARLY_TRIGGER: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    # The product is batched, an input range a warp: so even 16 outputs keep several warps busy, and the warps' sums
    # meet once, at the end.
    k = tl.arange(0, WARPS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]  # [warps, inputs]
    step: tl.constexpr = WARPS * BLOCK_K
    masked: tl.constexpr = WIDTH % step != 0
    weight_rows = weight + tl.minimum(n, outputs - 1).to(tl.int64)[:, None] * WIDTH
    up_offset = outputs.to(tl.int64) * WIDTH
    bias_part = _to_add(bias, 0, n, num_rows, outputs, BLOCK_N, ROWS)
    _wait(PDL, EARLY_TRIGGER)
    residual_part = _to_add(residual, residual_stride, n, num_rows, outputs, BLOCK_N, ROWS)

    w_pointers = weight_rows[None, :, :] + k[:, None, :]  # [warps, BLOCK_N, inputs]
    x_pointers = x + row[None, None, :] * x_stride + k[:, :, None]  # [warps, inputs, rows]
    in_batch = row[None, None, :] < num_rows
    if SCALE_FIRST:
        first_squares = tl.zeros([WARPS, BLOCK_K, ROWS], tl.float32)
        for start in tl.range(0, WIDTH, step):
            value = tl.load(x_pointers + start, mask=in_batch & (k[:, :, None] + start < WIDTH), other=0.0)
            first_squares += value.to(tl.float32) * value.to(tl.float32)
        first_factor = tl.rsqrt(tl.sum(tl.reshape(first_squares, [step, ROWS]), 0) / WIDTH + eps)

    sums = tl.zeros([WARPS, BLOCK_N, ROWS], tl.float32)
    up_sums = tl.zeros([WARPS, BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([WARPS, BLOCK_K // 8, ROWS], tl.float32)
    for start in tl.range(0, WIDTH, step, num_stages=STAGES):
        w = _part(w_pointers + start, k[:, None, :] + start < WIDTH, masked)
        present = in_batch & (k[:, :, None] + start < WIDTH) if masked else in_batch
        value = tl.load(x_pointers + start, mask=present, other=0.0)
        if norm_weight is not None:
            scale = _part(norm_weight + k + start, k + start < WIDTH, masked).to(tl.float32)[:, :, None]
            value = value.to(tl.float32)
            if SCALE_FIRST:
                scale = scale * first_factor[None, None, :]
            else:
                squares += tl.sum(tl.reshape(value * value, [WARPS, BLOCK_K // 8, 8, ROWS]), 2)
            value = (value * scale).to(w.dtype)
        sums = _dot(w, value, sums, WIDEN)
        if GATED is not None:
            up_w = _part(w_pointers + up_offset + start, k[:, None, :] + start < WIDTH, masked)
            up_sums = _dot(up_w, value, up_sums, WIDEN)
    if PDL and not EARLY_TRIGGER:
        gdc_launch_dependents()

    factor = None
    if norm_weight is not None and not SCALE_FIRST:
        total = tl.sum(tl.reshape(squares, [step // 8, ROWS]), 0)
        factor = tl.rsqrt(total / WIDTH + eps)[None, :]
    up = None
    if GATED is not None:
        up = tl.sum(up_sums, 0)
    y = tl.sum(sums, 0)
    _finish(y, up, factor, bias_part, residual_part, bias, out, out_stride, n, num_rows, outputs, GATED, BLOCK_N, ROWS)
