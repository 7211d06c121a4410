"""Latent attention as files describe it: config.json in DeepSeek's manner, GGUF's keys, its tensors' names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families.declaration import GGUF_LAYER, HF_LAYER, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.families.rope import rope_from_config, rope_from_gguf, rope_settings
from twostroke.models.rope_spec import RopeSpec, YarnScaling, yarn_sharpness
from twostroke.models.spec import LatentAttention, QueryGrowth

_MAX_RANK = 2**17
_MAX_HEADS = 4096
HANDLED = ("kv_lora_rank", "partial_rotary_factor")
"""What a family reads that has latent attention."""


def latent_from_config(config: Fields, max_context: int) -> LatentAttention:
    config.refuse_unless({"attention_bias": (False,)})
    plain, rotated = (config.integer(f"qk_{kind}_head_dim", 1, _MAX_RANK) for kind in ("nope", "rope"))
    if rotated % 2:
        raise config.error("qk_rope_head_dim", f"must be even for a rotary embedding, not {rotated}")
    settings = rope_settings(config)
    # Of transformers' head size, which some configs set to all of a key's dimensions and others to the rotated ones.
    for holder in (config, settings):
        share = holder.number("partial_rotary_factor", 0.0, 1.0, 1.0)
        if share != 1.0 and round(share * (plain + rotated)) != rotated:
            raise holder.error("partial_rotary_factor", f"is {share:g}, and {rotated} of {plain + rotated} are rotated")
    rope = rope_from_config(config, rotated, max_context)
    pairs_neighbours = config.flag("rope_interleave", default=True)
    sharpness = settings.number("mscale_all_dim", 0.0, 100.0, 0.0)
    has_query_rank = config.get("q_lora_rank") is not None
    return LatentAttention(
        num_heads=config.integer("num_attention_heads", 1, _MAX_HEADS),
        rank=config.integer("kv_lora_rank", 1, _MAX_RANK),
        plain_dim=plain,
        rotated_dim=rotated,
        value_dim=config.integer("v_head_dim", 1, _MAX_RANK),
        rope=replace(rope, pairs_neighbours=pairs_neighbours),
        query_rank=config.integer("q_lora_rank", 1, _MAX_RANK) if has_query_rank else None,
        own_scale=_sharpened(plain + rotated, rope, sharpness),
    )


def _sharpened(key_dim: int, rope: RopeSpec, sharpness: float) -> float | None:
    """What scores are multiplied by where YaRN's sharpening is theirs, and not the rotation's."""
    if not sharpness or not isinstance(rope.scaling, YarnScaling):
        return None
    return float(key_dim**-0.5 * yarn_sharpness(rope.scaling.factor, sharpness) ** 2)


def growth_from_config(config: Fields) -> QueryGrowth | None:
    """Mistral's, in its rope's section."""
    settings = rope_settings(config)
    if settings.get("llama_4_scaling_beta") is None:
        return None
    context = settings.integer("original_max_position_embeddings", 1, 2**30)
    return QueryGrowth(settings.number("llama_4_scaling_beta", 0.0, 100.0), context)


def growth_from_gguf(fields: Fields) -> QueryGrowth | None:
    """Files of Ministral 3 leave the context out from which queries grow: it is the one that YaRN begins from."""
    scale = fields.number("attention.temperature_scale", 0.0, 100.0, 0.0)
    if not scale:
        return None
    name = fields.present("attention.temperature_length", "rope.scaling.original_context_length")
    return QueryGrowth(scale, fields.integer(name, 1, 2**30))


def latent_from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor], max_context: int) -> LatentAttention:
    """Files since 2025 say of a head's own sizes `key_length_mla`, and their `key_length` is the latent's."""
    rotated = fields.integer("rope.dimension_count", 2, _MAX_RANK)
    key_name, value_name = (
        f"attention.{kind}_length_mla"
        if fields.get("attention.key_length_mla") is not None
        else f"attention.{kind}_length"
        for kind in ("key", "value")
    )
    key_dim = fields.integer(key_name, 1, _MAX_RANK)
    if rotated >= key_dim or rotated % 2:
        raise fields.error("rope.dimension_count", f"is {rotated}, and must be even and below the {key_dim} of a head")
    rope = rope_from_gguf(fields, tensors, rotated, max_context)
    own_scale = None
    if isinstance(rope.scaling, YarnScaling):
        # The rotation of such files sharpens nothing; scores do, by this logarithm's multiple.
        multiple = fields.number("rope.scaling.yarn_log_multiplier", 0.0, 100.0, 0.0)
        own_scale = key_dim**-0.5 * (1.0 + multiple * math.log(max(1.0, rope.scaling.factor))) ** 2
        rope = replace(rope, scaling=replace(rope.scaling, attention_factor=1.0))
    has_query_rank = fields.get("attention.q_lora_rank") not in (None, 0)
    return LatentAttention(
        num_heads=fields.integer("num_attention_heads", 1, _MAX_HEADS),
        rank=fields.integer("attention.kv_lora_rank", 1, _MAX_RANK),
        plain_dim=key_dim - rotated,
        rotated_dim=rotated,
        value_dim=fields.integer(value_name, 1, _MAX_RANK),
        rope=replace(rope, pairs_neighbours=True),
        query_rank=fields.integer("attention.q_lora_rank", 1, _MAX_RANK) if has_query_rank else None,
        own_scale=own_scale,
    )


_NAMES: tuple[tuple[str, str, str], ...] = (
    # canonical, in a folder, in a GGUF file
    ("q_a", "q_a_proj", "attn_q_a"),
    ("q_a_norm", "q_a_layernorm", "attn_q_a_norm"),
    ("q_b", "q_b_proj", "attn_q_b"),
    ("kv_a", "kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("kv_a_norm", "kv_a_layernorm", "attn_kv_a_norm"),
    ("kv_b", "kv_b_proj", "attn_kv_b"),
)
HF_LATENT_LAYER = {**HF_LAYER, **{f"self_attn.{stored}.weight": (canonical,) for canonical, stored, _ in _NAMES}}
GGUF_LATENT_LAYER = {**GGUF_LAYER, **{f"{stored}.weight": (canonical,) for canonical, _, stored in _NAMES}}
GGUF_LATENT_STACKS = ("attn_k_b.weight", "attn_v_b.weight", "attn_kv_b.weight")
