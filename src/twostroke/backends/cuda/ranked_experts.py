"""Experts of which this rank holds some: what they find, and what the MLP beside them does, is summed over all ranks
before it joins the residual stream. Nothing here waits for the device but to meet the other ranks."""

from __future__ import annotations

import torch

from twostroke.backends.cuda.kernels.activation import scale_by_gate
from twostroke.backends.cuda.moe import MoeBlock, MoeScratch, MoeWeights
from twostroke.backends.cuda.products import Products, Stream
from twostroke.backends.cuda.ranks import CardRanks


def mix_held_experts(
    experts: MoeBlock,
    weights: MoeWeights,
    scratch: MoeScratch,
    products: Products,
    stream: Stream,
    norm: torch.Tensor | None,
    next_norm: torch.Tensor | None,
    activated: torch.Tensor | None,
    ranks: CardRanks,
) -> None:
    """`norm`: by which they read the stream. `activated`: room for the MLP's inner numbers  # [num_tokens, width]"""
    normed, found = products.normed(stream, norm), None
    if weights.shared is not None:
        assert activated is not None
        products.multiply(stream, norm, weights.shared.gate_up, activated)
        if weights.shared.router is not None:
            scale_by_gate(normed, weights.shared.router, activated)
        found = products.whole(activated, weights.shared.down)
    if weights.latent is None:
        out = products.found(len(normed))
        experts.forward(normed, out, scratch, residual=found)
    else:
        rows, given = scratch.latent_rows[: len(normed)], scratch.latent_found[: len(normed)]
        products.apply(normed, weights.latent.down, rows)
        experts.forward(rows, given, scratch, for_router=normed)
        if found is None:
            out = products.whole(given, weights.latent.up)
        else:
            stream.normed_by = None  # where its norm lay there is room now
            out = found.add_(products.whole(given, weights.latent.up, normed))
    ranks.add_up(out)
    products.add(out, stream, None, next_norm)
