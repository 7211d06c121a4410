"""A head as a drafter of a host backend: what it shares with its target is taken from the target's file."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.arithmetic import Array
from twostroke.backends.host.companions import TargetPass
from twostroke.backends.host.draft_rows import DraftRows
from twostroke.backends.host.eagle3 import Eagle3Network
from twostroke.backends.host.head_drafter import MedusaDrafter, Network, SlotDrafter
from twostroke.backends.host.medusa import MedusaNetwork
from twostroke.backends.host.mtp import MtpNetwork
from twostroke.backends.host.paged_layer import Ints
from twostroke.backends.host.rows import RowSet
from twostroke.backends.interface import Companion
from twostroke.core.kv_layout import KVLayout
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads.medusa import MedusaHeads
from twostroke.models.heads.mtp import MtpHead
from twostroke.models.weights.quantisation import dequantise


def head_drafter(
    companion: Companion,
    target: Checkpoint,
    taps: tuple[int, ...],
    rows: RowSet,
    layout: KVLayout,
    max_context: int,
    network: Network | None = None,
) -> SlotDrafter | MedusaDrafter:
    """`taps`: the layers whose residuals a pass keeps, in order; `network`: what computes, if not numpy."""
    head, spec = companion.head, target.spec
    assert head is not None
    if isinstance(head, MedusaHeads):
        final_norm = target.tensors["final_norm"].to_float32()
        return MedusaDrafter(
            MedusaNetwork(head),
            source=head.source,
            target_ids=head.target_ids,
            final_norm=final_norm,
            norm_eps=spec.norm_eps,
        )
    embedding = target.tensors["embedding"]

    def embed(token_ids: Ints) -> Array:
        return dequantise(embedding.kind, embedding.data[token_ids])

    def output() -> Array:
        return target.tensors["embedding" if spec.tied_embeddings else "output"].to_float32()

    places = [None if tap == 0 else taps.index(tap - 1) for tap in head.spec.taps]

    def hidden_states(done: TargetPass, indices: npt.NDArray[np.intp]) -> Array:
        parts = []
        for place in places:
            if place is None:  # what enters the first layer
                parts.append(embed(done.batch.token_ids[indices]) * np.float32(spec.embedding_scale))
            else:
                parts.append(done.scores.taps[place][indices])
        return np.concatenate(parts, axis=1)

    num_blocks = layout.of_model(companion.number).groups[0].num_blocks
    if isinstance(head, MtpHead):
        network = MtpNetwork(
            head,
            num_blocks=num_blocks,
            block_size=layout.block_size,
            max_context=max_context,
            embed=embed,
            output=output(),
            target_norm=target.tensors["final_norm"].to_float32(),
        )
    elif network is None:
        network = Eagle3Network(
            head,
            num_blocks=num_blocks,
            block_size=layout.block_size,
            max_context=max_context,
            embed=embed,
            output=output,
        )
    return SlotDrafter(
        network,
        DraftRows(rows, layout, companion.number),
        name=companion.method,
        source=head.source,
        target_ids=head.target_ids,
        taps=hidden_states,
        num_blocks=num_blocks,
        block_size=layout.block_size,
    )
