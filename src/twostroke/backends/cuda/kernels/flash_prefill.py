"""Prefill attention for Hopper in CUDA C++ (`flash_prefill.cu`): a producer warp, warp groups that take turns, wide
blocks of keys. Causal, with windows, soft caps and sinks; head sizes 64, 128 and 256, pages of a multiple of 64; tiles,
their parts and the scratch are those of the plain kernel. Knows the launch; the kernel walks the tiles."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from twostroke.backends.cuda.attention_table import settings_for
from twostroke.backends.cuda.kernels.paged import NO_SCALES, AttentionShape, PagedKV, Scoring
from twostroke.backends.cuda.kernels.prefill_attention import join_tiles
from twostroke.backends.cuda.kernels.prefill_tiles import HIGH_TILE, LOW_TILE, PrefillScratch, PrefillWork, Tiling
from twostroke.backends.cuda.kernels.target import Target, target_of
from twostroke.backends.cuda.kernels.wgmma import ELEMENTS, product_function
from twostroke.backends.cuda.native import NativeKernel, TensorMap, box_map, why_not

NAME: Final = "CUDA C++ for Hopper"
SLICE: Final = 64
"""Elements of a row in shared memory: 128 bytes."""
STAGES: Final = 2
ALIGNMENT: Final = 1024
SOURCES: Final = ("hopper_primitives.cuh", "flash_tiles.cuh", "flash_prefill.cu")
HEAD_SIZES: Final = (64, 128, 256)
SPAN: Final = 64
"""Keys that one copy fetches; a page has a whole number of them."""
CACHED_BYTES: Final = 32 << 20
"""Keys and values that programs share by way of the second-level cache: heads are taken in turn beyond."""


@dataclass(frozen=True, slots=True)
class FlashOptions:
    """How the kernel is built: the choice is the table's, and the result does not depend on it but for rounding."""

    tile_rows: int
    keys: int  # keys of a block

    @property
    def programs_per_sm(self) -> int:
        return HIGH_TILE // self.tile_rows

    @property
    def threads(self) -> int:
        """Those of the warp groups that multiply, and of the one that fetches."""
        return 2 * self.tile_rows + 128

    def shared_bytes(self, head_dim: int) -> int:
        return (self.tile_rows + 2 * STAGES * self.keys) * head_dim * 2 + ALIGNMENT


def declines(shape: AttentionShape, target: Target) -> str | None:
    """See `PrefillKernel`."""
    if not target.is_hopper:
        return "asynchronous warp-group products need a Hopper device"
    if shape.head_dim not in HEAD_SIZES:
        return f"head size {shape.head_dim} is none of {', '.join(map(str, HEAD_SIZES))}"
    if not shape.is_causal:
        return "tokens that see each other both ways are masked otherwise"
    if shape.page % SPAN:
        return f"pages of {shape.page} are no multiple of {SPAN}"
    if shape.scaled != NO_SCALES:
        return "keys and values of one byte are brought to 16 bits in registers"
    if shape.dtype not in ELEMENTS:
        return f"{shape.dtype} is neither bfloat16 nor float16"
    return why_not()


