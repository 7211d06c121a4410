"""What a family declares: how its files' settings become a ModelSpec, and how their tensors become canonical ones.
A stored tensor lists the canonical names it holds, in row order: one for a plain tensor, several for a fused one.
Declarations alone, in the standard library: the planner reads them, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from twostroke.core.errors import ModelError
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec, StepActivation, expert_name


class StoredTensor(Protocol):
    """What a declaration may ask of a file's tensor: some say by their shapes or numbers what settings do not."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def to_float32(self) -> Iterable[float]: ...


class Adjustment(Enum):
    """What a format stored differently from what the model multiplies by, and how it is put right."""

    ADD_ONE = "Gemma's checkpoints store a norm's weight less one"
    MINUS_EXPONENTIAL = "folders store the logarithm of what a state decays by, without its sign"
    FINAL_NORM_SCALE = "Granite divides its logits by a number"
    HALVES_FROM_PAIRS = "GGUF's llama files, and ERNIE's, order each head's q and k rows for a rotation of neighbours"


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The tensors of one file format. Names in `layer` follow `layer_prefix` with the layer's index filled in."""

    layer_prefix: str
    whole: Mapping[str, tuple[str, ...]]
    layer: Mapping[str, tuple[str, ...]]
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors of one expert of a layer: `{}` is its index, and the canonical names are those of one expert."""
    stacked_experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors with an axis more, in front, that counts a layer's experts."""
    alternating: frozenset[str] = frozenset()
    """Names within a layer, of tensors whose rows go to their targets in turn."""
    by_head: frozenset[str] = frozenset()
    """Names within a layer, of tensors that hold what one head has of each target, head after head (`row_heads` of
    attention says how many)."""
    inputs_first: frozenset[str] = frozenset()
    """Names within a layer, of stacks that hold inputs before outputs where they are floats. One that has the shape of
    the other way, and could not be both, is taken to be so."""
    mlp_is_shared: bool = False
    """Gemma 4: in a model with experts, what is a layer's MLP by name is the one beside them."""
    otherwise: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names within a layer, and what they are in layers that have nothing of what `layer` says."""
    flattened: frozenset[str] = frozenset()
    """Names within a layer, of vectors that files may give more axes than one."""
    latent_stacks: tuple[str, str, str] | None = None
    """Names within a layer: stacks of what keys and what values of latent attention are made with, and of the matrix
    that they are together."""
    adjust: Mapping[str, Adjustment] = field(default_factory=dict)
    """By canonical name, without `layers.N.`."""
    ignored_prefixes: tuple[str, ...] = ()
    ignored_suffixes: tuple[str, ...] = ()
    """Tensors that a file may hold and the model does not need."""
    ignores_further_layers: bool = False
    """Behind the model's own there may be layers that draft."""
    renamed_prefixes: Mapping[str, str] = field(default_factory=dict)

    def is_ignored(self, name: str) -> bool:
        return name.startswith(self.ignored_prefixes) or name.endswith(self.ignored_suffixes)

    def plain(self, name: str) -> str:
        """The name without what a larger model put around it."""
        for prefix, replacement in self.renamed_prefixes.items():
            if name.startswith(prefix):
                return replacement + name[len(prefix) :]
        return name

    def in_layer(self, num_experts: int) -> dict[str, tuple[str, ...]]:
        """`layer`, and every expert's tensors by their full names within a layer."""
        names = dict(self.layer)
        if self.mlp_is_shared and num_experts:
            names |= {stored: (f"shared.{own}",) for stored, (own, *_) in names.items() if own in _MLP}
        for expert in range(num_experts):
            for stored, targets in self.experts.items():
                names[stored.format(expert)] = _of_experts(range(expert, expert + 1), targets)
        for stored, targets in self.stacked_experts.items():
            names[stored] = _of_experts(range(num_experts), targets)
        return names


_MLP = ("gate", "up", "down")


