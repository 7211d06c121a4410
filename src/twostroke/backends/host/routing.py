"""Which experts each token is sent to, and by which shares: from a router's numbers, on the host. Knows no weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.arithmetic import Array, sigmoid, softmax
from twostroke.models.spec import MoeSpec, Routing


def route(moe: MoeSpec, logits: Array, correction: Array | None = None) -> tuple[npt.NDArray[np.intp], Array]:
    """From [num_tokens, experts] to each token's experts, the likeliest first (of equals the lower), and their shares
    # both [num_tokens, experts_per_token]"""
    routing = moe.routing
    scores = softmax(logits) if routing.scoring == "softmax" else sigmoid(logits)
    wanted = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        wanted = np.where(_in_best_groups(routing, wanted), wanted, np.float32(-np.inf))
    chosen = np.argsort(-wanted, axis=-1, kind="stable")[:, : moe.experts_per_token]
    shares = np.take_along_axis(scores, chosen, axis=-1)
    if moe.normalise_weights:
        shares = shares / shares.sum(axis=-1, keepdims=True)
    return chosen, shares * np.float32(routing.share_scale)


def _in_best_groups(routing: Routing, wanted: Array) -> npt.NDArray[np.bool_]:
    """Which experts a token may be sent to  # [num_tokens, experts]"""
    grouped = wanted.reshape(len(wanted), routing.num_groups, -1)
    best = np.sort(grouped, axis=-1)[..., -routing.ranked_by :].sum(axis=-1)  # [num_tokens, groups]
    chosen = np.argsort(-best, axis=-1, kind="stable")[:, : routing.groups_per_token]
    is_chosen = np.zeros(best.shape, dtype=np.bool_)
    np.put_along_axis(is_chosen, chosen, True, axis=-1)
    return np.repeat(is_chosen, grouped.shape[-1], axis=-1)
