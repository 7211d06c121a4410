"""What a layer's matrices and vectors are to a program: projections of packed matrices, and vectors in f32. Where they
come from is `weights.py`'s to know."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.backends.cpu.experts import LayerExperts
from twostroke.backends.cpu.latent_weights import LatentWeights
from twostroke.backends.cpu.memory import Floats
from twostroke.backends.cpu.packing import PackedMatrix
from twostroke.backends.cpu.recurrent import RecurrentVectors
from twostroke.models.weights.tensor import WeightTensor


@dataclass(frozen=True, slots=True, eq=False)
class ProjectionPart:
    matrix: PackedMatrix
    column: int
    """Where its outputs begin in the projection's."""
    bias: Floats | None


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Matrices that read the same input: q, k and v, or gate and up. Neighbours of one kind are one matrix."""

    parts: tuple[ProjectionPart, ...]
    columns: tuple[int, ...]
    """Where each named matrix begins in the outputs."""
    width: int
    """Outputs, padding included."""

    @property
    def depth(self) -> int:
        """Inputs."""
        return self.parts[0].matrix.depth

    @property
    def is_gated_product(self) -> bool:
        """Gate and up in one matrix: of one kind throughout, and without biases."""
        return len(self.columns) == 2 and len(self.parts) == 1 and self.parts[0].bias is None


NO_PROJECTION = Projection((), (), 0)
"""Of a layer that has no such block."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """An MLP beside the experts, that every row meets."""

    mlp_in: Projection
    mlp_out: Projection
    router: Floats | None
    """Of its share; None: all of it counts."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputWeights:
    """Of a layer that gets vectors beside the residual."""

    gate: Projection
    out: Projection
    norm: Floats


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputs:
    """What the vectors of all layers are made with."""

    embedding: WeightTensor
    projection: Projection
    norm: Floats


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Of a layer without attention, or without an MLP, their projections are NO_PROJECTION."""

    attention_norm: Floats | None
    """None, here and below: the block reads the residual as it is."""
    attention_in: Projection
    attention_out: Projection
    mlp_norm: Floats | None
    mlp_in: Projection
    mlp_out: Projection
    q_norm: Floats | None
    k_norm: Floats | None
    post_attention_norm: Floats | None
    post_mlp_norm: Floats | None
    attention_norm_bias: Floats | None = None
    mlp_norm_bias: Floats | None = None
    sinks: Floats | None = None
    """Of each head, in units of ln 2."""
    experts: LayerExperts | None = None
    """In place of `mlp_in` and `mlp_out`, which are the first one's then."""
    shared: SharedExpert | None = None
    latent: LatentWeights | None = None
    recurrent: RecurrentVectors | None = None
    has_output_gate: bool = False
    """Whether the last of `attention_in` gates what heads find."""
    layer_input: LayerInputWeights | None = None
    scale: float = 1.0
    """What the residual is multiplied by behind it."""

    @property
    def has_attention(self) -> bool:
        """Or a state."""
        return self.attention_in is not NO_PROJECTION

    @property
    def has_mlp(self) -> bool:
        return self.mlp_in is not NO_PROJECTION
