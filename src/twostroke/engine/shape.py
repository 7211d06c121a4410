"""From a checkpoint to the plain numbers that the cost room reasons about."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from twostroke.cost.model_shape import KVGroupShape, ModelShape
from twostroke.models.checkpoint import Checkpoint


def shape_of(checkpoint: Checkpoint, kv_bytes_per_token_by_group: Sequence[int]) -> ModelShape:
    """KV groups are those of `spec.kv_windows()`, in that order; what a token takes in each is the backend's to say."""
    spec = checkpoint.spec
    shapes = spec.tensor_shapes()
    head = "embedding" if spec.tied_embeddings else "output"
    matrices = {name: prod(shape) for name, shape in shapes.items() if len(shape) == 2}
    weight_bytes = checkpoint.held_bytes
    if not spec.tied_embeddings:
        weight_bytes -= checkpoint.tensors["embedding"].nbytes
    groups = zip(spec.kv_windows(), kv_bytes_per_token_by_group, strict=True)
    return ModelShape(
        num_parameters=checkpoint.num_parameters,
        layer_matmul_parameters=sum(count for name, count in matrices.items() if name not in ("embedding", "output")),
        head_matmul_parameters=matrices[head],
        weight_bytes_per_step=weight_bytes,
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        kv_groups=tuple(KVGroupShape(len(layers), window, num_bytes) for (window, layers), num_bytes in groups),
    )
