"""Tiny models of transformers, random: Llama, Mistral, Qwen, Gemma, Phi, DeepSeek and their like, a builder each."""

from __future__ import annotations

from typing import Any

import transformers
from tests.models.tiny_sizes import ORIGINAL_CONTEXT, SIZES, VOCAB_SIZE, WINDOW
from transformers import PreTrainedModel

_GEMMA = {**SIZES, "head_dim": 32, "num_hidden_layers": 4, "sliding_window": WINDOW}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def longrope(rotary_dim: int) -> dict[str, Any]:
    pairs = range(rotary_dim // 2)
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in pairs],
        "long_factor": [1.5 + 0.5 * i for i in pairs],
    }


def llama(**settings: Any) -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **settings}))


def mistral(**settings: Any) -> PreTrainedModel:
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**{**SIZES, "sliding_window": WINDOW, "head_dim": 32, **settings})
    )


def ministral(**settings: Any) -> PreTrainedModel:
    """As published: one layer in some sees all."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    own = {"sliding_window": WINDOW, "head_dim": 32, "layer_types": kinds}
    return transformers.MinistralForCausalLM(transformers.MinistralConfig(**{**SIZES, **own, **settings}))


def qwen2(**settings: Any) -> PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**SIZES, **settings}))


def qwen3(**settings: Any) -> PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**SIZES, "head_dim": 32, **settings}))


def qwen3_moe(**settings: Any) -> PreTrainedModel:
    own = {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**SIZES, **own, **settings}))


def qwen2_moe(**settings: Any) -> PreTrainedModel:
    own = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    own |= {"shared_expert_intermediate_size": 64}
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**{**SIZES, **own, **settings}))


def mixtral(**settings: Any) -> PreTrainedModel:
    own = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**SIZES, **own, **settings}))


def gemma(**settings: Any) -> PreTrainedModel:
    own = {"head_dim": 32, "num_key_value_heads": 1}
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**{**SIZES, **own, **settings}))


def gemma2(**settings: Any) -> PreTrainedModel:
    # Caps low enough, and a scale far enough from the head size's, for the logits to feel them.
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 20}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**{**_GEMMA, **caps, **settings}))


def _gemma3_config(**settings: Any) -> transformers.Gemma3TextConfig:
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0},
    }
    own = {"layer_types": kinds, "rope_parameters": ropes, "query_pre_attn_scalar": 20}
    return transformers.Gemma3TextConfig(**{**_GEMMA, **own, **settings})


def gemma3(**settings: Any) -> PreTrainedModel:
    return transformers.Gemma3ForCausalLM(_gemma3_config(**settings))


def gemma3_vision() -> PreTrainedModel:
    """Text inside a model that sees images: the nested config, the prefixed names, the tensors to leave out."""
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16
    )
    config = transformers.Gemma3Config(
        text_config=_gemma3_config(),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=3,
        boi_token_index=4,
        eoi_token_index=5,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def phi3(**settings: Any) -> PreTrainedModel:
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**{**SIZES, "sliding_window": None, **settings}))


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}
SHARP_ROPE = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}
"""As DeepSeek's: scores are sharpened, and rotations by the quotient of the two."""
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "rope_parameters": SHARP_ROPE,
}
GROUPS = {"n_group": 4, "topk_group": 2}


def deepseek_v2(**settings: Any) -> PreTrainedModel:
    own = {**SIZES, **_LATENT, **settings}
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**own))


def deepseek_v3(**settings: Any) -> PreTrainedModel:
    own = {**SIZES, **_LATENT, **GROUPS, **settings}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**own))


def glm4_moe_lite(**settings: Any) -> PreTrainedModel:
    own = {**SIZES, **_LATENT, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, **settings}
    own = {name: value for name, value in own.items() if name not in ("rope_parameters", "first_k_dense_replace")}
    return transformers.Glm4MoeLiteForCausalLM(transformers.Glm4MoeLiteConfig(**own))


