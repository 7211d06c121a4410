"""Nemotron-H: layers that are a Mamba-2, an attention without positions, an MLP or a mixture of experts, and nothing
beside it. Neither MLPs nor experts have a gate: what is above zero is squared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from twostroke.models.families import decoder, experts, hybrid
from twostroke.models.families.declaration import GGUF_NAMES, HF_NAMES, Adjustment, Family, StoredTensor
from twostroke.models.families.fields import Fields, shown
from twostroke.models.rope_spec import NO_ROPE
from twostroke.models.spec import DenseMlp, LayerSpec, Mamba2, ModelSpec, MoeSpec, Routing

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEWER = {"linear_attention": "mamba", "full_attention": "attention"}
_EXPERT_FIELDS = (*experts.COUNTS, "n_shared_experts", "moe_shared_expert_intermediate_size")


def _from_config(config: Fields) -> ModelSpec:
    neutral = {"use_bias": (False,), "mamba_proj_bias": (False,), "attention_bias": (False,)}
    config.refuse_unless({**neutral, "mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",)})
    config.refuse_unless({"sliding_window": ()})
    kinds = _kinds(config)
    config = replace(config.over({"layer_norm_epsilon": 1e-5}), names={"rms_norm_eps": "layer_norm_epsilon"})
    plain = config.without(*_EXPERT_FIELDS, "num_hidden_layers")
    plain = plain.over({"hidden_act": "silu", "num_hidden_layers": len(kinds)})
    spec = decoder.spec_from_config(plain, "nemotron_h", handled=("ssm_state_size", "mamba_num_heads"))
    attention = replace(spec.layers[0].grouped, rope=NO_ROPE)
    mlp = DenseMlp(spec.dense_width, is_gated=False, squared_relu=True)
    made = {
        "mamba": LayerSpec(_mamba(config), None),
        "attention": LayerSpec(attention, None),
        "mlp": LayerSpec(None, mlp),
    }
    if "moe" in kinds:
        made["moe"] = LayerSpec(None, _experts(config, mlp))
    spec = replace(spec, layers=tuple(made[kind] for kind in kinds))
    routing = Routing("sigmoid", has_correction=True, ranked_by=2)
    normalise = config.flag("norm_topk_prob", default=True)
    return experts.with_routing(spec, config, routing, groups=(1, 1), normalise_weights=normalise)


def _kinds(config: Fields) -> list[str]:
    """Of each layer; older files have a letter for each."""
    name = config.present("layers_block_type", "hybrid_override_pattern")
    if name == "hybrid_override_pattern":
        kinds = [_LETTERS.get(letter, letter) for letter in config.text(name)]
    else:
        value = config.get(name)
        kinds = list(config.strings(name, len(value) if isinstance(value, list) else 0))
        kinds = [_NEWER.get(kind, kind) for kind in kinds]
    for kind in kinds:
        if kind not in _LETTERS.values():
            raise config.error(name, f"holds {shown(kind)}, which is not supported")
    if not 1 <= len(kinds) <= decoder.MAX_LAYERS:
        raise config.error(name, f"must name 1 to {decoder.MAX_LAYERS} layers, not {len(kinds)}")
    return kinds


def _mamba(config: Fields) -> Mamba2:
    heads = config.integer("mamba_num_heads", 1, hybrid.MAX_HEADS, 128)
    groups = hybrid.groups_of(config, config.present("n_groups", "mamba_n_groups"), heads, 8)
    return Mamba2(
        heads,
        config.integer("mamba_head_dim", 1, hybrid.MAX_HEAD, 64),
        config.integer("ssm_state_size", 1, hybrid.MAX_HEAD, 128),
        groups,
        config.integer(config.present("conv_kernel", "mamba_d_conv"), 1, hybrid.MAX_TAPS, 4),
        conv_bias=config.flag(config.present("use_conv_bias", "mamba_conv_bias"), default=True),
        norm_groups=groups,
        shortest_step=config.number(config.present("time_step_min", "mamba_dt_min"), 0.0, 1e3, 1e-3),
    )


def _experts(config: Fields, mlp: DenseMlp) -> MoeSpec:
    width = config.integer("moe_shared_expert_intermediate_size", 1, experts.MAX_INTERMEDIATE)
    (moe,) = experts.mlps_from_config(config.without("mlp_layer_types"), 1, mlp)
    if not isinstance(moe, MoeSpec):
        raise config.error("n_routed_experts", "must be 1 at least where layers have experts")
    shared = replace(mlp, intermediate_size=width)
    return replace(moe, shared=shared, is_gated=False, squared_relu=True, latent_size=_latent_size(config))


def _latent_size(fields: Fields) -> int | None:
    """Of what experts read and give. Files of models whose experts read all of a token say nothing, or 0."""
    return fields.integer("moe_latent_size", 0, decoder.MAX_HIDDEN, 0) or None


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    """A file counts KV heads and columns of an MLP layer by layer, 0 where there are none; a layer of neither keeps a
    state. Of the shortest step it says nothing: llama.cpp has none. Layers that draft are counted, too, at the end."""
    num_layers = fields.integer("block_count", 1, decoder.MAX_LAYERS)
    fields, has_no_heads = hybrid.states_of_gguf(fields, num_layers)
    widths = fields.integers("feed_forward_length", 0, experts.MAX_INTERMEDIATE)
    own_layers = num_layers - decoder.num_drafting(fields, num_layers)
    if len(widths) != num_layers or not any(widths[:own_layers]):
        raise fields.error(
            "feed_forward_length", f"must hold the width of an MLP, or 0, for each of {num_layers} layers"
        )
    widths, has_no_heads = widths[:own_layers], has_no_heads[:own_layers]
    own = {f"{fields.prefix}feed_forward_length": max(widths), f"{fields.prefix}expert_gating_func": 2}
    # Nothing is rotated, whatever is said of it.
    kept = {name: value for name, value in fields.values.items() if not name.startswith(f"{fields.prefix}rope.")}
    fields = replace(fields, values=kept | own)
    spec = decoder.spec_from_gguf(fields, tensors, "nemotron_h", handled=("expert_count",))
    mixer = hybrid.mamba_from_gguf(fields, tensors)
    mamba = LayerSpec(replace(mixer, norm_groups=mixer.num_groups), None)
    attention = LayerSpec(replace(spec.layers[0].grouped, rope=NO_ROPE), None)
    moe = _experts_from_gguf(fields, tensors, widths) if experts.has_experts(fields) else None
    layers = []
    for index, (width, keeps) in enumerate(zip(widths, has_no_heads, strict=True)):
        if width and not keeps:
            raise fields.error("feed_forward_length", f"gives layer {index} an MLP, and it attends")
        mlp = moe or DenseMlp(width, is_gated=False, squared_relu=True)
        layers.append(LayerSpec(None, mlp) if width else mamba if keeps else attention)
    return replace(spec, layers=tuple(layers))


def _experts_from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor], widths: Sequence[int]) -> MoeSpec:
    """All layers of an MLP have experts then."""
    first = next(index for index, width in enumerate(widths) if width)
    fields = replace(fields, values={**fields.values, f"{fields.prefix}leading_dense_block_count": first})
    dense = DenseMlp(max(widths), is_gated=False, squared_relu=True)
    *_, moe = experts.mlps_from_gguf(fields, tensors, len(widths), dense)
    assert isinstance(moe, MoeSpec)
    return replace(moe, is_gated=False, squared_relu=True, latent_size=_latent_size(fields))


_PARTS = ("up", "down")
_HF_NAMES = replace(
    HF_NAMES,
    layer_prefix="backbone.layers.{}.",
    whole={
        "backbone.embeddings.weight": ("embedding",),
        "backbone.norm_f.weight": ("final_norm",),
        "lm_head.weight": ("output",),
    },
    layer={
        **hybrid.mamba_names("mixer."),
        "norm.weight": ("attention_norm",),
        **{f"mixer.{name}_proj.weight": (name,) for name in ("q", "k", "v", "o", *_PARTS)},
        "mixer.gate.weight": ("router",),
        "mixer.fc1_latent_proj.weight": ("latent_down",),
        "mixer.fc2_latent_proj.weight": ("latent_up",),
        "mixer.gate.e_score_correction_bias": ("router_correction",),
        **{f"mixer.shared_experts.{name}_proj.weight": (f"shared.{name}",) for name in _PARTS},
    },
    otherwise={"norm.weight": ("mlp_norm",)},
    experts={f"mixer.experts.{{}}.{name}_proj.weight": (name,) for name in _PARTS},
    stacked_experts={f"mixer.experts.{name}_proj": (name,) for name in _PARTS},
    adjust={"decay": Adjustment.MINUS_EXPONENTIAL},
    ignored_prefixes=("mtp.",),
    renamed_prefixes={"model.": "backbone."},
)
_GGUF_NAMES = replace(
    hybrid.with_gguf_mamba(experts.with_gguf_experts(GGUF_NAMES)),
    otherwise={"attn_norm.weight": ("mlp_norm",)},
    ignores_further_layers=True,
)
FAMILY = Family(
    "nemotron_h",
    ("NemotronHForCausalLM",),
    ("nemotron_h", "nemotron_h_moe"),
    _from_config,
    _from_gguf,
    _HF_NAMES,
    _GGUF_NAMES,
)
