"""What an EAGLE-3 head reads and keeps, beside its products: tokens next to the hidden states of those before them, and
the states that later tokens will ask for. Slot p is made from token p and the state of p - 1. Knows rows, positions and
pages; nothing of steps."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostroke.backends.cuda.kernels.norms import _normalised
from twostroke.backends.cuda.kernels.sampling_filters import Summaries, of_blocks
from twostroke.backends.cuda.kernels.sampling_state import NEGATIVE_INFINITY, NUM_WORDS, last_position
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait, wait_and_start_next
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2

KEPT: Final = 8
"""States that each row keeps, by position: as many as tokens of it may enter a step of decodes. Which of them will have
been its last tokens shows only when drafts were verified."""
_KEPT = tl.constexpr(KEPT)


class StateStore(NamedTuple):
    """On the host and in kernels."""

    kept: torch.Tensor  # [max rows + 1, KEPT, hidden]: of each row's last positions, by position modulo KEPT
    page_ends: torch.Tensor | None  # [blocks + 1, hidden]: of each block's last token, for who finds it by its prefix
    table: torch.Tensor | None  # int32 [max rows + 1, table_len]; both None: a row's own last states are enough


class InputNorms(NamedTuple):
    """What the two halves of attention's input are made with."""

    embedding: torch.Tensor  # [vocabulary, hidden]
    embedding_norm: torch.Tensor  # [hidden]
    hidden_norm: torch.Tensor  # [hidden]