def tiling(shape: AttentionShape, num_tokens: int, num_sms: int) -> Tiling:
    """See `PrefillKernel`. Low tiles, unless high ones fill the device twice; heads of 256 leave them no registers."""
    is_low = num_tokens * shape.heads < 2 * HIGH_TILE * num_sms and shape.head_dim <= 128
    tile_rows = LOW_TILE if is_low else HIGH_TILE
    return Tiling(tile_rows, shape.group, shape.kv_heads, HIGH_TILE // tile_rows * num_sms)


@cache
def options_for(shape: AttentionShape, tile_rows: int, window: int | None, card: str = "") -> FlashOptions:
    facts = {"head_dim": shape.head_dim, "tile_rows": tile_rows, "window": window or 0}
    return FlashOptions(tile_rows, **settings_for("flash prefill", card, **facts))


def attend(
    queries: torch.Tensor, kv: PagedKV, work: PrefillWork, out: torch.Tensor, scoring: Scoring, scratch: PrefillScratch,
    *, options: FlashOptions | None = None,
) -> None:  # fmt: skip
    """See `PrefillKernel`."""
    shape, window = kv.shape_for(queries), scoring.window
    scratch.check(work, shape)
    options = options or options_for(shape, work.tile_rows, window, target_of(queries.device).name)
    units = len(work.items) * shape.kv_heads
    pointers = (kv.table, work.items, out, scratch.partials, scratch.log_sums, scratch.claims, scoring.sinks)
    has_sinks = scoring.sinks is not None
    of_scores = {"windowed": window is not None, "softcapped": scoring.softcap is not None, "has_sinks": has_sinks}
    kernel_for(options, shape, **of_scores).launch(
        min(units, options.programs_per_sm * target_of(queries.device).num_sms),
        options.threads,
        [
            _query_map(queries, shape.group, work.tile_rows // shape.group),
            _cache_map(kv.keys),
            _cache_map(kv.values),
            *(ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in pointers),
            ctypes.c_longlong(kv.table.stride(0)),
            ctypes.c_int(units),
            ctypes.c_int(heads_at_once(shape, work.longest_context, window)),
            ctypes.c_float(scoring.factor),
            ctypes.c_float(scoring.cap_factor or 0.0),
            ctypes.c_int(window or 0),
        ],
        shared_bytes=options.shared_bytes(shape.head_dim),
    )
    join_tiles(work, scratch, out, shape, scoring.sinks)


def heads_at_once(shape: AttentionShape, context: int, window: int | None) -> int:
    """KV heads whose tiles run together: all programs at work then read keys that others have just read. With a window
    they are about as far apart as it is long."""
    read = context if window is None else min(context, 2 * window)
    fitting = max(CACHED_BYTES // (2 * read * shape.head_dim * 2), 1)
    return max(heads for heads in range(1, shape.kv_heads + 1) if shape.kv_heads % heads == 0 and heads <= fitting)


def _cache_map(cache: torch.Tensor) -> TensorMap:
    """A cache's rows, in boxes of one span's keys and one slice of their elements."""
    head_dim = cache.shape[-1]
    sizes = (head_dim, cache.numel() // head_dim)
    return box_map(cache.data_ptr(), cache.dtype, sizes, (head_dim,), (SLICE, SPAN))


def _query_map(queries: torch.Tensor, group: int, tile_tokens: int) -> TensorMap:
    """Queries, in boxes of one tile: all heads of a group for each of its tokens."""
    tokens, heads, head_dim = queries.shape
    strides = (head_dim, queries.stride(0))
    return box_map(queries.data_ptr(), queries.dtype, (head_dim, heads, tokens), strides, (SLICE, group, tile_tokens))


@cache
def kernel_for(
    options: FlashOptions, shape: AttentionShape, *, windowed: bool, softcapped: bool, has_sinks: bool = False
) -> NativeKernel:
    constants = {
        "HEAD_DIM": shape.head_dim,
        "QUERY_HEADS": shape.group,
        "KV_HEADS": shape.kv_heads,
        "PAGE": shape.page,
        "WINDOWED": int(windowed),
        "SOFTCAPPED": int(softcapped),
        "SINKS": int(has_sinks),
        "WARP_GROUPS": options.tile_rows // 64,
        "KEYS": options.keys,
        "BFLOAT16": int(shape.dtype == torch.bfloat16),
    }
    multiply_keys = product_function("multiply_keys", options.keys, shape.dtype)
    multiply_values = product_function(
        "multiply_values", shape.head_dim, shape.dtype, from_registers=True, columns_contiguous=True
    )
    return NativeKernel.of("attend", SOURCES, [multiply_keys, multiply_values], constants)
