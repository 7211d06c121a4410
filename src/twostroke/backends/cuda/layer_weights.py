"""What each layer of a model holds on the device: its matrices, norms and the like, as the forward pass reads them. How
their places are filled is the loader's to know (`weights.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from twostroke.backends.cuda.kernels.embedding import Places
from twostroke.backends.cuda.latent import LatentWeights
from twostroke.backends.cuda.layer_inputs import InputWeights, JoinWeights
from twostroke.backends.cuda.layer_matrices import inputs_of, layer_matrices
from twostroke.backends.cuda.matrix import Matrix
from twostroke.backends.cuda.moe import ExpertNorms, LatentPair, MoeWeights, SharedWeights
from twostroke.backends.cuda.recurrent_rules import RecurrentWeights
from twostroke.models.spec import GroupedAttention, LatentAttention, ModelSpec, MoeSpec, Recurrent, layer_name

if TYPE_CHECKING:
    from twostroke.backends.cuda.weights import WeightLoader


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeights:
    gate_up: Matrix  # [2 * intermediate, hidden]: gate, then up; or [intermediate, hidden], where there is no gate
    down: Matrix  # [hidden, intermediate]

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.gate_up, self.down


@dataclass(frozen=True, slots=True, eq=False)
class MixWeights:
    """Of what stands before the MLP."""

    qkv: Matrix  # [(heads + 2 * kv_heads) * head_dim, hidden]: q, then k, then v; or what a layer has in their place
    o: Matrix
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # float32 [heads]
    latent: LatentWeights | None = None
    """Of latent attention; `qkv` is then of queries, or of their low rank, and of what is kept."""
    recurrent: RecurrentWeights | None = None
    """Of a layer that keeps a state; `qkv` is then all that a token is projected to, and `o` what it leaves by."""

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.o, *(() if self.latent is None else self.latent.matrices)


@dataclass(frozen=True, slots=True, eq=False)
class AfterNorm:
    """Of what a block and the residual stream are together."""

    weight: torch.Tensor  # [hidden] each
    bias: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Matrices are [outputs, inputs]; what a family lacks is None."""

    mix: MixWeights | None
    mlp: DenseWeights | MoeWeights | None
    attention_norm: torch.Tensor | None = None
    post_attention_norm: torch.Tensor | None = None
    mlp_norm: torch.Tensor | None = None
    post_mlp_norm: torch.Tensor | None = None
    after_attention: AfterNorm | None = None
    after_mlp: AfterNorm | None = None
    """Of an encoder, whose blocks read the stream as it is."""
    input: JoinWeights | None = None
    scale: torch.Tensor | None = None  # float32 [1]

    @property
    def first_norm(self) -> torch.Tensor | None:
        """By which the layer reads the residual stream that the one before leaves."""
        return self.mlp_norm if self.mix is None else self.attention_norm

    @property
    def first_matrix(self) -> Matrix:
        if self.mix is not None:
            return self.mix.qkv
        assert self.mlp is not None
        return self.mlp.gate_up

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        blocks = (self.mix, self.mlp, self.input)
        return tuple(matrix for block in blocks if block is not None for matrix in block.matrices)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's tensors, as they are placed."""

    loader: WeightLoader
    spec: ModelSpec
    index: int

    def place(self, name: str) -> torch.Tensor:
        return self.loader.place((layer_name(self.index, name),))

    def given(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """None: the model has none of it."""
        full_name = layer_name(self.index, name)
        is_there = full_name in self.loader.checkpoint.tensors
        return self.loader.place((full_name,), dtype=dtype) if is_there else None

    def matrices(self) -> dict[str, Matrix]:
        found, loader = {}, self.loader
        for matrix in layer_matrices(self.spec, self.index):
            bias = loader.place(matrix.biases, matrix.product.shape[:-1]) if matrix.biases else None
            in_float8 = matrix.name in loader.held.in_float8
            found[matrix.kind] = Matrix(matrix.name, matrix.product, loader.forms(matrix), bias, in_float8)
        return found


def layer_weights(loader: WeightLoader, spec: ModelSpec, index: int) -> LayerWeights:
    own, layer = spec.layers[index], _Layer(loader, spec, index)
    matrices = layer.matrices()
    mlp: DenseWeights | MoeWeights | None = None
    if isinstance(own.mlp, MoeSpec):
        mlp = _experts(own.mlp, layer, matrices)
    elif own.mlp is not None:
        mlp = DenseWeights(matrices["gate_up"], matrices["down"])

    def norm(name: str) -> torch.Tensor | None:
        return None if own.norms_after else layer.given(name)

    def after(block: str) -> AfterNorm | None:
        names = (f"{block}_norm", f"{block}_norm_bias")
        return AfterNorm(*map(layer.place, names)) if own.norms_after else None

    joins = None
    if own.layer_input is not None:
        joins = JoinWeights(matrices["input_gate"], matrices["input_join"], layer.place("post_input_norm"))
    return LayerWeights(
        mix=None if own.attention is None else _mix(layer, matrices),
        mlp=mlp,
        attention_norm=norm("attention_norm"),
        post_attention_norm=norm("post_attention_norm"),
        mlp_norm=norm("mlp_norm"),
        post_mlp_norm=norm("post_mlp_norm"),
        after_attention=after("attention"),
        after_mlp=after("mlp"),
        input=joins,
        scale=layer.given("layer_scale", torch.float32),
    )


def _mix(layer: _Layer, matrices: dict[str, Matrix]) -> MixWeights:
    attention, latent, recurrent = layer.spec.layers[layer.index].attention, None, None
    if isinstance(attention, LatentAttention):
        latent = LatentWeights(
            layer.place("kv_a_norm"), matrices["expand"], layer.given("q_a_norm"), matrices.get("q_b")
        )
    if isinstance(attention, Recurrent):
        names = ("conv_bias", "dt_bias", "decay", "skip", "gated_norm")
        conv, others = layer.given("conv", torch.float32), {name: layer.given(name, torch.float32) for name in names}
        assert conv is not None
        recurrent = RecurrentWeights(conv, **others)
    is_grouped = isinstance(attention, GroupedAttention)
    return MixWeights(
        matrices["qkv"],
        matrices["o"],
        q_norm=layer.given("q_norm") if is_grouped else None,
        k_norm=layer.given("k_norm") if is_grouped else None,
        sinks=layer.given("sinks", torch.float32),
        latent=latent,
        recurrent=recurrent,
    )


def _experts(moe: MoeSpec, layer: _Layer, matrices: dict[str, Matrix]) -> MoeWeights:
    shared, norms, latent = None, None, None
    if moe.shared is not None:
        shared = SharedWeights(matrices["shared_gate_up"], matrices["shared_down"], layer.given("shared.router"))
    if moe.has_own_norms:
        names = ("router_norm", "experts_norm", "post_experts_norm", "post_shared_norm")
        norms = ExpertNorms(*(layer.place(name) for name in names))
    if moe.latent_size is not None:
        latent = LatentPair(matrices["latent_down"], matrices["latent_up"])
    of_router = ("router_bias", "router_correction", "expert_scale")
    bias, correction, scales = (layer.given(name, torch.float32) for name in of_router)
    router, gate_up, down = layer.place("router"), matrices["gate_up"], matrices["down"]
    return MoeWeights(router, gate_up, down, bias, correction, shared, norms, scales, latent)


def place_weights(loader: WeightLoader, spec: ModelSpec) -> Places | None:
    """Of a model that looks positions up."""
    if spec.places is None:
        return None
    names = ("position_embedding", "text_embedding", "embedding_norm", "embedding_norm_bias")
    return Places(*(loader.place((name,)) for name in names))


def input_weights(loader: WeightLoader, spec: ModelSpec) -> InputWeights | None:
    """What makes all layers' own inputs."""
    made = [Matrix(one.name, one.product, loader.forms(one)) for one in inputs_of(spec)]
    if not made:
        return None
    return InputWeights(loader.place(("layer_embedding",)), made[0], loader.place(("layer_projection_norm",)))
