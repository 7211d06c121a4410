"""A model's spec as its matrices: what is multiplied, how often, and by which tokens. Knows no file; turns into a
ModelShape once it is said how many bits each part is kept in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import ceil, prod

from twostroke.core.errors import BadRequestError
from twostroke.cost.model_shape import ExpertsShape, KVGroupShape, LatentWork, ModelShape
from twostroke.models.families.rope import MAX_CONTEXT
from twostroke.models.spec import Attention, GroupedAttention, LatentAttention, LayerGroup, ModelSpec, Recurrent


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


@dataclass(frozen=True)
class Dimensions:
    spec: ModelSpec
    not_run: str | None = None
    """Why this engine does not run it, in a sentence."""
    is_assumed: bool = False
    """Whether the family is unknown and was counted as a Llama-like decoder."""

    @property
    def num_layers(self) -> int:
        return self.spec.num_layers

    @property
    def max_context(self) -> int | None:
        """None: its files do not say."""
        return self.spec.max_context if self.spec.max_context < MAX_CONTEXT else None

    @property
    def num_heads(self) -> int:
        return heads_of(self.spec)[0]

    @property
    def num_kv_heads(self) -> int:
        """Latent attention has one, however many heads read it."""
        attentions = (layer.attention for layer in self.spec.layers)
        return next((one.num_kv_heads for one in attentions if isinstance(one, GroupedAttention)), 1)

    @property
    def num_experts(self) -> int:
        return self.spec.moe.num_experts if self.spec.moe else 0

    @property
    def experts_per_token(self) -> int:
        return self.spec.moe.experts_per_token if self.spec.moe else 0

    @cached_property
    def _tensors(self) -> Counter[tuple[str, tuple[int, ...], Part]]:
        """By name within a layer, shape, and who meets it: how many of them there are."""
        counts: Counter[tuple[str, tuple[int, ...], Part]] = Counter()
        hidden = self.spec.hidden_size
        for layer, count in Counter(self.spec.layers).items():
            met_by_all = layer.around_shapes(hidden)
            if layer.attention is not None:
                met_by_all |= layer.attention.tensor_shapes(hidden)
            if layer.dense is not None:
                met_by_all |= layer.dense.tensor_shapes(hidden)
            if (moe := layer.moe) is not None:
                met_by_all |= moe.router_shapes(hidden)
                for name, shape in moe.expert.tensor_shapes(moe.expert_hidden(hidden)).items():
                    counts[f"expert {name}", shape, Part.EXPERT] += count * moe.num_experts
            for name, shape in met_by_all.items():
                counts[name.replace("shared.", "shared expert "), shape, Part.LAYER] += count
        if (own := self.spec.layer_input) is not None:
            for name, shape in own.shared_shapes(self.spec.vocab_size, hidden, self.num_layers).items():
                if name != "layer_embedding":  # which is looked up
                    counts[name, shape, Part.LAYER] += 1
        return counts

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        head = Matrix("head", self.spec.vocab_size, self.spec.hidden_size, 1, Part.HEAD)
        found = [(name, shape, count, part) for (name, shape, part), count in self._tensors.items() if len(shape) == 2]
        heads = (head,) if self.spec.has_output else ()
        return (*(Matrix(name, shape[0], shape[1], count, part) for name, shape, count, part in found), *heads)

    def _vectors_of(self, part: Part) -> int:
        """Norms and biases."""
        return sum(
            count * prod(shape) for (_, shape, met), count in self._tensors.items() if met is part and len(shape) == 1
        )

    @property
    def vector_parameters(self) -> int:
        """Norms and biases that every token meets."""
        spec = self.spec
        ends = spec.hidden_size * (spec.has_final_norm + spec.final_norm_bias) + spec.vocab_size * spec.head_bias
        return self._vectors_of(Part.LAYER) + ends

    @property
    def looked_up_parameters(self) -> int:
        """Of tables that a step gathers a row a token of."""
        spec = self.spec
        is_multiplied = spec.tied_embeddings and spec.has_output
        embedding = 0 if is_multiplied else spec.vocab_size * spec.hidden_size
        places = 0 if spec.places is None else sum(map(prod, spec.places.tensor_shapes(spec.hidden_size).values()))
        width = 0 if spec.layer_input is None else spec.layer_input.width
        return embedding + places + spec.vocab_size * spec.num_layers * width

    @property
    def num_parameters(self) -> int:
        vectors = self.vector_parameters + self._vectors_of(Part.EXPERT)
        return sum(matrix.parameters for matrix in self.matrices) + vectors + self.looked_up_parameters

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
            vectors = _bytes(self._vectors_of(Part.EXPERT), vector_bits)
            expert_bytes = _bytes(in_experts, expert_bits) + vectors
            experts = ExpertsShape(self.num_experts, self.experts_per_token, expert_bytes, in_experts)
            in_layers += in_experts // self.num_experts * self.experts_per_token
        groups, (num_heads, head_dim) = self.spec.kv_groups(), heads_of(self.spec)
        kv_bytes = [_bytes(len(group.layers) * group.values, kv_bits) for group in groups]
        return ModelShape(
            num_parameters=self.num_parameters,
            layer_matmul_parameters=in_layers,
            head_matmul_parameters=head,
            weight_bytes_per_step=per_step + _bytes(self.vector_parameters, vector_bits),
            num_heads=num_heads,
            head_dim=head_dim,
            kv_groups=kv_group_shapes(self.spec, kv_bytes),
            experts=experts,
            embedding_bytes=_bytes(self.looked_up_parameters, head_bits),
        )


def heads_of(spec: ModelSpec) -> tuple[int, int]:
    """Of the first layer with attention, how many heads and how wide their keys are; a model without any has one."""
    for layer in spec.layers:
        if isinstance(layer.attention, GroupedAttention):
            return layer.attention.num_heads, layer.attention.head_dim
        if isinstance(layer.attention, LatentAttention):
            return layer.attention.num_heads, layer.attention.key_dim
    return 1, 1


def kv_group_shapes(spec: ModelSpec, bytes_by_group: Sequence[int]) -> tuple[KVGroupShape, ...]:
    """Of each of `spec.kv_groups()`: `bytes_by_group` is what a token takes in all of its layers."""
    shapes = []
    for group, num_bytes in zip(spec.kv_groups(), bytes_by_group, strict=True):
        readers = [layer.attention for index, layer in enumerate(spec.layers) if spec.kv_source(index) in group.layers]
        shapes.append(_group_shape(group, readers, num_bytes))
    return tuple(shapes)


def _group_shape(group: LayerGroup, attentions: list[Attention | None], num_bytes: int) -> KVGroupShape:
    """A state is read and written by each token once: like a window of one, for its cost."""
    pairs, latents = 0, []
    for attention in attentions:
        if isinstance(attention, LatentAttention):
            latents.append(attention)
        elif isinstance(attention, Recurrent):
            pairs += 2 * attention.state_values
        elif attention is not None:
            pairs += 2 * attention.query_width
    latent = None
    if latents:
        expansion = sum(one.expanded_width * one.rank for one in latents)
        expanded = sum(one.num_heads * (one.key_dim + one.value_dim) for one in latents)
        absorbed = sum(one.num_heads * (2 * one.rank + one.rotated_dim) for one in latents)
        latent = LatentWork(expanded, absorbed, expansion)
    window = 1 if group.content == "state" else group.window
    own, further = len(group.layers), len(attentions) - len(group.layers)
    return KVGroupShape(own, window, num_bytes, group.content, pairs, latent, num_sharing=further)


def _bytes(count: int, bits: float) -> int:
    return ceil(count * bits / 8)
