"""From a checkpoint to the plain numbers that the cost room reasons about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from twostroke.cost.dimensions import heads_of, kv_group_shapes
from twostroke.cost.model_shape import ExpertsShape, ModelShape
from twostroke.models.checkpoint import Checkpoint


def shape_of(
    checkpoint: Checkpoint,
    kv_bytes_per_token_by_group: Sequence[int],
    held_bytes: Callable[[str], int] | None = None,
) -> ModelShape:
    """KV groups are those of `spec.kv_groups()`, in that order; what a token takes in each is the backend's to say.
    So is what a tensor takes as it is held; None: what it is stored in, or brought to on load."""
    held_bytes = held_bytes or checkpoint.held_tensor_bytes
    spec = checkpoint.spec
    shapes = spec.tensor_shapes()
    head = "embedding" if spec.tied_embeddings else "output"
    matrices = {name: prod(shape) for name, shape in shapes.items() if len(shape) == 2}
    in_layers = sum(count for name, count in matrices.items() if name.startswith(("layers.", "layer_projection")))
    weight_bytes = sum(map(held_bytes, checkpoint.tensors))
    experts = None
    if (moe := spec.moe) is not None:
        names = [name for name in shapes if ".experts." in name]
        expert_bytes = sum(map(held_bytes, names))
        in_experts = sum(matrices.get(name, 0) for name in names)  # biases are read, and multiply nothing
        experts = ExpertsShape(moe.num_experts, moe.experts_per_token, expert_bytes, in_experts)
        weight_bytes -= expert_bytes
        in_layers -= in_experts - experts.active_parameters
    looked_up = ["position_embedding", "text_embedding"] if spec.places is not None else []
    looked_up += [] if spec.layer_input is None else ["layer_embedding"]
    looked_up += [] if spec.tied_embeddings and spec.has_output else ["embedding"]
    embedding_bytes = sum(checkpoint.tensors[name].nbytes for name in looked_up)
    weight_bytes -= embedding_bytes
    num_heads, head_dim = heads_of(spec)
    return ModelShape(
        num_parameters=checkpoint.num_parameters,
        layer_matmul_parameters=in_layers,
        head_matmul_parameters=matrices[head] if spec.has_output else 0,
        weight_bytes_per_step=weight_bytes,
        num_heads=num_heads,
        head_dim=head_dim,
        kv_groups=kv_group_shapes(spec, kv_bytes_per_token_by_group),
        experts=experts,
        embedding_bytes=embedding_bytes,
    )
