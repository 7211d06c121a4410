"""Prefill attention over latents. A chunk's own keys and values are expanded from its latents, and read causally; the
context before the chunk is read as latents, as decode reads them, by queries brought into their space. The two are
joined exactly, by the logarithms of their sums of weights. Tiles are of one head; a chunk's tokens lie side by side."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.attention_table import settings_for
from twostroke.backends.cuda.kernels.latent_decode import load_queries, walk_latents
from twostroke.backends.cuda.kernels.latent_store import LatentKV
from twostroke.backends.cuda.kernels.paged import LOG2_E, AttentionShape, WalkConfig
from twostroke.backends.cuda.kernels.prefill_tiles import HIGH_TILE, ITEM_FIELDS, LOW_TILE, PrefillWork, Tiling
from twostroke.backends.cuda.kernels.target import Target, dependent, target_of
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import cdiv, next_power_of_2

FIELDS = tl.constexpr(ITEM_FIELDS)
LOWEST = tl.constexpr(-1.0e30)


@dataclass(frozen=True, slots=True)
class ContextConfig:
    """How one program reads a context: `rows` queries times heads walk together. A constant of kernels in Triton."""

    rows: int
    block: int
    warps: int
    stages: int

    def tokens(self, shape: AttentionShape) -> int:
        return max(1, self.rows // shape.group)

    def padded_rows(self, shape: AttentionShape) -> int:
        return max(16, next_power_of_2(self.tokens(shape) * shape.group))


@cache
def context_config(device: torch.device) -> ContextConfig:
    target = target_of(device)
    return ContextConfig(**settings_for("latent context", target.name, **target.room))


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """Of expanded heads. A constant of kernels in Triton."""

    heads: int
    plain_dim: int
    rotated_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def key(self) -> int:
        return self.plain_dim + self.rotated_dim

    @property
    def expanded(self) -> int:
        """Of one head's keys, but for what is rotated, and values."""
        return self.plain_dim + self.value_dim

    @property
    def plain_width(self) -> int:
        return max(16, next_power_of_2(self.plain_dim))

    @property
    def rotated_width(self) -> int:
        return max(16, next_power_of_2(self.rotated_dim))

    @property
    def value_width(self) -> int:
        return max(16, next_power_of_2(self.value_dim))

    @property
    def precision(self) -> str:
        return "ieee" if self.dtype == torch.float32 else "tf32"


def chunk_tiling(heads: int, num_tokens: int, target: Target, num_sms: int) -> Tiling:
    """Low tiles, unless high ones fill the device twice, and its matrix instructions read shared memory: registers do
    not hold what others take. None is cut; items tell where their chunk starts."""
    is_low = num_tokens * heads < 2 * HIGH_TILE * num_sms or not target.is_hopper
    return Tiling(LOW_TILE if is_low else HIGH_TILE, 1, heads, 1, tells_start=True)