def _of_experts(experts: range, targets: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(expert_name(expert, target) for expert in experts for target in targets)


_LAYER: tuple[tuple[str, str, str], ...] = (
    # canonical, in a folder, in a GGUF file
    ("attention_norm", "input_layernorm.weight", "attn_norm.weight"),
    ("q", "self_attn.q_proj.weight", "attn_q.weight"),
    ("k", "self_attn.k_proj.weight", "attn_k.weight"),
    ("v", "self_attn.v_proj.weight", "attn_v.weight"),
    ("o", "self_attn.o_proj.weight", "attn_output.weight"),
    ("q_bias", "self_attn.q_proj.bias", "attn_q.bias"),
    ("k_bias", "self_attn.k_proj.bias", "attn_k.bias"),
    ("v_bias", "self_attn.v_proj.bias", "attn_v.bias"),
    ("o_bias", "self_attn.o_proj.bias", "attn_output.bias"),
    ("q_norm", "self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("k_norm", "self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("mlp_norm", "post_attention_layernorm.weight", "ffn_norm.weight"),
    ("gate", "mlp.gate_proj.weight", "ffn_gate.weight"),
    ("up", "mlp.up_proj.weight", "ffn_up.weight"),
    ("down", "mlp.down_proj.weight", "ffn_down.weight"),
)
_WHOLE: tuple[tuple[str, str, str], ...] = (
    ("embedding", "model.embed_tokens.weight", "token_embd.weight"),
    ("final_norm", "model.norm.weight", "output_norm.weight"),
    ("output", "lm_head.weight", "output.weight"),
)
HF_LAYER: dict[str, tuple[str, ...]] = {stored: (canonical,) for canonical, stored, _ in _LAYER}
GGUF_LAYER: dict[str, tuple[str, ...]] = {
    **{stored: (canonical,) for canonical, _, stored in _LAYER},
    # Of Gemma's files: folders of the family that have these norms name them by themselves.
    "post_attention_norm.weight": ("post_attention_norm",),
    "post_ffw_norm.weight": ("post_mlp_norm",),
}

HF_NAMES = TensorNames(
    layer_prefix="model.layers.{}.",
    whole={stored: (canonical,) for canonical, stored, _ in _WHOLE},
    layer=HF_LAYER,
    # Old checkpoints carry the rotary table, which is computed here.
    ignored_suffixes=(".rotary_emb.inv_freq",),
)

GGUF_NAMES = TensorNames(
    layer_prefix="blk.{}.",
    whole={stored: (canonical,) for canonical, _, stored in _WHOLE},
    layer=GGUF_LAYER,
    # Rotary divisors become part of the spec (see `rope.py`), and are no weights.
    ignored_prefixes=("rope_freqs.", "rope_factors_long.", "rope_factors_short."),
    ignored_suffixes=(".attn_rot_embd.weight",),
)


def _no_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    raise ModelError(f"{fields.source}: GGUF files of this family are not read")


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    """As `model_type` has it in a config.json, less a "_text" at its end."""
    hf_architectures: tuple[str, ...]
    """What `architectures` says in a config.json."""
    gguf_architectures: tuple[str, ...]
    """What `general.architecture` says in a GGUF file; empty when another family's files hold this one's models."""
    spec_from_config: Callable[[Fields], ModelSpec]
    spec_from_gguf: Callable[[Fields, Mapping[str, StoredTensor]], ModelSpec] = _no_gguf
    hf_names: TensorNames = HF_NAMES
    gguf_names: TensorNames = GGUF_NAMES
    not_run: str | None = None
    """Why this engine cannot run it, in a sentence: such a family can be planned and simulated alone."""
    classifiers: Mapping[str, tuple[tuple[str, StepActivation], ...]] = field(default_factory=dict)
    """Of architectures that score pairs of texts: the names of the matrices that the first token's state goes through,
    less `.weight` and `.bias`, and what follows each."""
