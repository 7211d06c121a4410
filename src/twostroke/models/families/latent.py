"""Latent attention, as DeepSeek's config.json files describe it."""

from __future__ import annotations

from twostroke.models.families.fields import Fields
from twostroke.models.spec import LatentAttention

_MAX_RANK = 2**17


def latent_from_config(config: Fields) -> LatentAttention:
    has_query_rank = config.get("q_lora_rank") is not None
    return LatentAttention(
        num_heads=config.integer("num_attention_heads", 1, 4096),
        rank=config.integer("kv_lora_rank", 1, _MAX_RANK),
        plain_dim=config.integer("qk_nope_head_dim", 1, _MAX_RANK),
        rotated_dim=config.integer("qk_rope_head_dim", 1, _MAX_RANK),
        value_dim=config.integer("v_head_dim", 1, _MAX_RANK),
        query_rank=config.integer("q_lora_rank", 1, _MAX_RANK) if has_query_rank else None,
    )
