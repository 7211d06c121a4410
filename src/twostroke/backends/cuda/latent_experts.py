"""Experts that read and give fewer numbers than a token has (Nemotron 3 Super), between two products of their own. The
router reads the token itself. Nothing here waits for the device or allocates."""

from __future__ import annotations

from collections.abc import Callable

import torch

from twostroke.backends.cuda.moe import LatentPair, MoeBlock, MoeScratch
from twostroke.backends.cuda.products import Products, Stream


def mix_latent_experts(
    experts: MoeBlock,
    latent: LatentPair,
    scratch: MoeScratch,
    products: Products,
    stream: Stream,
    normed: torch.Tensor,  # [num_tokens, hidden]
    next_norm: torch.Tensor | None,
) -> None:
    """What experts find joins the stream."""
    rows, found = scratch.latent_rows[: len(normed)], scratch.latent_found[: len(normed)]
    products.apply(normed, latent.down, rows)
    experts.forward(rows, found, scratch, for_router=normed)
    products.join(found, latent.up, stream, None, next_norm)


def prepare_latent_experts(
    latent: LatentPair,
    scratch: MoeScratch,
    products: Products,
    stream_of: Callable[[int], Stream],
    next_norm: torch.Tensor | None,
) -> None:
    """Have kernels of both products compiled which no set of steps is sure to meet all of."""
    most_rows = len(scratch.latent_rows)
    for rows in (rows for rows in products.long_rows(latent.down) if rows <= most_rows):
        products.apply(stream_of(rows).room, latent.down, scratch.latent_rows[:rows])
    for rows in (rows for rows in products.long_rows(latent.up) if rows <= most_rows):
        products.join(scratch.latent_found[:rows], latent.up, stream_of(rows), None, next_norm)