def mistral4(**settings: Any) -> PreTrainedModel:
    # Queries grow from a context on that the tests outgrow.
    ropes = {**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3, "mscale_all_dim": 1.0}
    own = {**SIZES, **_LATENT, **GROUPS, "first_k_dense_replace": 0, "rope_parameters": ropes, **settings}
    return transformers.Mistral4ForCausalLM(transformers.Mistral4Config(**own))


def glm4_moe(**settings: Any) -> PreTrainedModel:
    own = {name: value for name, value in _LATENT.items() if "lora" not in name and "head_dim" not in name}
    own |= {"head_dim": 32, "attention_bias": True, "use_qk_norm": True, "n_group": 1, "topk_group": 1}
    own |= {"num_key_value_heads": 2, "routed_scaling_factor": 1.5}
    own["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**{**SIZES, **own, **settings}))


def dots1(**settings: Any) -> PreTrainedModel:
    own = {name: value for name, value in _LATENT.items() if "lora" not in name and "head_dim" not in name}
    own |= {"num_key_value_heads": 2, "head_dim": 32, "norm_topk_prob": True, "routed_scaling_factor": 1.5}
    own |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "sliding_window": None, **GROUPS}
    return transformers.Dots1ForCausalLM(transformers.Dots1Config(**{**SIZES, **own, **settings}))


def ministral3(**settings: Any) -> PreTrainedModel:
    ropes = {**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
    own = {"head_dim": 32, "rope_parameters": ropes}
    return transformers.Ministral3ForCausalLM(transformers.Ministral3Config(**{**SIZES, **own, **settings}))


def mistral3_vision() -> PreTrainedModel:
    """As Mistral Small 4 is published: its text half is a Mistral 4."""
    vision = transformers.PixtralVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16
    )
    config = transformers.Mistral3Config(
        text_config=mistral4().config, vision_config=vision, image_token_index=3, tie_word_embeddings=False
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def gpt_oss(**settings: Any) -> PreTrainedModel:
    ropes = {**YARN, "truncate": False}
    own = {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3, "rope_parameters": ropes}
    # A limit low enough for gates to feel it.
    own |= {"sliding_window": WINDOW, "num_hidden_layers": 4, "swiglu_limit": 1.5}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**{**SIZES, **own, **settings}))


def minimax_m2(**settings: Any) -> PreTrainedModel:
    own: dict[str, Any] = {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3}
    own["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return transformers.MiniMaxM2ForCausalLM(transformers.MiniMaxM2Config(**{**SIZES, **own, **settings}))


_GEMMA4: dict[str, Any] = {
    **SIZES,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_hidden_layers": 6,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 5.0,
}


def _gemma4_config(**settings: Any) -> transformers.Gemma4TextConfig:
    """As E2B and E4B are: inputs for each layer, and upper layers without KV."""
    own = {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
    return transformers.Gemma4TextConfig(**{**_GEMMA4, **own, **settings})


def gemma4(**settings: Any) -> PreTrainedModel:
    return transformers.Gemma4ForCausalLM(_gemma4_config(**settings))


def gemma4_large(**settings: Any) -> PreTrainedModel:
    """As 31B is: no values of their own in full layers, which have fewer KV heads."""
    own = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**{**_GEMMA4, **own, **settings}))


def gemma4_moe(**settings: Any) -> PreTrainedModel:
    """As 26B-A4B is."""
    own = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 32}
    own |= {"num_hidden_layers": 3, "layer_types": _GEMMA4["layer_types"][:3]}
    return gemma4_large(**{**own, **settings})


def gemma4_vision() -> PreTrainedModel:
    """As all are published: text inside a model that sees and hears."""
    vision = transformers.Gemma4VisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        patch_size=4,
        pooling_kernel_size=1,
    )
    config = transformers.Gemma4Config(
        text_config=_gemma4_config(), vision_config=vision, audio_config=None, image_token_id=3
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def gemma4_unified(**settings: Any) -> PreTrainedModel:
    """As 12B is."""
    left_out = ("vocab_size_per_layer_input",)
    own = {name: value for name, value in _GEMMA4.items() if name not in left_out}
    own |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    return transformers.Gemma4UnifiedForCausalLM(transformers.Gemma4UnifiedTextConfig(**{**own, **settings}))
