"""Gemma 4, text: sliding layers with heads of one size and full layers with wider ones, values that are normed and may
be what keys are made of, upper layers that read lower layers' KV, inputs for each layer, and experts beside the MLP.
The text half of a model that also sees and hears is taken out of it; the rest is left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twostroke.models.families import decoder, experts
from twostroke.models.families.declaration import Family, StoredTensor
from twostroke.models.families.fields import Fields, shown
from twostroke.models.families.gemma2 import soft_cap
from twostroke.models.families.gemma4_names import GGUF_GEMMA4_NAMES, HF_GEMMA4_NAMES
from twostroke.models.families.rope import theta_from
from twostroke.models.rope_spec import ProportionalScaling, RopeScaling, RopeSpec
from twostroke.models.spec import DenseMlp, GroupedAttention, LayerInput, LayerSpec, Mlp, ModelSpec, MoeSpec

_PERIOD = 6
_MAX_WIDTH = 2**16
# Google's configs leave out what equals these.
_DEFAULTS = {
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}


@dataclass(frozen=True, slots=True)
class _Heads:
    """What one kind of layer's attention is."""

    num_kv_heads: int
    head_dim: int
    rope: RopeSpec


def _from_config(config: Fields) -> ModelSpec:
    config = _text_config(config).over(_DEFAULTS)
    bidirectional = config.get("use_bidirectional_attention")
    if bidirectional not in (None, False, "vision"):  # "vision": among an image's tokens, and there are none here
        config.refuse("use_bidirectional_attention", f"is {shown(bidirectional)}, which is not supported")
    # Its ropes and experts are read below.
    plain = config.without("rope_parameters", "use_bidirectional_attention", *experts.COUNTS)
    spec = decoder.spec_from_config(plain, "gemma4", handled=("final_logit_softcapping",), tied=True)
    sliding = decoder.sliding_layers(config, spec.num_layers, decoder.every_nth_full(spec.num_layers, _PERIOD))
    sliding = (*sliding[:-1], False)  # the last is a full one, whatever the list says
    local, whole = _heads_from_config(config, sliding)
    num_sharing = config.integer("num_kv_shared_layers", 0, spec.num_layers - 1, 0)
    is_wide = config.flag("use_double_wide_mlp", default=False)
    widths = [spec.dense_width * (1 + (is_wide and sharing)) for sharing in _sharing(spec.num_layers, num_sharing)]
    spec = _gemma4(spec, config, sliding, local, whole, num_sharing, config.flag("attention_k_eq_v", default=False))
    moe = _moe_from_config(config, spec.num_layers)
    return _with_mlps(spec, widths, moe)


def _text_config(config: Fields) -> Fields:
    text = config.section("text_config")
    if text is None:
        return config
    decoder.refuse_quantised(config)
    return text.over({"tie_word_embeddings": config.flag("tie_word_embeddings", default=True)})


def _heads_from_config(config: Fields, sliding: Sequence[bool]) -> tuple[_Heads, _Heads]:
    """Of sliding layers and of full ones. Published configs have `global_head_dim`; those that transformers 5 saves
    have what differs from the rest, layer by layer."""
    local_dim, local_heads = config.integer("head_dim", 2, 1024), config.integer("num_key_value_heads", 1, 4096)
    whole_dim = config.integer("global_head_dim", 2, 1024, 512)
    whole_heads = local_heads
    if config.flag("attention_k_eq_v", default=False):
        whole_heads = config.integer("num_global_key_value_heads", 1, 4096, local_heads)
    if (by_layer := config.section("per_layer_config")) is not None:
        full = [str(layer) for layer, slides in enumerate(sliding) if not slides]
        sections = [section.values for name in full if (section := by_layer.section(name)) is not None]
        if not sections or set(by_layer.values) != set(full) or any(values != sections[0] for values in sections):
            raise config.error("per_layer_config", "must say the same of every full layer, and nothing of others")
        own = replace(by_layer, values=sections[0])
        whole_dim = own.integer("head_dim", 2, 1024, local_dim)
        whole_heads = own.integer("num_key_value_heads", 1, 4096, local_heads)
    parameters = config.section("rope_parameters")
    assert parameters is not None
    local_rope, whole_rope = (
        _rope_from(config, parameters, kind, dim)
        for kind, dim in (("sliding_attention", local_dim), ("full_attention", whole_dim))
    )
    return _Heads(local_heads, local_dim, local_rope), _Heads(whole_heads, whole_dim, whole_rope)


