"""Prefill attention for Hopper in CUDA C++ (`flash_prefill.cu`): a producer warp, two warp groups that take turns, wide
blocks of keys. Causal only, head sizes 64 and 128, pages of a multiple of 64; tiles, their parts and the scratch are
those of the other prefill kernels. Knows the launch; the kernel walks the tiles."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

import torch

from twostroke.backends.cuda.kernels.prefill_attention import check_shapes, combine_parts
from twostroke.backends.cuda.kernels.prefill_tiles import KEY_BLOCK, PrefillScratch, PrefillWork, unsupported_on_hopper
from twostroke.backends.cuda.kernels.scores import LOG2_E
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.kernels.wgmma import product_function
from twostroke.backends.cuda.native import NativeKernel, TensorMap, box_map, why_not

SPAN: Final = KEY_BLOCK
"""Keys that one copy fetches; a page has a whole number of them."""
SLICE: Final = 64
"""Elements of a row in shared memory: 128 bytes."""
STAGES: Final = 2
ALIGNMENT: Final = 1024
SOURCES: Final = ("hopper_primitives.cuh", "flash_tiles.cuh", "flash_prefill.cu")
FOLDER: Final = files("twostroke.backends.cuda.kernels")


@dataclass(frozen=True, slots=True)
class FlashOptions:
    """How the kernel is built; the defaults are what a model runs, the rest is for measuring."""

    warp_groups: int = 2
    """Of 64 query rows each. Three leave registers for heads of 64 only."""
    keys: int = 192
    """Keys of a block."""
    take_turns: bool = True
    """Whether warp groups take turns, so that one's softmax runs beside the other's products."""
    slack: int = 8
    """How far, in powers of two, a score may pass a row's peak before its sums are scaled down; 0: they always are."""
    held_queries: bool = False
    """Whether queries are kept in registers."""
    cached_bytes: int = 32 << 20
    """Keys and values that programs share by way of the second-level cache: heads are taken in turn beyond."""
    pinned: bool = False
    """Whether the softmax is kept in front of the wait for the product that it runs beside."""
    bounded: bool = False
    """Whether waits end after some milliseconds, for a first run: a wrong result instead of a hang."""

    @property
    def tile_rows(self) -> int:
        return 64 * self.warp_groups

    def shared_bytes(self, head_dim: int) -> int:
        return (self.tile_rows + 2 * STAGES * self.keys) * head_dim * 2 + ALIGNMENT


DEFAULT: Final = FlashOptions()


def unsupported(head_dim: int, block_size: int, dtype: torch.dtype, capability: tuple[int, int] | None) -> str | None:
    """Why this kernel does not take a model on a device, or None."""
    return unsupported_on_hopper(head_dim, block_size, dtype, capability) or why_not()


def attend_prefill_flash(
    queries: torch.Tensor,  # [num_tokens, heads, head_dim], any token stride
    k_cache: torch.Tensor,  # [num_blocks + 1, kv_heads, block_size, head_dim], contiguous
    v_cache: torch.Tensor,
    table: torch.Tensor,  # int32 [num_rows, table_len]
    work: PrefillWork,
    out: torch.Tensor,  # [num_tokens, heads * head_dim], contiguous
    *,
    scale: float,
    scratch: PrefillScratch,
    options: FlashOptions = DEFAULT,
) -> None:
    """As `attend_prefill`, without window and soft cap; tiles of 128 rows."""
    kv_heads, group, head_dim, page = check_shapes(queries, k_cache, v_cache, work, scratch)
    if work.tile_rows != options.tile_rows:
        raise ValueError(f"This kernel takes tiles of {options.tile_rows} rows, not {work.tile_rows}.")
    units = len(work.items) * kv_heads
    tile_tokens = work.tile_rows // group
    kernel = _kernel(options, head_dim, group, kv_heads, page, queries.dtype)
    pointers = (table, work.items, out, scratch.partials, scratch.log_sums, scratch.claims)
    kernel.launch(
        min(units, target_of(queries.device).num_sms),
        128 * (options.warp_groups + 1),
        [
            _query_map(
                queries.data_ptr(),
                len(queries),
                queries.stride(0),
                queries.dtype,
                queries.shape[1],
                head_dim,
                group,
                tile_tokens,
            ),
            _cache_map(k_cache.data_ptr(), k_cache.numel() // head_dim, head_dim, k_cache.dtype),
            _cache_map(v_cache.data_ptr(), v_cache.numel() // head_dim, head_dim, v_cache.dtype),
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in pointers),
            ctypes.c_longlong(table.stride(0)),
            ctypes.c_int(units),
            ctypes.c_int(heads_at_once(kv_heads, head_dim, work.longest_context, options.cached_bytes)),
            ctypes.c_float(scale * LOG2_E),
        ],
        shared_bytes=options.shared_bytes(head_dim),
    )
    if work.part_items:
        combine_parts(work, scratch, out, kv_heads, group, head_dim)


def heads_at_once(kv_heads: int, head_dim: int, context: int, cached_bytes: int) -> int:
    """KV heads whose tiles run together: all programs at work then read keys that others have just read."""
    fitting = cached_bytes // (2 * context * head_dim * 2)
    return max(heads for heads in range(1, kv_heads + 1) if kv_heads % heads == 0 and heads <= max(fitting, 1))


def _cache_map(address: int, rows: int, head_dim: int, dtype: torch.dtype) -> TensorMap:
    """A cache's rows, in boxes of one span's keys and one slice of their elements."""
    return box_map(address, dtype, (head_dim, rows), (head_dim,), (SLICE, SPAN))


def _query_map(
    address: int, tokens: int, stride: int, dtype: torch.dtype, heads: int, head_dim: int, group: int, tile_tokens: int
) -> TensorMap:
    """Queries, in boxes of one tile: all heads of a group for each of its tokens."""
    return box_map(address, dtype, (head_dim, heads, tokens), (head_dim, stride), (SLICE, group, tile_tokens))


@cache
def _kernel(
    options: FlashOptions, head_dim: int, group: int, kv_heads: int, page: int, dtype: torch.dtype
) -> NativeKernel:
    source, name, constants = source_and_constants(options, head_dim, group, kv_heads, page, dtype)
    return NativeKernel(source, name, constants, architecture="sm_90a")


def source_and_constants(
    options: FlashOptions, head_dim: int, group: int, kv_heads: int, page: int, dtype: torch.dtype
) -> tuple[str, str, dict[str, int]]:
    """What is compiled, its function, and the constants that it is compiled for."""
    constants = {
        "HEAD_DIM": head_dim,
        "QUERY_HEADS": group,
        "KV_HEADS": kv_heads,
        "PAGE": page,
        "WARP_GROUPS": options.warp_groups,
        "KEYS": options.keys,
        "TAKE_TURNS": int(options.take_turns),
        "SLACK": options.slack,
        "HELD_QUERIES": int(options.held_queries),
        "PINNED": int(options.pinned),
        "BFLOAT16": int(dtype == torch.bfloat16),
        "BOUNDED": int(options.bounded),
    }
    multiply_keys = product_function("multiply_keys", options.keys, dtype, from_registers=options.held_queries)
    multiply_values = product_function("multiply_values", head_dim, dtype, from_registers=True, columns_contiguous=True)
    texts = (FOLDER.joinpath(name).read_text() for name in SOURCES)
    return "\n".join([multiply_keys, multiply_values, *texts]), "attend", constants
