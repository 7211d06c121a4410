"""What all families share: a decoder's dimensions, read from a config.json or from GGUF metadata. A family starts from
the spec made here and replaces what is different about it. A setting that asks for something that is not implemented
is refused here or in the family's file, never passed over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from twostroke.core.errors import ModelError
from twostroke.models.families import experts
from twostroke.models.families.declaration import StoredTensor
from twostroke.models.families.fields import Fields, shown
from twostroke.models.families.latent import latent_from_config, latent_from_gguf
from twostroke.models.families.rope import MAX_CONTEXT, rope_from_config, rope_from_gguf
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import (
    Activation,
    Attention,
    DenseMlp,
    GroupedAttention,
    LatentAttention,
    LayerSpec,
    Mlp,
    ModelSpec,
)

# Far above any model there is: what keeps a hostile file from asking for endless work.
MAX_LAYERS = 1024
MAX_HIDDEN = 2**17
MAX_HEADS = 4096
_MAX_HEAD_DIM = 1024
MAX_VOCAB = 2**22

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}

_RECURRENT = ("linear_num_key_heads", "mamba_d_state", "ssm_state_size", "mamba_num_heads", "rwkv_hidden_size")
_NO = (False,)
_HF_NEUTRAL: dict[str, Sequence[Any]] = {
    "mlp_bias": _NO,
    "is_encoder_decoder": _NO,
    "add_cross_attention": _NO,
    "use_bidirectional_attention": _NO,
    **dict.fromkeys(experts.COUNTS, (0,)),
    "n_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "first_k_dense_replace": (0,),
    "kv_lora_rank": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "partial_rotary_factor": (1, 1.0),
}
_GGUF_NEUTRAL: dict[str, Sequence[Any]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0, 0.0),
    "attention.clamp_kqv": (0, 0.0),
    "attention.scale": (),
    "attention.temperature_scale": (),
    "logit_scale": (1, 1.0),
    "residual_scale": (1, 1.0),
    "embedding_scale": (1, 1.0),
    "use_parallel_residual": _NO,
    "rope.scale_linear": (1, 1.0),
    "attn_logit_softcapping": (0, 0.0),
    "final_logit_softcapping": (0, 0.0),
}


def refuse_quantised(config: Fields) -> None:
    """Weights that are quantised in a way that is not understood."""
    from twostroke.models.quantised.methods import read_quantisation  # which reads with this package's fields

    try:
        read_quantisation(config)
    except ModelError as error:
        if config.refusals is None:
            raise
        config.refusals.append(str(error))


_GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
"""What GGUF files call a decoder's dimensions, by config.json's names."""


def spec_from_config(
    config: Fields, family: str, *, rotary_dim: int | None = None, handled: Sequence[str] = (), tied: bool = False
) -> ModelSpec:
    """The spec of a plain decoder, full attention in every layer. `handled` names features that are refused
    unless the calling family reads them; `tied` is what an absent tie_word_embeddings means to the architecture."""
    refuse_quantised(config)
    config.refuse_unless({name: values for name, values in _HF_NEUTRAL.items() if name not in handled})
    for name in _RECURRENT:
        if name not in handled and config.get(name) is not None:
            raise config.error(name, "tells of layers that keep a state, which this family is not known to have")
    if "partial_rotary_factor" not in handled:
        for name in ("rope_scaling", "rope_parameters"):
            if (section := config.section(name)) is not None:
                section.refuse_unless({"partial_rotary_factor": (1, 1.0)})
    has_bias = config.flag("attention_bias", default=False)
    # Gemma says hidden_activation, the others hidden_act.
    activation_name = config.present("hidden_activation", "hidden_act")
    activation = config.text(activation_name)
    if activation not in _ACTIVATIONS:
        config.refuse(activation_name, f"is {shown(activation)}; the supported ones are {', '.join(_ACTIVATIONS)}")
    mlp_bias = config.flag("mlp_bias", default=False)
    dense = DenseMlp(_intermediate_size(config), _ACTIVATIONS.get(activation, "silu"), has_bias=mlp_bias)
    attention: Attention
    if config.get("kv_lora_rank") is not None:
        attention = latent_from_config(config, _max_context(config))
    else:
        rope = rope_from_config(config, rotary_dim or _head_dim(config), _max_context(config))
        attention = replace(_attention(config, rope), qkv_bias=has_bias, output_bias=has_bias)
    spec = _spec(config, family, config.integer("vocab_size", 1, MAX_VOCAB), attention, dense)
    return replace(
        with_mlps(spec, experts.mlps_from_config(config, spec.num_layers, dense)),
        tied_embeddings=config.flag("tie_word_embeddings", default=tied),
    )


def spec_from_gguf(
    fields: Fields, tensors: Mapping[str, StoredTensor], family: str, *, handled: Sequence[str] = ()
) -> ModelSpec:
    """The same from a GGUF file, where the presence of a tensor says what config.json says with a flag."""
    fields = replace(fields, names=_GGUF_KEYS)
    fields.refuse_unless({name: values for name, values in _GGUF_NEUTRAL.items() if name not in handled})
    attention: Attention
    if fields.get("attention.kv_lora_rank") is not None:
        attention = latent_from_gguf(fields, tensors, _max_context(fields))
    else:
        attention = _grouped_from_gguf(fields, tensors, handled)
    dense = DenseMlp(_intermediate_size(fields))
    spec = _spec(fields, family, _embedding_rows(fields, tensors), attention, dense)
    return replace(spec, tied_embeddings="output.weight" not in tensors)


def _grouped_from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor], handled: Sequence[str]) -> GroupedAttention:
    head_dim = _head_dim(fields)
    if fields.integer("attention.value_length", 1, _MAX_HEAD_DIM, head_dim) != head_dim:
        raise fields.error("attention.value_length", "differs from attention.key_length, which is not supported")
    rotary_dim = fields.integer("rope.dimension_count", 2, head_dim, head_dim)
    if rotary_dim % 2:
        raise fields.error("rope.dimension_count", f"must be even, not {rotary_dim}")
    if "rope.dimension_count" not in handled and rotary_dim != head_dim:
        raise fields.error("rope.dimension_count", f"is {rotary_dim} of {head_dim}: partial rotation is not supported")
    return replace(
        _attention(fields, rope_from_gguf(fields, tensors, rotary_dim, _max_context(fields))),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
    )


def _spec(fields: Fields, family: str, vocab_size: int, attention: Attention, dense: DenseMlp) -> ModelSpec:
    return ModelSpec(
        family=family,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size", 1, MAX_HIDDEN),
        max_context=_max_context(fields),
        layers=(LayerSpec(attention, dense),) * fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        norm_eps=fields.number("rms_norm_eps", 0.0, 1.0),
    )


def _attention(fields: Fields, rope: RopeSpec) -> GroupedAttention:
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"is {num_kv_heads}, and the {num_heads} heads are not a multiple of it"
        )
    return GroupedAttention(num_heads, num_kv_heads, _head_dim(fields), rope)


def _head_dim(fields: Fields) -> int:
    hidden_size = fields.integer("hidden_size", 1, MAX_HIDDEN)
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error(
            "head_dim", f"is missing, and hidden size {hidden_size} is no multiple of the {num_heads} heads"
        )
    head_dim = fields.integer("head_dim", 2, _MAX_HEAD_DIM, hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even for a rotary embedding, not {head_dim}")
    return head_dim


def _intermediate_size(fields: Fields) -> int:
    return fields.integer("intermediate_size", 1, experts.MAX_INTERMEDIATE)


def _max_context(fields: Fields) -> int:
    return fields.integer("max_position_embeddings", 1, MAX_CONTEXT)


def with_latent(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The spec with something else about every layer's latent attention."""
    layers = []
    for layer in spec.layers:
        assert isinstance(layer.attention, LatentAttention)
        layers.append(replace(layer, attention=replace(layer.attention, **changes)))
    return replace(spec, layers=tuple(layers))


