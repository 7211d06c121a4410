"""ModelSpec: what a model declares about itself, layer by layer. Read by every backend, the planner and the simulator.
Knows no file format and no arithmetic: the standard library is all it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Literal

from twostroke.core.kv_layout import KVContent
from twostroke.models.attention_spec import KV_TENSORS as KV_TENSORS
from twostroke.models.attention_spec import GroupedAttention as GroupedAttention
from twostroke.models.attention_spec import LatentAttention as LatentAttention
from twostroke.models.attention_spec import QueryGrowth as QueryGrowth
from twostroke.models.attention_spec import WideNorms as WideNorms
from twostroke.models.layer_input_spec import LayerInput as LayerInput
from twostroke.models.mlp_spec import PLAIN_ROUTING as PLAIN_ROUTING
from twostroke.models.mlp_spec import Activation as Activation
from twostroke.models.mlp_spec import Alone as Alone
from twostroke.models.mlp_spec import ClampedGate as ClampedGate
from twostroke.models.mlp_spec import DenseMlp as DenseMlp
from twostroke.models.mlp_spec import Mlp as Mlp
from twostroke.models.mlp_spec import MoeSpec as MoeSpec
from twostroke.models.mlp_spec import Routing as Routing
from twostroke.models.mlp_spec import Shapes as Shapes
from twostroke.models.mlp_spec import expert_name as expert_name
from twostroke.models.recurrent_spec import GatedDeltaNet as GatedDeltaNet
from twostroke.models.recurrent_spec import Mamba2 as Mamba2
from twostroke.models.recurrent_spec import NormPart as NormPart
from twostroke.models.recurrent_spec import Recurrent as Recurrent
from twostroke.models.recurrent_spec import ShortConvolution as ShortConvolution
from twostroke.models.rope_spec import LongRopeScaling, RopeSpec

Attention = GroupedAttention | LatentAttention | Recurrent


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer is: how its tokens meet each other, and what each then goes through alone. Nemotron-H has layers
    of either alone."""

    attention: Attention | None
    mlp: Mlp | None
    sandwich_norms: bool = False
    """Gemma: each block's output is normed too, before it joins the residual."""
    is_parallel: bool = False
    """Phi: both blocks read the same norm, and there is one of them."""
    norm_bias: bool = False
    """LayerNorm, with a bias, in place of RMSNorm."""
    input_norms: bool = True
    """False: OLMo 2's blocks read the residual stream as it is, and their outputs alone are normed."""
    layer_input: LayerInput | None = None
    has_scale: bool = False
    """Gemma 4: what the layer gives is multiplied by a learnt number."""
    norms_after: bool = False
    """BERT: each block's sum with the residual is normed, and nothing before it."""

    @property
    def grouped(self) -> GroupedAttention:
        """For backends that decline models with layers of other kinds (`models.features.uncomputed`)."""
        if not isinstance(self.attention, GroupedAttention):
            raise TypeError(f"this layer has a {type(self.attention).__name__}, and grouped attention is asked for")
        return self.attention

    @property
    def present_mlp(self) -> Mlp:
        """For backends that decline models with layers that have none."""
        if self.mlp is None:
            raise TypeError("this layer has no MLP, and one is asked for")
        return self.mlp

    @property
    def dense(self) -> DenseMlp | None:
        return self.mlp if isinstance(self.mlp, DenseMlp) else None

    @property
    def moe(self) -> MoeSpec | None:
        return self.mlp if isinstance(self.mlp, MoeSpec) else None

    @property
    def window(self) -> int | None:
        return self.attention.window if isinstance(self.attention, GroupedAttention) else None

    def norm_shapes(self, hidden: int) -> Shapes:
        names = [] if self.attention is None else ["attention_norm"]
        names += [] if self.is_parallel or self.mlp is None else ["mlp_norm"]
        names = names if self.input_norms else []
        names += ["post_attention_norm", "post_mlp_norm"] if self.sandwich_norms else []
        names += [f"{name}_bias" for name in names] if self.norm_bias else []
        return dict.fromkeys(names, (hidden,))

    def around_shapes(self, hidden: int) -> Shapes:
        """Of all but attention and the MLP."""
        shapes = self.norm_shapes(hidden)
        if self.layer_input is not None:
            shapes |= self.layer_input.tensor_shapes(hidden)
        return shapes | {"layer_scale": (1,)} if self.has_scale else shapes

    def tensor_shapes(self, hidden: int) -> Shapes:
        blocks = (block.tensor_shapes(hidden) for block in (self.attention, self.mlp) if block is not None)
        return reduce(or_, blocks, self.around_shapes(hidden))


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that leave the same behind for later tokens: a KV group of the model."""

    content: KVContent
    window: int | None
    values: int
    """Numbers in one layer, of a token or, of a state, of a whole sequence."""
    layers: tuple[int, ...] = ()


StepActivation = Literal["identity", "tanh", "gelu", "relu", "sigmoid"]
"""Of what a pooled vector goes through (`models/pooling.py`)."""


@dataclass(frozen=True, slots=True)
class LearntPlaces:
    """BERT: beside a token's own embedding, one of its position and one of its text, the first or the second of two.
    Their sum is normed."""

    num_positions: int
    first_position: int = 0
    """RoBERTa: the row of the first token's."""
    num_texts: int = 2

    @property
    def max_context(self) -> int:
        return self.num_positions - self.first_position

    def tensor_shapes(self, hidden: int) -> Shapes:
        shapes: Shapes = {
            "position_embedding": (self.num_positions, hidden),
            "text_embedding": (self.num_texts, hidden),
        }
        return shapes | {"embedding_norm": (hidden,), "embedding_norm_bias": (hidden,)}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str
    vocab_size: int
    hidden_size: int
    max_context: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    logits_softcap: float | None = None
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    final_norm_scale: float = 1.0
    """What the last norm's weight is multiplied by as it is loaded: backends find it done."""
    final_norm_bias: bool = False
    head_bias: bool = False
    head_rows: int | None = None
    """Of a rank that holds a part of the output matrix (`models/shard.py`): its rows; None: one for every token."""
    has_output: bool = True
    """Else it scores no tokens: its last states are pooled into a vector (`models/pooling.py`)."""
    has_final_norm: bool = True
    places: LearntPlaces | None = None
    """None: positions are rotated."""

    @property
    def num_logits(self) -> int:
        """That a row of the last layer has here."""
        return self.vocab_size if self.head_rows is None else self.head_rows

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_causal(self) -> bool:
        return all(layer.attention.is_causal for layer in self.layers if isinstance(layer.attention, GroupedAttention))

    @property
    def common_layer(self) -> LayerSpec | None:
        """One layer that stands for all of them: its window and rope are the first one's. None: layers differ in more
        than that."""
        first = self.layers[0]
        alike = {replace(layer, attention=_without_place(layer.attention)) for layer in self.layers}
        return first if len(alike) == 1 else None

    @property
    def moe(self) -> MoeSpec | None:
        """The experts of the first layer that has any."""
        return next((layer.moe for layer in self.layers if layer.moe is not None), None)

    @property
    def dense_width(self) -> int:
        """Of the widest MLP that is no expert; 0: there is none."""
        return max((layer.dense.intermediate_size for layer in self.layers if layer.dense is not None), default=0)

    @property
    def short_rope_context(self) -> int | None:
        """The longest context that is read with short rope factors, where a longer one takes others; None: all contexts
        are read alike."""
        attentions = [layer.attention for layer in self.layers]
        scalings = [one.rope.scaling for one in attentions if isinstance(one, GroupedAttention)]
        originals = [scaling.original_max_context for scaling in scalings if isinstance(scaling, LongRopeScaling)]
        return min(originals) if originals and min(originals) < self.max_context else None

    @property
    def layer_input(self) -> LayerInput | None:
        """That every layer has, if one has."""
        return self.layers[0].layer_input

    def kv_source(self, index: int) -> int:
        """The layer whose KV a layer reads: its own, but for those that share another's."""
        attention = self.layers[index].attention
        shared = attention.shares_kv_of if isinstance(attention, GroupedAttention) else None
        return index if shared is None else shared

    def kv_groups(self) -> tuple[LayerGroup, ...]:
        """The layers by what they leave behind and how long it is read: full attention first, states last."""
        found: dict[LayerGroup, list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.attention is not None and self.kv_source(index) == index:
                found.setdefault(_group_of(layer.attention), []).append(index)
        ordered = sorted(found, key=lambda one: (one.content == "state", one.window or 0, one.content, one.values))
        return tuple(replace(group, layers=tuple(found[group])) for group in ordered)

    def tensor_shapes(self) -> Shapes:
        """Every tensor the model has, by canonical name, rows (outputs) first: what a loader must provide."""
        shapes: Shapes = {"embedding": (self.vocab_size, self.hidden_size)}
        if self.has_final_norm:
            shapes["final_norm"] = (self.hidden_size,)
        if self.places is not None:
            shapes |= self.places.tensor_shapes(self.hidden_size)
        if self.has_output and not self.tied_embeddings:
            shapes["output"] = (self.num_logits, self.hidden_size)
        if self.final_norm_bias:
            shapes["final_norm_bias"] = (self.hidden_size,)
        if self.head_bias:
            shapes["output_bias"] = (self.vocab_size,)
        if self.layer_input is not None:
            shapes |= self.layer_input.shared_shapes(self.vocab_size, self.hidden_size, self.num_layers)
        for index, layer in enumerate(self.layers):
            own = layer.tensor_shapes(self.hidden_size)
            shapes.update({layer_name(index, name): shape for name, shape in own.items()})
        return shapes


def _without_place(attention: Attention | None) -> Attention | None:
    if not isinstance(attention, GroupedAttention):
        return attention
    return replace(attention, window=None, rope=RopeSpec(1.0, attention.rope.dim))


def _group_of(attention: Attention) -> LayerGroup:
    if isinstance(attention, Recurrent):
        return LayerGroup("state", None, attention.state_values)
    if isinstance(attention, LatentAttention):
        return LayerGroup("latent", None, attention.kv_values)
    return LayerGroup("keys and values", attention.window, attention.kv_values)


def layer_name(index: int, name: str) -> str:
    return f"layers.{index}.{name}"
