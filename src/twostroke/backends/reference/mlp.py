"""The gated MLP, and the mixture of experts that some models have in its place. Both take normed hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.arithmetic import Array, linear, softmax
from twostroke.backends.reference.weights import GatedMlp
from twostroke.models.spec import MoeSpec

Activation = Callable[[Array], Array]


def gated_mlp(weights: GatedMlp, activate: Activation, x: Array) -> Array:
    """One projection decides how much of the other passes  # [num_tokens, hidden]"""
    gated = activate(linear(x, weights.gate)) * linear(x, weights.up)  # [num_tokens, intermediate]
    return linear(gated, weights.down)


def mixture_of_experts(
    moe: MoeSpec, router: Array, experts: Sequence[GatedMlp], activate: Activation, x: Array
) -> Array:
    """Each token goes through the few experts its router likes best; their outputs are summed by the router's shares.
    Every expert takes all of its tokens at once  # [num_tokens, hidden]"""
    chosen, shares = route(moe, linear(x, router))
    output = np.zeros_like(x)
    for expert in np.unique(chosen):
        tokens, places = np.nonzero(chosen == expert)
        output[tokens] += shares[tokens, places, None] * gated_mlp(experts[expert], activate, x[tokens])
    return output


def route(moe: MoeSpec, logits: Array) -> tuple[npt.NDArray[np.intp], Array]:
    """From [num_tokens, experts] to each token's experts, the likeliest first (of equals the lower), and their shares
    # both [num_tokens, experts_per_token]"""
    shares = softmax(logits)
    chosen = np.argsort(-shares, axis=-1, kind="stable")[:, : moe.experts_per_token]
    shares = np.take_along_axis(shares, chosen, axis=-1)
    if moe.normalise_weights:
        shares = shares / shares.sum(axis=-1, keepdims=True)
    return chosen, shares
