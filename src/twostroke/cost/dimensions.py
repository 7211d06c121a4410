"""A model as its matrices: what is multiplied, how often, and by which tokens. Knows no file; turns into a ModelShape
once it is said how many bits each part is kept in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import ceil

from twostroke.core.errors import BadRequestError
from twostroke.cost.model_shape import ExpertsShape, KVGroupShape, LatentAttention, ModelShape


class Part(Enum):
    """Which tokens of a step a matrix meets."""

    LAYER = "every token"
    EXPERT = "the tokens sent to it"
    HEAD = "the tokens whose logits are wanted"


@dataclass(frozen=True, slots=True)
class Matrix:
    name: str
    outputs: int
    inputs: int
    count: int
    """How many of them the model has, over all layers and experts."""
    part: Part = Part.LAYER

    @property
    def parameters(self) -> int:
        return self.count * self.outputs * self.inputs


@dataclass(frozen=True, slots=True)
class Dimensions:
    family: str
    hidden_size: int
    vocab_size: int
    max_context: int | None
    num_heads: int
    num_kv_heads: int
    """Latent attention has one, however many heads read it."""
    head_dim: int
    """Of keys."""
    matrices: tuple[Matrix, ...]
    vector_parameters: int
    """Norms and biases that every token meets."""
    windows: tuple[tuple[int | None, int], ...]
    """Of each kind of attention its window and its number of layers, full attention first."""
    kv_values_per_layer: int
    """Numbers that one position leaves behind in one layer."""
    tied_embeddings: bool
    num_experts: int = 0
    experts_per_token: int = 0
    expert_vector_parameters: int = 0
    """Biases of experts, over all of them."""
    latent: LatentAttention | None = None
    is_assumed: bool = False
    """Whether the family is unknown and was counted as a Llama-like decoder."""

    @property
    def num_layers(self) -> int:
        return sum(num_layers for _, num_layers in self.windows)

    @property
    def num_parameters(self) -> int:
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        vectors = self.vector_parameters + self.expert_vector_parameters
        return sum(matrix.parameters for matrix in self.matrices) + vectors + embedding

    def parameters_of(self, part: Part) -> int:
        return sum(matrix.parameters for matrix in self.matrices if matrix.part is part)

    def shape(
        self, *, weight_bits: float, kv_bits: float, head_bits: float | None = None, expert_bits: float | None = None
    ) -> ModelShape:
        """`head_bits`: of the head and the embedding table, by default those of the weights, but 8 at least;
        `expert_bits`: of experts, by default those of the weights. Vectors are kept in 16 bits at least."""
        head_bits = max(weight_bits, 8.0) if head_bits is None else head_bits
        expert_bits = weight_bits if expert_bits is None else expert_bits
        named = {"weight_bits": weight_bits, "kv_bits": kv_bits, "head_bits": head_bits, "expert_bits": expert_bits}
        for name, bits in named.items():
            if not 1 <= bits <= 64:
                raise BadRequestError(f"{name} must be from 1 to 64, not {bits:g}")
        vector_bits = max(weight_bits, 16.0)
        head = self.parameters_of(Part.HEAD)
        per_step = _bytes(self.parameters_of(Part.LAYER), weight_bits) + _bytes(head, head_bits)
        experts = None
        in_layers = self.parameters_of(Part.LAYER)
        if self.num_experts:
            in_experts = self.parameters_of(Part.EXPERT)
            vectors = _bytes(self.expert_vector_parameters, vector_bits)
            expert_bytes = _bytes(in_experts, expert_bits) + vectors
            experts = ExpertsShape(self.num_experts, self.experts_per_token, expert_bytes, in_experts)
            in_layers += in_experts // self.num_experts * self.experts_per_token
        return ModelShape(
            num_parameters=self.num_parameters,
            layer_matmul_parameters=in_layers,
            head_matmul_parameters=head,
            weight_bytes_per_step=per_step + _bytes(self.vector_parameters, vector_bits),
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            kv_groups=tuple(
                KVGroupShape(num_layers, window, _bytes(num_layers * self.kv_values_per_layer, kv_bits))
                for window, num_layers in self.windows
            ),
            experts=experts,
            embedding_bytes=0 if self.tied_embeddings else _bytes(self.vocab_size * self.hidden_size, head_bits),
            latent=self.latent,
        )


def _bytes(count: int, bits: float) -> int:
    return ceil(count * bits / 8)
