"""What attention's kernels in Triton have in common: a soft cap, keys and values as they are loaded, their scales, the
joining of parts of a softmax, and what sinks leave of it."""

from __future__ import annotations

import triton
import triton.language as tl

from twostroke.backends.cuda.kernels import paged

TOKEN_SCALES = tl.constexpr(paged.TOKEN_SCALES)
LOG2_OF_E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(scores, cap_factor):
    """tanh(x) = 1 - 2 / (exp2(2 log2(e) x) + 1), which is right at both infinities, of scores times a factor in which
    2 log2(e) is; the scores themselves where the factor is None."""
    if cap_factor is None:
        return scores
    else:
        return 1.0 - 2.0 / (tl.exp2(scores * cap_factor) + 1.0)


@triton.jit
def load_keys_and_values(k_head, v_head, offsets, SHAPE: tl.constexpr):
    """[block, width] each, as they are stored: numbers of one byte are whole in 16 bits, and their scales are left to
    scores and weights, in float32. A head that is padded ends in zeros."""
    if SHAPE.head_dim == SHAPE.width:
        keys = tl.load(k_head + offsets)
        values = tl.load(v_head + offsets)
    else:
        held = (tl.arange(0, SHAPE.width) < SHAPE.head_dim)[None, :]
        keys = tl.load(k_head + offsets, mask=held, other=0.0)
        values = tl.load(v_head + offsets, mask=held, other=0.0)
    return keys, values


@triton.jit
def load_scales(scales, kv_head, page, slot, SHAPE: tl.constexpr):
    """What keys or values of a head are multiplied by: of tokens in these slots of pages, or of the head alone."""
    if SHAPE.scaled == TOKEN_SCALES:
        return tl.load(scales + page * SHAPE.page_scales + kv_head * SHAPE.head_scales + slot)
    else:
        return tl.load(scales + kv_head) + tl.zeros(slot.shape, tl.float32)


@triton.jit
def beside_sinks(means, log_sum, sinks, head, held):
    """means [rows, width] of values, weighed without sinks, as they are with them: a sink is one more score, which
    takes a share and has no value. log_sum [rows]: base 2; sinks: a score a head, or None; head [rows]: whose each
    is."""
    if sinks is None:
        return means
    else:
        sink = tl.load(sinks + head, mask=held, other=0.0) * LOG2_OF_E
        return means / (1.0 + tl.exp2(sink - log_sum))[:, None]


@triton.jit
def join_parts(peak, total, value_sum, log_sum, means):
    """Some parts' means [parts, rows, width] and logarithms of their sums of weights [parts, rows], onto what was
    joined before."""
    new_peak = tl.maximum(peak, tl.max(log_sum, 0))
    decay = tl.exp2(peak - new_peak)
    weights = tl.exp2(log_sum - new_peak[None, :])
    value_sum = value_sum * decay[:, None] + tl.sum(means * weights[:, :, None], 0)
    total = total * decay + tl.sum(weights, 0)
    return new_peak, total, value_sum
