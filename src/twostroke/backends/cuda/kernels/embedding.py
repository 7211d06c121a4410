"""The embedding gather. It knows that a token may still be unknown to the host, and so may where it stands: sampled by
the step before, it lies in the device's rows. It knows nothing of steps or sequences."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostroke.backends.cuda.kernels.norms import centred
from twostroke.backends.cuda.kernels.sampling_state import NUM_WORDS, last_position
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2

FROM_ROW: Final = -1
"""A token id or a position that the host does not know yet: the row's last sampled token is meant, or where that
stands. As a position, numbers below are as many places behind it."""


class Positions(NamedTuple):
    """Where tokens stand, for the kernels behind."""

    sent: torch.Tensor  # int32 [num_tokens], some FROM_ROW
    records: torch.Tensor  # int64 [num_rows, words]
    found: torch.Tensor  # int32 [num_tokens], written


def gather(
    embedding: torch.Tensor,  # [vocabulary, hidden]
    token_ids: torch.Tensor,  # int32 [num_tokens]
    rows: torch.Tensor,  # int32 [num_tokens]
    last_tokens: torch.Tensor,  # int32 [num_rows]
    out: torch.Tensor,  # [num_tokens, hidden]
    *,
    scale: float = 1.0,
    positions: Positions | None = None,
) -> None:
    """out[t] = embedding[id] * scale, where id is token_ids[t], or the row's last token where that says FROM_ROW.
    `positions`, where they are given, are found in the same way."""
    num_tokens, hidden = out.shape
    if num_tokens == 0:
        return
    block = next_power_of_2(hidden)
    dependent(_gather, (num_tokens,), out.device)(
        embedding, token_ids, rows, last_tokens, out, *((None,) * 3 if positions is None else positions), scale,
        embedding.stride(0), out.stride(0), HIDDEN=hidden, BLOCK=block, num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip


class Places(NamedTuple):
    """What an encoder looks up beside the token, and the norm of the sum."""

    positions: torch.Tensor  # [places, hidden]
    texts: torch.Tensor  # [texts, hidden]
    norm: torch.Tensor  # [hidden]
    norm_bias: torch.Tensor  # [hidden]


def gather_places(
    embedding: torch.Tensor,  # [vocabulary, hidden]
    places: Places,
    token_ids: torch.Tensor,  # int32 [num_tokens]
    rows: torch.Tensor,  # int32 [num_tokens]
    positions: torch.Tensor,  # int32 [num_tokens]
    second_texts: torch.Tensor,  # int32 [num_rows]: where a row's second text begins
    out: torch.Tensor,  # [num_tokens, hidden], contiguous
    *,
    first_place: int,
    eps: float,
) -> None:
    """Of a token, of where it stands and of its text: the norm of their sum. All is known to the host."""
    num_tokens, hidden = out.shape
    if num_tokens == 0:
        return
    block, last_text = next_power_of_2(hidden), len(places.texts) - 1
    dependent(_gather_places, (num_tokens,), out.device)(
        embedding, *places, token_ids, rows, positions, second_texts, out, first_place, last_text, eps, HIDDEN=hidden,
        BLOCK=block, num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip


@triton.jit
def _gather_places(
    embedding, places, texts, norm, norm_bias, token_ids, rows, positions, second_texts, out, first_place, last_text,
    eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    scale = tl.load(norm + columns, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(norm_bias + columns, mask=mask, other=0.0).to(tl.float32)
    start_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    is_second = (position >= tl.load(second_texts + tl.load(rows + token))).to(tl.int32)
    row = tl.load(embedding + tl.load(token_ids + token).to(tl.int64) * HIDDEN + columns, mask=mask, other=0.0)
    place = tl.load(places + (position + first_place).to(tl.int64) * HIDDEN + columns, mask=mask, other=0.0)
    text = tl.load(texts + tl.minimum(is_second, last_text) * HIDDEN + columns, mask=mask, other=0.0)
    total = row.to(tl.float32) + place.to(tl.float32) + text.to(tl.float32)
    y = centred(total, mask, scale, shift, eps, HIDDEN)
    tl.store(out + token * HIDDEN + columns, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _find_position(token, row, sent, records, found, PDL: tl.constexpr):
    position = tl.load(sent + token)
    if position < 0:
        position = last_position(records + row.to(tl.int64) * NUM_WORDS) - 1 - position
    tl.store(found + token, position)
    if PDL:
        # Kernels of the chain read positions before they wait: none may begin before all of these are in memory.
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r", [position], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
        gdc_launch_dependents()


@triton.jit(do_not_specialize_on_alignment=["token_ids", "rows", "sent"])
def _gather(
    embedding, token_ids, rows, last_tokens, out, sent, records, found, scale, embedding_stride, out_stride,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        if found is None:
            gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    token_id = tl.load(token_ids + token)
    row = tl.load(rows + token)
    if token_id < 0:
        token_id = tl.load(last_tokens + row).to(tl.int32)
    if found is not None:
        _find_position(token, row, sent, records, found, PDL)
    source = embedding + token_id.to(tl.int64) * embedding_stride
    x = tl.load(source + columns, mask=columns < HIDDEN).to(tl.float32) * scale
    target = out + token.to(tl.int64) * out_stride
    tl.store(target + columns, x.to(out.dtype.element_ty), mask=columns < HIDDEN)
