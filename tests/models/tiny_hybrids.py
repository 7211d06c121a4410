"""Tiny models of transformers, random: layers that keep states, and younger families, a builder each."""

from __future__ import annotations

from typing import Any

import transformers
from tests.models.tiny_families import YARN
from tests.models.tiny_sizes import SIZES, WINDOW
from transformers import PreTrainedModel


def lfm2(**settings: Any) -> PreTrainedModel:
    own = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}
    # Two thirds of 150, rounded up to a multiple of 32.
    own |= {"intermediate_size": 150, "block_multiple_of": 32, "tie_word_embeddings": False}
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**{**SIZES, **own, **settings}))


def lfm2_moe(**settings: Any) -> PreTrainedModel:
    own = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1}
    own |= {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "conv_L_cache": 4}
    return transformers.Lfm2MoeForCausalLM(transformers.Lfm2MoeConfig(**{**SIZES, **own, **settings}))


# A delta net norms what it reads, however little that is, and its last bits with it: less so with this epsilon.
_DELTA_NET: dict[str, Any] = {
    "rms_norm_eps": 1e-3,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
_SHARED_EXPERT = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_SHARED_EXPERT |= {"shared_expert_intermediate_size": 64}


def qwen3_next(**settings: Any) -> PreTrainedModel:
    own = {**SIZES, **_DELTA_NET, **_SHARED_EXPERT, **settings}
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**own))


def qwen3_next_mixed(**settings: Any) -> PreTrainedModel:
    return qwen3_next(mlp_only_layers=[1], norm_topk_prob=False, linear_value_head_dim=16, **settings)


def qwen3_5(**settings: Any) -> PreTrainedModel:
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**{**SIZES, **_DELTA_NET, **settings}))


def qwen3_5_moe(**settings: Any) -> PreTrainedModel:
    own = {**SIZES, **_DELTA_NET, **_SHARED_EXPERT, **settings}
    own.pop("intermediate_size")
    return transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**own))


def qwen3_5_vision() -> PreTrainedModel:
    """As Qwen3.5 is published: the nested config, the prefixed names, the tensors to leave out."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(
        text_config=qwen3_5().config.to_dict(),
        vision_config=vision,
        image_token_id=3,
        video_token_id=4,
        vision_start_token_id=5,
        vision_end_token_id=6,
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.8,
    "shared_intermediate_size": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


def granite_hybrid(**settings: Any) -> PreTrainedModel:
    own = {**SIZES, **_MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, **settings}
    return transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**own))


def nemotron_h(**settings: Any) -> PreTrainedModel:
    kinds = ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"]
    own = {"layers_block_type": kinds, "head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2}
    own |= {"ssm_state_size": 32, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    # Steps short enough for some to be lengthened.
    own |= {"moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 1.5, "time_step_min": 0.3}
    return transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**{**SIZES, **own, **settings}))


def olmo2(**settings: Any) -> PreTrainedModel:
    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**{**SIZES, **settings}))


def olmo3(**settings: Any) -> PreTrainedModel:
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    ropes = {"sliding_attention": plain, "full_attention": YARN}
    own = {"sliding_window": WINDOW, "num_hidden_layers": 4, "rope_parameters": ropes}
    return transformers.Olmo3ForCausalLM(transformers.Olmo3Config(**{**SIZES, **own, **settings}))


def granite(**settings: Any) -> PreTrainedModel:
    scales = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1}
    own = {**scales, "logits_scaling": 1.5, "rms_norm_eps": 1e-3}  # an epsilon that is felt
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**{**SIZES, **own, **settings}))


def seed_oss(**settings: Any) -> PreTrainedModel:
    return transformers.SeedOssForCausalLM(transformers.SeedOssConfig(**{**SIZES, "head_dim": 32, **settings}))


def ernie4_5(**settings: Any) -> PreTrainedModel:
    return transformers.Ernie4_5ForCausalLM(transformers.Ernie4_5Config(**{**SIZES, "head_dim": 32, **settings}))


def ernie4_5_moe(**settings: Any) -> PreTrainedModel:
    own = {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 2, "moe_intermediate_size": 32}
    own |= {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}
    return transformers.Ernie4_5_MoeForCausalLM(transformers.Ernie4_5_MoeConfig(**{**SIZES, **own, **settings}))


def granite_moe(**settings: Any) -> PreTrainedModel:
    scales = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1}
    own = {**scales, "logits_scaling": 1.5, "num_local_experts": 6, "num_experts_per_tok": 2}
    return transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**{**SIZES, **own, **settings}))


def granite_moe_shared(**settings: Any) -> PreTrainedModel:
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64, "logits_scaling": 2.0}
    config = transformers.GraniteMoeSharedConfig(**{**SIZES, **own, **settings})
    return transformers.GraniteMoeSharedForCausalLM(config)


def glm4(**settings: Any) -> PreTrainedModel:
    own = {"head_dim": 32, "attention_bias": True, "pad_token_id": 0}
    own["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return transformers.Glm4ForCausalLM(transformers.Glm4Config(**{**SIZES, **own, **settings}))


def olmoe(**settings: Any) -> PreTrainedModel:
    own = {"num_experts": 6, "num_experts_per_tok": 2}
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**{**SIZES, **own, **settings}))


def exaone4(**settings: Any) -> PreTrainedModel:
    own = {"head_dim": 32, "sliding_window": WINDOW, "sliding_window_pattern": 4, "num_hidden_layers": 5}
    own["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    return transformers.Exaone4ForCausalLM(transformers.Exaone4Config(**{**SIZES, **own, **settings}))


_ALPHA_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}


def hunyuan_dense(**settings: Any) -> PreTrainedModel:
    own = {"head_dim": 32, "rope_parameters": _ALPHA_ROPE}
    return transformers.HunYuanDenseV1ForCausalLM(transformers.HunYuanDenseV1Config(**{**SIZES, **own, **settings}))


def hunyuan_moe(**settings: Any) -> PreTrainedModel:
    own = {"head_dim": 32, "rope_parameters": _ALPHA_ROPE, "num_experts": 6, "moe_topk": 2}
    return transformers.HunYuanMoEV1ForCausalLM(transformers.HunYuanMoEV1Config(**{**SIZES, **own, **settings}))


def qwen_vl(name: str, vision: dict[str, Any], **settings: Any) -> PreTrainedModel:
    """Text inside a model that sees images."""
    section = {"mrope_section": [2, 3, 3], "rope_type": "default", "rope_theta": 1e4}
    text = {**SIZES, "rope_parameters": section, **settings}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 8, "intermediate_size": 32, **vision}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def qwen3_vl(name: str, **settings: Any) -> PreTrainedModel:
    vision = {"out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    return qwen_vl(name, vision, head_dim=32, **settings)


def smollm3(**settings: Any) -> PreTrainedModel:
    own = {"num_hidden_layers": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    return transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**{**SIZES, **own, **settings}))
