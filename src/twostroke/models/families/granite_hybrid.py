"""Granite 4, hybrid and dense: Mamba-2 in most layers, attention that knows no positions in the others, an MLP that
every token meets beside experts or in their place, and the multipliers of Granite 3 (`granite.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder, experts, granite, hybrid
from twostroke.models.families.declaration import GGUF_NAMES, HF_LAYER, HF_NAMES, Adjustment, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.rope_spec import NO_ROPE
from twostroke.models.spec import DenseMlp, Mamba2, ModelSpec

_KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}
_HANDLED = (*experts.HANDLED, "mamba_d_state")


def _from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"mamba_proj_bias": (False,), "position_embedding_type": ("rope", "nope")})
    spec = decoder.spec_from_config(config, "granitemoehybrid", handled=_HANDLED)
    shared = DenseMlp(config.integer("shared_intermediate_size", 1, experts.MAX_INTERMEDIATE, 1024))
    if spec.moe is None:
        spec = decoder.with_mlps(spec, [shared] * spec.num_layers)
    own_eps = spec.norm_eps
    spec = granite.scaled(experts.with_experts(spec, shared=shared), config)
    if config.get("position_embedding_type") != "rope":
        spec = decoder.with_attention(spec, rope=NO_ROPE)
    name = config.present("layer_types", "layers_block_type")
    if config.get(name) is None:
        keeps_state = (True,) * spec.num_layers
    else:
        keeps_state = hybrid.kept_states(config, name, _KINDS, spec.num_layers)
    mixer = replace(_mamba(config, spec.hidden_size), norm_eps=own_eps)
    return hybrid.with_states(spec, mixer, keeps_state)


def _mamba(config: Fields, hidden_size: int) -> Mamba2:
    width = config.integer("mamba_expand", 1, 64, 2) * hidden_size
    heads = config.integer("mamba_n_heads", 1, hybrid.MAX_HEADS, 128)
    if config.get("mamba_d_head") == "auto":
        config = config.without("mamba_d_head")
    head_dim = config.integer("mamba_d_head", 1, hybrid.MAX_HEAD, max(1, width // heads))
    if heads * head_dim != width:
        raise config.error("mamba_n_heads", f"is {heads}, which is no width of {width} with heads of {head_dim}")
    shortest, longest = hybrid.step_limits(config)
    return Mamba2(
        heads,
        head_dim,
        config.integer("mamba_d_state", 1, hybrid.MAX_HEAD, 256),
        hybrid.groups_of(config, "mamba_n_groups", heads, 1),
        config.integer("mamba_d_conv", 1, hybrid.MAX_TAPS, 4),
        conv_bias=config.flag("mamba_conv_bias", default=True),
        shortest_step=shortest,
        longest_step=longest,
    )


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    num_layers = fields.integer("block_count", 1, decoder.MAX_LAYERS)
    fields, keeps_state = hybrid.states_of_gguf(fields, num_layers)
    handled = (*granite.GGUF_KEYS.values(), "expert_count")
    spec = decoder.spec_from_gguf(fields, tensors, "granitemoehybrid", handled=handled)
    own_eps = spec.norm_eps
    if experts.has_experts(fields):
        spec = decoder.with_gguf_experts(spec, fields, tensors, handled=("expert_shared_feed_forward_length",))
    elif (up := tensors.get("blk.0.ffn_up.weight")) is not None:  # its width is not always what a key says
        spec = decoder.with_mlps(spec, [DenseMlp(up.shape[0])] * num_layers)
    spec = granite.scaled(spec, replace(fields, names=granite.GGUF_KEYS))
    if not fields.flag("rope.scaling.finetuned", default=True):  # llama.cpp's switch for this architecture's rotation
        spec = decoder.with_attention(spec, rope=NO_ROPE)
    fields.refuse_unless({"ssm.group_count": (1,)})  # with more, llama.cpp norms by groups, and Granite does not
    mixer = replace(hybrid.mamba_from_gguf(fields, tensors), norm_eps=own_eps)
    return hybrid.with_states(spec, mixer, keeps_state)


_STACKS = {"input_linear.weight": ("gate", "up"), "output_linear.weight": ("down",)}
HF_NAMES_OF_EXPERTS = replace(
    HF_NAMES,
    layer={
        **HF_LAYER,
        "block_sparse_moe.router.layer.weight": ("router",),
        **{f"shared_mlp.{stored}": tuple(f"shared.{name}" for name in names) for stored, names in _STACKS.items()},
    },
    experts=experts.each_by_itself("block_sparse_moe.experts"),
    stacked_experts={f"block_sparse_moe.{stored}": names for stored, names in _STACKS.items()},
)
_HF_NAMES = replace(
    HF_NAMES_OF_EXPERTS,
    layer={**HF_NAMES_OF_EXPERTS.layer, **hybrid.mamba_names("mamba.")},
    otherwise={f"shared_mlp.{stored}": names for stored, names in _STACKS.items()},
    adjust={"decay": Adjustment.MINUS_EXPONENTIAL, "final_norm": Adjustment.FINAL_NORM_SCALE},
)
_GGUF_NAMES = replace(
    hybrid.with_gguf_mamba(experts.with_gguf_experts(GGUF_NAMES)),
    adjust={**dict.fromkeys(("q", "k"), Adjustment.HALVES_FROM_PAIRS), "final_norm": Adjustment.FINAL_NORM_SCALE},
)
FAMILY = Family(
    "granitemoehybrid",
    ("GraniteMoeHybridForCausalLM",),
    ("granitehybrid",),
    _from_config,
    _from_gguf,
    _HF_NAMES,
    _GGUF_NAMES,
)