def _rope_from(config: Fields, parameters: Fields, name: str, dim: int) -> RopeSpec:
    settings = parameters.section(name)
    if settings is None:
        raise config.error("rope_parameters", f"holds no {name}")
    kind = settings.text("rope_type", "default")
    scaling: RopeScaling | None = None
    if kind == "proportional":
        share = settings.number("partial_rotary_factor", 0.0, 1.0, 1.0)
        scaling = ProportionalScaling(int(share * dim // 2), settings.number("factor", 1e-3, 1e6, 1.0))
    elif kind == "default":
        settings.refuse_unless({"partial_rotary_factor": (1, 1.0)})
    else:
        settings.refuse("rope_type", f"is {shown(kind)}; the supported ones are default and proportional")
    return RopeSpec(theta_from(settings, replace(config, values={})), dim, scaling)


def _moe_from_config(config: Fields, num_layers: int) -> MoeSpec | None:
    if not config.flag("enable_moe_block", default=False):
        return None
    named = {"num_experts_per_tok": "top_k_experts"}
    mlps = experts.mlps_from_config(replace(config, names=named), num_layers, DenseMlp(1, "gelu_tanh"))
    if not isinstance(mlps[0], MoeSpec):
        raise config.error("num_experts", "must be 1 at least")
    return mlps[0]


def _sharing(num_layers: int, num_sharing: int) -> tuple[bool, ...]:
    """Which layers read the KV of lower ones: the last few."""
    return (False,) * (num_layers - num_sharing) + (True,) * num_sharing


def _gemma4(
    spec: ModelSpec,
    fields: Fields,
    sliding: Sequence[bool],
    local: _Heads,
    whole: _Heads,
    num_sharing: int,
    keys_are_values: bool,
) -> ModelSpec:
    """What all Gemma 4's have. A layer that shares reads the last of its kind that does not."""
    num_heads, window = (
        spec.layers[0].grouped.num_heads,
        fields.integer(fields.present("sliding_window", "attention.sliding_window"), 1, 2**30),
    )
    width = fields.integer(
        fields.present("hidden_size_per_layer_input", "embedding_length_per_layer_input"), 0, _MAX_WIDTH, 0
    )
    vocab = fields.integer("vocab_size_per_layer_input", 1, 2**30, spec.vocab_size)
    if width and vocab != spec.vocab_size:
        raise fields.error("vocab_size_per_layer_input", f"is {vocab}, and the vocabulary has {spec.vocab_size}")
    layer_input = LayerInput(width) if width else None
    last_of: dict[bool, int] = {}
    layers = []
    for index, (slides, shares) in enumerate(zip(sliding, _sharing(len(sliding), num_sharing), strict=True)):
        heads = local if slides else whole
        if num_heads % heads.num_kv_heads:
            raise fields.error("num_key_value_heads", f"is {heads.num_kv_heads}, and there are {num_heads} heads")
        if shares and slides not in last_of:
            raise fields.error("num_kv_shared_layers", f"leaves layer {index} none to share the KV of")
        attention = GroupedAttention(
            num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            heads.rope,
            window=window if slides and window < spec.max_context else None,
            own_scale=1.0,
            qk_norm=True,
            value_norm=True,
            keys_are_values=keys_are_values and not slides,
            shares_kv_of=last_of[slides] if shares else None,
        )
        if not shares:
            last_of[slides] = index
        mlp = DenseMlp(spec.dense_width, "gelu_tanh")
        layers.append(LayerSpec(attention, mlp, sandwich_norms=True, layer_input=layer_input, has_scale=True))
    scale, cap = math.sqrt(spec.hidden_size), soft_cap(fields, "final_logit_softcapping")
    return replace(spec, layers=tuple(layers), embedding_scale=scale, logits_softcap=cap)


def _with_mlps(spec: ModelSpec, widths: Sequence[int], moe: MoeSpec | None) -> ModelSpec:
    mlps: list[Mlp] = [DenseMlp(width, "gelu_tanh") for width in widths]
    if moe is not None:
        mlps = [replace(moe, shared=mlp, has_own_norms=True) for mlp in mlps if isinstance(mlp, DenseMlp)]
    return decoder.with_mlps(spec, mlps)


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    num_layers = fields.integer("block_count", 1, decoder.MAX_LAYERS)
    sliding = _flags(fields, "attention.sliding_window_pattern", num_layers)
    widths = _numbers(fields, "feed_forward_length", num_layers)
    kv_heads = _numbers(fields, "attention.head_count_kv", num_layers)
    whole_dim = fields.integer("attention.key_length", 2, 1024)
    local_dim = fields.integer("attention.key_length_swa", 2, 1024, whole_dim)
    fields.refuse_unless({"rope.dimension_count_swa": (local_dim,), "attention.value_length_swa": (local_dim,)})
    one_of_each = {"feed_forward_length": widths[0], "attention.head_count_kv": kv_heads[0]}
    plain = replace(fields, values={**fields.values, **{fields.prefix + name: n for name, n in one_of_each.items()}})
    handled = ("final_logit_softcapping", "expert_count", "attention.scale")
    spec = decoder.spec_from_gguf(plain, tensors, "gemma4", handled=handled)
    local_theta = fields.number("rope.freq_base_swa", 1.0, 1e15, 10_000.0)
    whole_rope = spec.layers[0].grouped.rope
    heads = {
        True: _Heads(_of_kind(kv_heads, sliding, True), local_dim, RopeSpec(local_theta, local_dim)),
        False: _Heads(_of_kind(kv_heads, sliding, False), whole_dim, whole_rope),
    }
    num_sharing = fields.integer("attention.shared_kv_layers", 0, num_layers - 1, 0)
    first_full = next((layer for layer, slides in enumerate(sliding) if not slides), 0)
    keys_are_values = f"blk.{first_full}.attn_v.weight" not in tensors
    spec = _gemma4(spec, fields, sliding, heads[True], heads[False], num_sharing, keys_are_values)
    moe = None
    if experts.has_experts(fields):
        mlps = experts.mlps_from_gguf(fields, tensors, num_layers, DenseMlp(1, "gelu_tanh"))
        moe = mlps[0] if isinstance(mlps[0], MoeSpec) else None
    return _with_mlps(spec, widths, moe)


def _flags(fields: Fields, name: str, count: int) -> tuple[bool, ...]:
    value = fields.get(name)
    if not isinstance(value, list) or len(value) != count or not all(isinstance(entry, bool) for entry in value):
        raise fields.error(name, f"must hold a flag for each of the {count} layers")
    return tuple(value)


def _numbers(fields: Fields, name: str, count: int) -> tuple[int, ...]:
    """One for all layers, or one a layer."""
    value: Any = fields.get(name)
    if not isinstance(value, list):
        return (fields.integer(name, 1, experts.MAX_INTERMEDIATE),) * count
    if len(value) != count:
        raise fields.error(name, f"must hold a number for each of the {count} layers")
    return fields.integers(name, 1, experts.MAX_INTERMEDIATE)


def _of_kind(numbers: Sequence[int], sliding: Sequence[bool], slides: bool) -> int:
    """That layers of one kind have; where there are none, any."""
    return next((number for number, one in zip(numbers, sliding, strict=True) if one is slides), numbers[0])


def _unified_from_config(config: Fields) -> ModelSpec:
    """Of 12B, whose images and sounds need no towers of their own."""
    defaults = {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262_144}
    return replace(_from_config(_text_config(config).over(defaults)), family="gemma4_unified")


FAMILY = Family(
    "gemma4",
    ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    ("gemma4",),
    _from_config,
    _from_gguf,
    HF_GEMMA4_NAMES,
    GGUF_GEMMA4_NAMES,
)
UNIFIED = Family(
    "gemma4_unified",
    ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
    (),
    _unified_from_config,
    hf_names=HF_GEMMA4_NAMES,
)
