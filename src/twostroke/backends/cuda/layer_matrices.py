"""The matrices of a model: which tensors each is made of, and whose product it is. Knows shapes alone, no torch: a plan
asks here, too. How they are held is `model_matrices.py`'s to know."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from twostroke.backends.cuda.kernels.packed_format import packed_bytes
from twostroke.backends.cuda.kernels.product import Product, Role
from twostroke.backends.cuda.state_shape import first_tensors, first_width, mixed_width
from twostroke.models.spec import (
    Activation,
    Alone,
    DenseMlp,
    GroupedAttention,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    Recurrent,
    expert_name,
    layer_name,
)


@dataclass(frozen=True, slots=True)
class ModelMatrix:
    kind: str  # which of its layer's it is, or `head`
    name: str
    product: Product
    tensors: tuple[str, ...]  # joined by rows
    biases: tuple[str, ...] = ()

    @property
    def packed_bytes(self) -> int:
        *experts, rows, depth = self.product.shape
        return prod(experts) * packed_bytes(rows, depth)


def head_of(spec: ModelSpec) -> ModelMatrix:
    tensor = "embedding" if spec.tied_embeddings else "output"
    return ModelMatrix("head", "head", Product("head", spec.num_logits, spec.hidden_size), (tensor,))


def layer_matrices(spec: ModelSpec, index: int) -> list[ModelMatrix]:
    def matrix(kind: str, product: Product, tensors: Iterable[str], biases: Iterable[str] = ()) -> ModelMatrix:
        return _matrix(index, kind, product, tensors, biases)

    layer, hidden = spec.layers[index], spec.hidden_size
    joins: Role = "sandwich" if layer.sandwich_norms else "join"
    found = _mixing_matrices(layer, index, hidden, joins)
    if (own := layer.layer_input) is not None:
        found.append(matrix("input_gate", Product("plain", own.width, hidden), ("input_gate",)))
        found.append(matrix("input_join", Product("sandwich", hidden, own.width), ("input_projection",)))
    if isinstance(mlp := layer.mlp, DenseMlp):
        found += _mlp_matrices(index, mlp, range(0), hidden, joins)
    elif mlp is not None:
        found += _mlp_matrices(index, mlp.expert, mlp.held_experts, mlp.expert_hidden(hidden), joins)
    if isinstance(mlp, MoeSpec) and mlp.latent_size is not None:
        found.append(matrix("latent_down", Product("plain", mlp.latent_size, hidden), ("latent_down",)))
        found.append(matrix("latent_up", Product(joins, hidden, mlp.latent_size), ("latent_up",)))
    if isinstance(mlp, MoeSpec) and mlp.shared is not None:
        joins = "plain" if mlp.has_own_norms else joins
        found += _mlp_matrices(index, mlp.shared, range(0), hidden, joins, "shared.")
    return found


def _mlp_matrices(
    index: int, one: DenseMlp, experts: range, hidden: int, joins: Role, prefix: str = ""
) -> list[ModelMatrix]:
    """Of one MLP, or of these experts."""
    names = [expert_name(expert, "") for expert in experts] or [prefix]
    parts: tuple[str, ...] = ("gate", "up") if one.is_gated else ("up",)
    gates, downs = [f"{name}{part}" for name in names for part in parts], [f"{name}down" for name in names]
    width, has_bias = one.intermediate_size, one.has_bias
    role: Role = "gated" if one.is_gated else "activated"
    inner = Product(role, width, hidden, has_bias, len(experts), is_clamped=one.clamp is not None)
    outer = Product(joins, hidden, width, has_bias, len(experts))
    kind, found = prefix.replace(".", "_"), []
    for name, product, tensors in (("gate_up", inner, gates), ("down", outer, downs)):
        biases = (f"{tensor}_bias" for tensor in tensors) if has_bias else ()
        found.append(_matrix(index, f"{kind}{name}", product, tensors, biases))
    return found


def _matrix(index: int, kind: str, product: Product, tensors: Iterable[str], biases: Iterable[str] = ()) -> ModelMatrix:
    names = (tuple(layer_name(index, name) for name in group) for group in (tensors, biases))
    return ModelMatrix(kind, layer_name(index, kind), product, *names)


def _mixing_matrices(layer: LayerSpec, index: int, hidden: int, joins: Role) -> list[ModelMatrix]:
    """Of what stands before the MLP: `qkv` reads the residual stream, `o` brings back to it what was found."""
    attention = layer.attention
    if attention is None:
        return []
    if isinstance(attention, LatentAttention):
        queries = attention.query_width if attention.query_rank is None else attention.query_rank
        first = ("q" if attention.query_rank is None else "q_a", "kv_a")
        found = [_matrix(index, "qkv", Product("plain", queries + attention.kv_values, hidden), first)]
        if attention.query_rank is not None:
            expand = Product("plain", attention.query_width, attention.query_rank)
            found.append(_matrix(index, "q_b", expand, ("q_b",)))
        found.append(_matrix(index, "expand", Product("plain", attention.expanded_width, attention.rank), ("kv_b",)))
        found.append(_matrix(index, "o", Product(joins, hidden, attention.num_heads * attention.value_dim), ("o",)))
        return found
    if isinstance(attention, Recurrent):
        first_product = Product("plain", first_width(attention), hidden)
        return [
            _matrix(index, "qkv", first_product, first_tensors(attention)),
            _matrix(index, "o", Product(joins, hidden, mixed_width(attention)), ("o",)),
        ]
    attention = layer.grouped
    made = attention.made
    gates = attention.query_width if attention.output_gate else 0
    outputs = attention.query_width + (len(made) - 1) * attention.kv_width + gates
    qkv = Product("plain", outputs, hidden, has_bias=attention.qkv_bias)
    output = Product(joins, hidden, attention.query_width, has_bias=attention.output_bias)
    names = (*made, "q_gate") if gates else made
    return [
        _matrix(index, "qkv", qkv, names, (f"{name}_bias" for name in made) if attention.qkv_bias else ()),
        _matrix(index, "o", output, ("o",), ("o_bias",) if attention.output_bias else ()),
    ]


def attention_of(spec: ModelSpec) -> GroupedAttention | LatentAttention:
    """Of the first layer that attends: for all that do, since a checkpoint where they differ was declined."""
    attentions = (layer.attention for layer in spec.layers)
    return next(one for one in attentions if isinstance(one, GroupedAttention | LatentAttention))


def activation_in(spec: ModelSpec) -> Activation:
    """Of all MLPs."""
    return next(layer.mlp.activation for layer in spec.layers if layer.mlp is not None)


def alone_in(spec: ModelSpec) -> Alone | None:
    """Of all MLPs that every token meets and that have no gate."""
    found = (layer.dense if layer.moe is None else layer.moe.shared for layer in spec.layers)
    return next((mlp.alone for mlp in found if mlp is not None and not mlp.is_gated), None)


def widest_mlp(spec: ModelSpec) -> int:
    """Of those that every token meets; 0: there is none."""
    shared = (layer.moe.shared for layer in spec.layers if layer.moe is not None)
    return max([spec.dense_width, *(mlp.intermediate_size for mlp in shared if mlp is not None)])


def inputs_of(spec: ModelSpec) -> list[ModelMatrix]:
    """What makes all layers' own inputs of embeddings, where they have any."""
    if (own := spec.layer_input) is None:
        return []
    name = "layer_projection"
    return [ModelMatrix("inputs", name, Product("plain", spec.num_layers * own.width, spec.hidden_size), (name,))]


def matrices_of(spec: ModelSpec) -> list[ModelMatrix]:
    of_layers = (matrix for index in range(spec.num_layers) for matrix in layer_matrices(spec, index))
    return [*inputs_of(spec), *of_layers, *([head_of(spec)] if spec.has_output else [])]


def products_of(spec: ModelSpec) -> list[Product]:
    """Those that a table chooses a kernel for."""
    return list(dict.fromkeys(matrix.product for matrix in matrices_of(spec)))