def with_attention(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The spec with something else about every layer's grouped attention."""
    return replace(
        spec,
        layers=tuple(replace(layer, attention=replace(layer.grouped, **changes)) for layer in spec.layers),
    )


def without_drafting(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """GGUF files count layers that draft among the others. They are the last ones."""
    return replace(spec, layers=spec.layers[: spec.num_layers - num_drafting(fields, spec.num_layers)])


def num_drafting(fields: Fields, num_layers: int) -> int:
    """How many of a GGUF file's layers draft."""
    return fields.integer("nextn_predict_layers", 0, num_layers - 1, 0)


def with_gguf_experts(
    spec: ModelSpec,
    fields: Fields,
    tensors: Mapping[str, StoredTensor],
    handled: Sequence[str] = (),
    ranked_by: int | None = None,
) -> ModelSpec:
    dense = DenseMlp(spec.dense_width)
    return with_mlps(spec, experts.mlps_from_gguf(fields, tensors, spec.num_layers, dense, handled, ranked_by))


def with_mlps(spec: ModelSpec, mlps: Sequence[Mlp]) -> ModelSpec:
    layers = tuple(replace(layer, mlp=mlp) for layer, mlp in zip(spec.layers, mlps, strict=True))
    return replace(spec, layers=layers)


def with_windows(spec: ModelSpec, window: int | None, sliding: Sequence[bool]) -> ModelSpec:
    """The spec with a sliding window in some of its layers. A window that no context outgrows is full attention."""
    effective = window if window is not None and window < spec.max_context else None
    layers = tuple(
        replace(layer, attention=replace(layer.grouped, window=effective)) if is_sliding and effective else layer
        for layer, is_sliding in zip(spec.layers, sliding, strict=True)
    )
    return replace(spec, layers=layers)


def windowed(spec: ModelSpec, config: Fields, sliding_by_rule: Sequence[bool] | None = None) -> ModelSpec:
    """The windows of a config.json: `sliding_window` wide, in the layers that `layer_types` names one by one, or else
    in those of the family's rule (None: in all of them, if a width is given)."""
    window = window_from(config, "sliding_window")
    by_rule = sliding_by_rule or (window is not None,) * spec.num_layers
    sliding = sliding_layers(config, spec.num_layers, by_rule)
    if any(sliding) and window is None:
        raise config.error("sliding_window", "is missing, and some layers slide")
    return with_windows(spec, window, sliding)


def sliding_layers(config: Fields, num_layers: int, by_rule: Sequence[bool]) -> tuple[bool, ...]:
    if config.get("layer_types") is None:
        return tuple(by_rule)
    kinds = config.strings("layer_types", num_layers)
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.error("layer_types", f"holds {shown(kind)}, which is not supported")
    return tuple(kind == "sliding_attention" for kind in kinds)


def window_from(fields: Fields, name: str, default: int | None = None) -> int | None:
    """A window's width. GGUF writes 0 for none."""
    value = fields.get(name)
    if value is None:
        return default
    if value == 0 and fields.prefix:
        return None
    return fields.integer(name, 1, MAX_CONTEXT)


def every_nth_full(num_layers: int, period: int) -> tuple[bool, ...]:
    """Gemma's pattern: of each `period` layers the last has full attention, the others slide."""
    return tuple((index + 1) % period != 0 for index in range(num_layers))


def _embedding_rows(fields: Fields, tensors: Mapping[str, StoredTensor]) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{fields.source}: the tensor token_embd.weight is missing")
    if len(embedding.shape) != 2 or not 1 <= embedding.shape[0] <= MAX_VOCAB:
        raise ModelError(f"{fields.source}: token_embd.weight has shape {embedding.shape}, and a matrix is needed")
    return embedding.shape[0]