@triton.jit(do_not_specialize=["table_stride"])
def _context_kernel(
    queries, cache, table, items, out, log_sums, factor, table_stride, SHAPE: tl.constexpr, ROTATED: tl.constexpr,
    CONFIG: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: a few tokens of a tile, with a block of their heads, against all that lies before their chunk."""
    head_block = tl.program_id(0) % BLOCKS
    skipped = tl.program_id(0) // BLOCKS * TOKENS
    own = items + tl.program_id(1) * FIELDS
    tokens, start = tl.load(own + 2), tl.load(own + 4)
    start_next_and_wait(PDL)
    if (skipped >= tokens) | (start == 0):
        return
    table_row = table + tl.load(own).to(tl.int64) * table_stride
    RANK: tl.constexpr = SHAPE.head_dim
    WIDTH: tl.constexpr = SHAPE.width
    row = tl.arange(0, ROWS)
    number = skipped + row // SHAPE.group
    held = (row < TOKENS * SHAPE.group) & (number < tokens)
    place = (tl.load(own + 1) + number).to(tl.int64) * SHAPE.heads + head_block * SHAPE.group + row % SHAPE.group
    query, turned = load_queries(queries + place * (RANK + ROTATED), held, SHAPE, ROTATED)
    mean, log_sum = walk_latents(query, turned, cache, table_row, 0, start, factor, SHAPE, ROTATED, ROWS, CONFIG)
    column = tl.arange(0, WIDTH)[None, :]
    tl.store(out + place[:, None] * RANK + column, mean.to(out.dtype.element_ty), mask=held[:, None] & (column < RANK))
    tl.store(log_sums + place, log_sum, mask=held)


def attend_context(
    queries: torch.Tensor,  # [num_tokens, heads, rank + rotated], contiguous
    kv: LatentKV,
    work: PrefillWork,
    out: torch.Tensor,  # [num_tokens, heads, rank], contiguous
    log_sums: torch.Tensor,  # float32 [num_tokens, heads]
    scale: float,
    *,
    shape: AttentionShape,
    config: ContextConfig | None = None,
) -> None:
    """Every query of a chunk that has a context before it reads all of that. What others have is left as it was."""
    assert queries.is_contiguous() and out.is_contiguous() and kv.cache.is_contiguous()
    config = config or context_config(queries.device)
    tokens, rows = config.tokens(shape), config.padded_rows(shape)
    grid = (shape.kv_heads * cdiv(work.tile_rows, tokens), len(work.items))
    dependent(_context_kernel, grid, queries.device)(
        queries, kv.cache, kv.table, work.items, out, log_sums, scale * LOG2_E, kv.table.stride(0), SHAPE=shape,
        ROTATED=queries.shape[2] - shape.head_dim, CONFIG=config, TOKENS=tokens, ROWS=rows, BLOCKS=shape.kv_heads,
        num_warps=config.warps,
    )  # fmt: skip


@triton.jit
def _walk_chunk(
    peak, total, sums, query, turned_query, place, k_head, rotated, v_head, first_key, begin, end, last, factor,
    expanded_stride, SHAPE: tl.constexpr, CONFIG: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over the chunk's keys `begin..end`; only masked blocks look at places."""
    key = tl.arange(0, CONFIG.block)
    plain_column = tl.arange(0, SHAPE.plain_width)[None, :]
    rotated_column = tl.arange(0, SHAPE.rotated_width)[None, :]
    value_column = tl.arange(0, SHAPE.value_width)[None, :]
    for start in tl.range(begin, end, CONFIG.block, num_stages=CONFIG.stages):
        at = start + key
        own = at
        if MASKED:
            own = tl.minimum(at, last)
        token = (first_key + own).to(tl.int64)[:, None]
        keys = tl.load(k_head + token * expanded_stride + plain_column, mask=plain_column < SHAPE.plain_dim, other=0.0)
        turned = tl.load(
            rotated + token * SHAPE.rotated_dim + rotated_column, mask=rotated_column < SHAPE.rotated_dim, other=0.0
        )
        values = tl.load(
            v_head + token * expanded_stride + value_column, mask=value_column < SHAPE.value_dim, other=0.0
        )
        scores = tl.dot(query, tl.trans(keys), input_precision=SHAPE.precision)
        scores = tl.dot(turned_query, tl.trans(turned), scores, input_precision=SHAPE.precision) * factor
        if MASKED:
            scores = tl.where(at[None, :] <= place[:, None], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        sums *= decay[:, None]
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision=SHAPE.precision)
        peak = new_peak
    return peak, total, sums


@triton.jit
def _chunk_kernel(
    queries, expanded, rotated, items, out, log_sums, factor, query_stride, expanded_stride, SHAPE: tl.constexpr,
    CONFIG: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`out` has what the context before a chunk gave, where there is one; `log_sums` None: none has any."""
    head = tl.program_id(0)
    own = items + tl.program_id(1) * FIELDS
    first_token, tokens, start = tl.load(own + 1), tl.load(own + 2), tl.load(own + 4)
    before = tl.load(own + 3) - start  # of the chunk, before the tile
    start_next_and_wait(PDL)
    if tokens == 0:
        return
    VALUE_WIDTH: tl.constexpr = SHAPE.value_width
    row = tl.arange(0, TILE)
    row_held = row < tokens
    token = (first_token + row).to(tl.int64)
    own_query = queries + token[:, None] * query_stride + head * SHAPE.key
    plain_column = tl.arange(0, SHAPE.plain_width)[None, :]
    rotated_column = tl.arange(0, SHAPE.rotated_width)[None, :]
    query = tl.load(own_query + plain_column, mask=row_held[:, None] & (plain_column < SHAPE.plain_dim), other=0.0)
    is_turned = row_held[:, None] & (rotated_column < SHAPE.rotated_dim)
    turned = tl.load(own_query + SHAPE.plain_dim + rotated_column, mask=is_turned, other=0.0)
    k_head = expanded + head * SHAPE.expanded
    v_head = k_head + SHAPE.plain_dim
    last = before + tokens - 1
    clear = (before + 1) // CONFIG.block * CONFIG.block  # up to here all queries of the tile read all keys
    place = before + row
    peak = tl.full([TILE], LOWEST, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    sums = tl.zeros([TILE, VALUE_WIDTH], tl.float32)
    peak, total, sums = _walk_chunk(
        peak, total, sums, query, turned, place, k_head, rotated, v_head, first_token - before, 0, clear, last, factor,
        expanded_stride, SHAPE, CONFIG, False,
    )  # fmt: skip
    peak, total, sums = _walk_chunk(
        peak, total, sums, query, turned, place, k_head, rotated, v_head, first_token - before, clear, last + 1, last,
        factor, expanded_stride, SHAPE, CONFIG, True,
    )  # fmt: skip
    value_column = tl.arange(0, VALUE_WIDTH)[None, :]
    held = row_held[:, None] & (value_column < SHAPE.value_dim)
    target = out + (token[:, None] * SHAPE.heads + head) * SHAPE.value_dim + value_column
    if log_sums is not None:
        if start > 0:
            context_sum = tl.load(log_sums + token * SHAPE.heads + head, mask=row_held, other=LOWEST)
            joined = tl.maximum(peak, context_sum)
            decay, weight = tl.exp2(peak - joined), tl.exp2(context_sum - joined)
            context = tl.load(target, mask=held, other=0.0).to(tl.float32)
            sums = sums * decay[:, None] + context * weight[:, None]
            total = total * decay + weight
    tl.store(target, (sums / total[:, None]).to(out.dtype.element_ty), mask=held)


def attend_chunks(
    queries: torch.Tensor,  # [num_tokens, heads, plain + rotated], heads contiguous, any token stride
    expanded: torch.Tensor,  # [num_tokens, heads * (plain + value)]: of each head its keys, then its values
    rotated: torch.Tensor,  # [num_tokens, rotated], contiguous
    work: PrefillWork,
    out: torch.Tensor,  # [num_tokens, heads * value], contiguous
    log_sums: torch.Tensor | None,  # float32 [num_tokens, heads]
    scale: float,
    *,
    shape: ChunkShape,
    config: WalkConfig | None = None,
) -> None:
    """Query i of a chunk reads the chunk's keys up to its own. `log_sums`: what `attend_context` left, whose results
    lie in `out`, expanded, and are joined; None: no chunk has a context before it."""
    assert out.is_contiguous() and rotated.is_contiguous() and expanded.stride(1) == 1
    widest = max(shape.plain_width, shape.value_width)
    config = config or WalkConfig(**settings_for("latent chunk", head_dim=widest, tile_rows=work.tile_rows))
    dependent(_chunk_kernel, (shape.heads, len(work.items)), queries.device)(
        queries, expanded, rotated, work.items, out, log_sums, scale * LOG2_E, queries.stride(0), expanded.stride(0),
        SHAPE=shape, CONFIG=config, TILE=work.tile_rows, num_warps=config.warps,
    )  # fmt: skip
