"""The cards of this machine, as models are put on them: what a model, or one rank's part of it, takes of a card's
memory beside its KV, and how a rank's process is told of its card."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from twostroke.backends.cuda.model_matrices import held_of, held_on, held_weight_bytes, quantising_bytes
from twostroke.backends.interface import CardRoom
from twostroke.core.formats import Formats
from twostroke.core.step_sizes import StepSizes
from twostroke.models.checkpoint import Checkpoint

KV_SHARE_OF_DEVICE = 0.95
"""Of what weights and buffers leave: a GPU is mostly one program's own."""
GRAPH_BYTES = 1 << 30
"""Set aside for captured graphs, cuBLAS workspaces and compiled kernels."""
RANK_BYTES = 1 << 30
"""Set aside for what a rank's process takes of its card, and what it meets the others by."""
LOGIT_BYTES = 4
VISIBLE = "CUDA_VISIBLE_DEVICES"


class CardsOfRanks:
    """What a factory says of cards where several ranks share a model."""

    rank_unit = 64
    """The widths that Hopper's kernels take are multiples of it."""

    def num_cards(self) -> int:
        import torch

        return torch.cuda.device_count()

    def card_room(self, part: Checkpoint, formats: Formats, sizes: StepSizes, card: int) -> CardRoom:
        from twostroke.backends.cuda.captured_sizes import MAX_CHUNKS

        room, spec = room_on(part, formats, sizes, card), part.spec
        logits = LOGIT_BYTES * (sizes.max_running + MAX_CHUNKS) * (spec.vocab_size + 2 * spec.num_logits)
        return replace(room, beside_bytes=room.beside_bytes + RANK_BYTES + logits)

    def rank_environment(self, card: int) -> Mapping[str, str]:
        """Of the cards that this process sees, by the names that it knows them by."""
        visible = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
        return {VISIBLE: visible[card] if card < len(visible) else str(card)}


def room_on(checkpoint: Checkpoint, formats: Formats, sizes: StepSizes, card: int | None = None) -> CardRoom:
    """`card`: None: this thread's own."""
    import torch

    from twostroke.backends.cuda.buffers import Buffers, tensor_bytes
    from twostroke.backends.cuda.captured_sizes import MAX_CHUNKS
    from twostroke.backends.cuda.products import card_for
    from twostroke.backends.cuda.sampling import SamplingFeatures, SamplingRows
    from twostroke.backends.cuda.tuned_table import Choices
    from twostroke.backends.cuda.verify import most_queries

    free, total = torch.cuda.mem_get_info(card)
    spec, max_sampled = checkpoint.spec, sizes.max_running + MAX_CHUNKS
    nowhere, target = torch.device("meta"), card_for(torch.device("cuda"), torch.bfloat16, formats)
    held = held_on(held_of(checkpoint, formats), checkpoint.spec, target)
    num_tokens = sizes.max_tokens_per_step
    num_queries = most_queries(min(sizes.max_running, num_tokens), num_tokens)
    choices = Choices.on(target)
    buffers = Buffers(spec, num_tokens, max_sampled, nowhere, torch.bfloat16, held, num_queries, choices)
    sampling = SamplingRows(max_sampled, spec.vocab_size, "meta")
    sampling.prepare(SamplingFeatures(draws=True, filters=True, edits=True))
    weight_bytes = held_weight_bytes(checkpoint, formats, target) + quantising_bytes(checkpoint, formats)
    beside = weight_bytes + GRAPH_BYTES + tensor_bytes(buffers) + tensor_bytes(sampling)
    return CardRoom(torch.cuda.get_device_name(card), total, free, beside, KV_SHARE_OF_DEVICE)
