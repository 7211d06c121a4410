"""Who drafts on the device, as the cuda backend is given it: made of the parts that the backend has by then."""

from __future__ import annotations

from collections.abc import Callable

import torch

from twostroke.backends.cuda.draft_model import DraftModelDrafter
from twostroke.backends.cuda.drafting import MAX_DRAFTS, DeviceDrafter
from twostroke.backends.cuda.eagle3 import Eagle3Drafter
from twostroke.backends.cuda.eagle3_weights import Eagle3Buffers, Eagle3Weights
from twostroke.backends.cuda.medusa import MedusaDrafter
from twostroke.backends.cuda.mtp import MtpDrafter
from twostroke.backends.cuda.parts import Parts
from twostroke.backends.cuda.products import Products
from twostroke.backends.cuda.tuned_table import Choices
from twostroke.backends.interface import Companion
from twostroke.core.kv_layout import KVLayout
from twostroke.models.heads.eagle3 import Eagle3Head
from twostroke.models.heads.medusa import MedusaHeads
from twostroke.models.heads.mtp import MtpHead
from twostroke.models.spec import ModelSpec


def drafter_of(
    companion: Companion,
    target: ModelSpec,
    layout: KVLayout,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    max_context: int,
    choices: Choices,
    has_copies: bool,
) -> Callable[[Parts], DeviceDrafter]:
    """`target`: that it drafts for. `dtype`, `kv_dtype`: what a whole model computes and keeps KV in; a head does as
    its target. `choices`: which kernels multiply what; `has_copies`: whether a head has copies for decode where they
    say so."""
    head = companion.head
    if isinstance(head, Eagle3Head):
        return head_of(companion, layout, max_context=max_context, choices=choices, has_copies=has_copies)

    def make(parts: Parts) -> DeviceDrafter:
        if isinstance(head, MedusaHeads):
            products = Products(target, parts.buffers.products, choices)
            return MedusaDrafter(companion, parts, products, norm_eps=target.norm_eps, max_context=max_context)
        if isinstance(head, MtpHead):
            return MtpDrafter(
                companion,
                parts,
                layout,
                norm_eps=target.norm_eps,
                max_context=max_context,
                choices=choices,
                has_copies=has_copies,
            )
        return DraftModelDrafter(
            companion,
            parts,
            layout,
            dtype=dtype,
            kv_dtype=kv_dtype,
            vocab_size=target.vocab_size,
            max_context=max_context,
            choices=choices,
        )

    return make


def head_of(
    companion: Companion, layout: KVLayout, *, max_context: int, choices: Choices, has_copies: bool
) -> Callable[[Parts], Eagle3Drafter]:
    """`choices`: which kernels multiply what; `has_copies`: whether it has copies for decode where they say so."""
    head = companion.head
    assert isinstance(head, Eagle3Head)

    def make(parts: Parts) -> Eagle3Drafter:
        like = parts.buffers.residual
        target = parts.decoder.weights
        weights, loader = Eagle3Weights.placed(
            companion, target, like.device, like.dtype, choices if has_copies else None
        )
        buffers = Eagle3Buffers(
            head.spec,
            num_tokens=len(like),
            num_rows=parts.rows.padding_row,
            num_drafts=MAX_DRAFTS,
            device=like.device,
            dtype=like.dtype,
        )
        if not parts.decoder.weights.output.forms.keys() & {"plain"}:
            # A head in few bits, which drafts may read, is brought to 16 where the model's own products are.
            buffers.products.unpacked = parts.buffers.products.unpacked
        return Eagle3Drafter(
            head,
            weights,
            loader,
            buffers,
            parts.rows,
            layout,
            companion.number,
            max_context=max_context,
            num_sms=parts.kernels[0].num_sms,
            choices=choices,
            graphs=parts.graphs,
        )

    return make