@triton.jit
def _write_inputs(state, token_id, norms, target, eps, embedding_stride, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Both halves, normed, at `target`; returns the normed state."""
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    source = norms.embedding + token_id.to(tl.int64) * embedding_stride
    embedded = tl.load(source + columns, mask=mask, other=0.0).to(tl.float32)
    embedded = _normalised(embedded, eps, HIDDEN)
    embedded *= tl.load(norms.embedding_norm + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + columns, embedded.to(target.dtype.element_ty), mask=mask)
    normed = _normalised(state, eps, HIDDEN)
    normed *= tl.load(norms.hidden_norm + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + HIDDEN + columns, normed.to(target.dtype.element_ty), mask=mask)
    return normed


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["token_ids", "rows", "positions"])
def _read_inputs(
    norms, states, token_ids, rows, positions, last_tokens, joined, inputs, eps, embedding_stride, table_stride,
    PAGE: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next_and_wait(PDL)
    token = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    row = tl.load(rows + token).to(tl.int64)
    position = tl.load(positions + token)
    is_first = (token == 0) | (tl.load(rows + tl.maximum(token - 1, 0)).to(tl.int64) != row)
    source = joined + tl.maximum(token - 1, 0).to(tl.int64) * HIDDEN
    # A row that goes on has kept the state before; one that begins behind a prefix which others read finds it by its
    # block, and prefixes end where blocks do.
    kept = states.kept + (row * _KEPT + (position + _KEPT - 1) % _KEPT) * HIDDEN
    block = tl.load(states.table + row * table_stride + tl.maximum(position - 1, 0) // PAGE).to(tl.int64)
    source = tl.where(is_first, tl.where(position % PAGE == 0, states.page_ends + block * HIDDEN, kept), source)
    state = tl.load(source + columns, mask=columns < HIDDEN, other=0.0).to(tl.float32)
    state = tl.where(position > 0, state, 0.0)  # nothing stands before the first token, and nobody reads its slot
    token_id = tl.load(token_ids + token)
    if token_id < 0:
        token_id = tl.load(last_tokens + row)
    target = inputs + token.to(tl.int64) * (2 * HIDDEN)
    _write_inputs(state, token_id, norms, target, eps, embedding_stride, HIDDEN, BLOCK)


def read_inputs(
    norms: InputNorms,
    states: StateStore,
    token_ids: torch.Tensor,  # int32 [num_tokens]; FROM_ROW: the row's last
    rows: torch.Tensor,  # int32 [num_tokens]; a row's tokens side by side, in order
    positions: torch.Tensor,  # int32 [num_tokens]
    last_tokens: torch.Tensor,  # int32 [max rows + 1]
    joined: torch.Tensor,  # [num_tokens, hidden]: the state of each token
    inputs: torch.Tensor,  # [num_tokens, 2 * hidden], written
    *,
    page: int,
    eps: float,
) -> None:
    """Each token beside the state of the one before it, which may be one of an earlier step."""
    num_tokens, hidden = joined.shape
    if num_tokens == 0:
        return
    assert states.table is not None
    block = next_power_of_2(hidden)
    dependent(_read_inputs, (num_tokens,), joined.device)(
        norms, states, token_ids, rows, positions, last_tokens, joined, inputs, eps, norms.embedding.stride(0),
        states.table.stride(0), PAGE=page, HIDDEN=hidden, BLOCK=block, num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "table_stride"], do_not_specialize_on_alignment=["rows", "positions"])
def _keep_states(
    states, rows, positions, joined, num_tokens, table_stride,
    PAGE: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next_and_wait(PDL)
    token = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    row = tl.load(rows + token).to(tl.int64)
    position = tl.load(positions + token)
    state = tl.load(joined + token.to(tl.int64) * HIDDEN + columns, mask=mask, other=0.0)
    later = tl.load(rows + tl.minimum(token + _KEPT, num_tokens - 1)).to(tl.int64)
    if (token + _KEPT >= num_tokens) | (later != row):  # of a chunk, the last ones: others would have their places
        tl.store(states.kept + (row * _KEPT + position % _KEPT) * HIDDEN + columns, state, mask=mask)
    if states.page_ends is not None:
        if position % PAGE == PAGE - 1:
            block = tl.load(states.table + row * table_stride + position // PAGE).to(tl.int64)
            tl.store(states.page_ends + block * HIDDEN + columns, state, mask=mask)


def keep_states(
    states: StateStore,
    rows: torch.Tensor,  # int32 [num_tokens]
    positions: torch.Tensor,  # int32 [num_tokens]
    joined: torch.Tensor,  # [num_tokens, hidden]
    *,
    page: int = 1,
) -> None:
    """What later tokens will ask for, behind `read_inputs`, which still reads what was there."""
    num_tokens, hidden = joined.shape
    if num_tokens == 0:
        return
    block = next_power_of_2(hidden)
    dependent(_keep_states, (num_tokens,), joined.device)(
        states, rows, positions, joined, num_tokens, 0 if states.table is None else states.table.stride(0),
        PAGE=page, HIDDEN=hidden, BLOCK=block, num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip


@triton.jit
def _begin_chain(
    norms, states, records, last_tokens, entered, rows, positions, inputs, residual, eps, embedding_stride,
    rows_stride, STEPS: tl.constexpr, NORMED_RESIDUAL: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    stream = tl.program_id(0)
    first_row = tl.load(entered + stream * (STEPS + 1))
    position = last_position(records + first_row.to(tl.int64) * NUM_WORDS)
    for step in tl.static_range(STEPS):
        # What is asked for is computed where its slot has a block; the rest is the padding row's.
        row = tl.load(entered + stream * (STEPS + 1) + 1 + step)
        tl.store(rows + step * rows_stride + stream, row)
        tl.store(positions + step * rows_stride + stream, tl.where(row == first_row, position + step, 0))
    if PDL:
        # Kernels behind read rows and positions before they wait: none may begin before these are in memory.
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r", [position], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
        gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    kept = states.kept + (first_row.to(tl.int64) * _KEPT + (position + _KEPT - 1) % _KEPT) * HIDDEN
    state = tl.load(kept + columns, mask=mask, other=0.0).to(tl.float32)
    token_id = tl.load(last_tokens + first_row)
    target = inputs + stream.to(tl.int64) * (2 * HIDDEN)
    normed = _write_inputs(state, token_id, norms, target, eps, embedding_stride, HIDDEN, BLOCK)
    if NORMED_RESIDUAL:
        state = normed
    tl.store(residual + stream.to(tl.int64) * HIDDEN + columns, state.to(residual.dtype.element_ty), mask=mask)


def begin_chain(
    norms: InputNorms,
    states: StateStore,
    records: torch.Tensor,  # int64 [max rows + 1, words]
    last_tokens: torch.Tensor,  # int32 [max rows + 1]
    entered: torch.Tensor,  # int32 [num_streams * (steps + 1)]: a row for its token and for each draft, or padding's
    rows: torch.Tensor,  # int32 [at least steps, max streams], written
    positions: torch.Tensor,  # int32, the same
    inputs: torch.Tensor,  # [num_streams, 2 * hidden], written
    residual: torch.Tensor,  # [num_streams, hidden], written
    *,
    steps: int,
    normed_residual: bool,
    eps: float,
) -> None:
    """The last token of each row beside the state before it; and where each step of the chain stands."""
    num_streams, hidden = residual.shape
    block = next_power_of_2(hidden)
    dependent(_begin_chain, (num_streams,), residual.device)(
        norms, states, records, last_tokens, entered, rows, positions, inputs, residual, eps,
        norms.embedding.stride(0), rows.stride(0), STEPS=steps, NORMED_RESIDUAL=normed_residual, HIDDEN=hidden,
        BLOCK=block, num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip


@triton.jit(do_not_specialize=["step"], do_not_specialize_on_alignment=["rows"])
def _go_on(
    norms, drafts, rows, state, inputs, residual, step, eps, embedding_stride, drafts_stride,
    NORMED_RESIDUAL: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next_and_wait(PDL)
    stream = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    row = tl.load(rows + stream)
    token_id = tl.maximum(tl.load(drafts + row * drafts_stride + step - 1), 0)
    found = tl.load(state + stream.to(tl.int64) * HIDDEN + columns, mask=mask, other=0.0).to(tl.float32)
    target = inputs + stream.to(tl.int64) * (2 * HIDDEN)
    normed = _write_inputs(found, token_id, norms, target, eps, embedding_stride, HIDDEN, BLOCK)
    if NORMED_RESIDUAL:
        found = normed
    tl.store(residual + stream.to(tl.int64) * HIDDEN + columns, found.to(residual.dtype.element_ty), mask=mask)


def go_on(
    norms: InputNorms,
    drafts: torch.Tensor,  # int32 [max rows + 1, at least step]
    rows: torch.Tensor,  # int32 [num_streams]
    state: torch.Tensor,  # [num_streams, hidden]; may be `residual`
    inputs: torch.Tensor,  # [num_streams, 2 * hidden], written
    residual: torch.Tensor,  # [num_streams, hidden], written
    *,
    step: int,
    normed_residual: bool,
    eps: float,
) -> None:
    """The draft that the step before this one made, beside the state that it made it from."""
    num_streams, hidden = residual.shape
    block = next_power_of_2(hidden)
    dependent(_go_on, (num_streams,), residual.device)(
        norms, drafts, rows, state, inputs, residual, step, eps, norms.embedding.stride(0), drafts.stride(0),
        NORMED_RESIDUAL=normed_residual, HIDDEN=hidden, BLOCK=block, num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip


@triton.jit(do_not_specialize=["step"], do_not_specialize_on_alignment=["rows"])
def _name_drafts(
    summaries, target_ids, rows, drafts, step, num_blocks, draft_vocab, drafts_stride,
    SUMMARIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_and_start_next(PDL)
    stream = tl.program_id(0)
    bests = of_blocks(summaries.best, stream, num_blocks, NEGATIVE_INFINITY, SUMMARIES)
    best_ids = of_blocks(summaries.best_id, stream, num_blocks, draft_vocab, SUMMARIES)
    is_broken = tl.max((bests != bests).to(tl.int32), axis=0) == 1
    best = tl.min(tl.where(bests == tl.max(bests, axis=0), best_ids, draft_vocab), axis=0)
    token_id = tl.load(target_ids + tl.where(is_broken, 0, best))
    row = tl.load(rows + stream)
    tl.store(drafts + row * drafts_stride + step, tl.where(is_broken, -1, token_id))


def name_drafts(
    summaries: Summaries,
    target_ids: torch.Tensor,  # int32 [draft vocabulary]: the model's token for each of the head's
    rows: torch.Tensor,  # int32 [num_streams]
    drafts: torch.Tensor,  # int32 [max rows + 1, ...], its column `step` written; -1 where scores were not finite
    *,
    step: int,
) -> None:
    """From the blocks' best scores (`sampling.survey`) to the likeliest token, lowest id first."""
    num_blocks = summaries.best.shape[1]
    dependent(_name_drafts, (len(rows),), drafts.device)(
        summaries, target_ids, rows, drafts, step, num_blocks, len(target_ids), drafts.stride(0),
        SUMMARIES=next_power_of_2(num_blocks), num_warps=1,
    )  # fmt: skip
