"""Tiny random checkpoints of every family, made and saved by transformers: what loaders and backends are held against.
Sizes are multiples of 32 and heads multiples of 16, which every backend can run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB_SIZE = 256
WINDOW = 16
MAX_CONTEXT = 256
ORIGINAL_CONTEXT = 64
"""What the LongRoPE variants were "trained" with."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = {**_SIZES, "head_dim": 32, "num_hidden_layers": 4, "sliding_window": WINDOW}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _longrope(rotary_dim: int) -> dict[str, Any]:
    pairs = range(rotary_dim // 2)
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in pairs],
        "long_factor": [1.5 + 0.5 * i for i in pairs],
    }


def _llama(**settings: Any) -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_SIZES, **settings}))


def _mistral(**settings: Any) -> PreTrainedModel:
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**{**_SIZES, "sliding_window": WINDOW, "head_dim": 32, **settings})
    )


def _qwen2(**settings: Any) -> PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**_SIZES, **settings}))


def _qwen3(**settings: Any) -> PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**_SIZES, "head_dim": 32, **settings}))


def _qwen3_moe(**settings: Any) -> PreTrainedModel:
    own = {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**_SIZES, **own, **settings}))


def _qwen2_moe(**settings: Any) -> PreTrainedModel:
    own = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    own |= {"shared_expert_intermediate_size": 64}
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**{**_SIZES, **own, **settings}))


def _mixtral(**settings: Any) -> PreTrainedModel:
    own = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**_SIZES, **own, **settings}))


def _gemma2(**settings: Any) -> PreTrainedModel:
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


def _gemma3(**settings: Any) -> PreTrainedModel:
    return transformers.Gemma3ForCausalLM(_gemma3_config(**settings))


def _gemma3_vision() -> PreTrainedModel:
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


def _phi3(**settings: Any) -> PreTrainedModel:
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**{**_SIZES, "sliding_window": None, **settings}))


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}
SHARP_ROPE = {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.0}
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
_GROUPS = {"n_group": 4, "topk_group": 2}


def _deepseek_v2(**settings: Any) -> PreTrainedModel:
    own = {**_SIZES, **_LATENT, **settings}
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**own))


def _deepseek_v3(**settings: Any) -> PreTrainedModel:
    own = {**_SIZES, **_LATENT, **_GROUPS, **settings}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**own))


def _glm4_moe_lite(**settings: Any) -> PreTrainedModel:
    own = {**_SIZES, **_LATENT, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, **settings}
    own = {name: value for name, value in own.items() if name not in ("rope_parameters", "first_k_dense_replace")}
    return transformers.Glm4MoeLiteForCausalLM(transformers.Glm4MoeLiteConfig(**own))


def _mistral4(**settings: Any) -> PreTrainedModel:
    # Queries grow from a context on that the tests outgrow.
    ropes = {**_YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3, "mscale_all_dim": 1.0}
    own = {**_SIZES, **_LATENT, **_GROUPS, "first_k_dense_replace": 0, "rope_parameters": ropes, **settings}
    return transformers.Mistral4ForCausalLM(transformers.Mistral4Config(**own))


def _glm4_moe(**settings: Any) -> PreTrainedModel:
    own = {name: value for name, value in _LATENT.items() if "lora" not in name and "head_dim" not in name}
    own |= {"head_dim": 32, "attention_bias": True, "use_qk_norm": True, "n_group": 1, "topk_group": 1}
    own |= {"num_key_value_heads": 2, "routed_scaling_factor": 1.5}
    own["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**{**_SIZES, **own, **settings}))


def _ministral3(**settings: Any) -> PreTrainedModel:
    ropes = {**_YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
    own = {"head_dim": 32, "rope_parameters": ropes}
    return transformers.Ministral3ForCausalLM(transformers.Ministral3Config(**{**_SIZES, **own, **settings}))


def _mistral3_vision() -> PreTrainedModel:
    """As Mistral Small 4 is published: its text half is a Mistral 4."""
    vision = transformers.PixtralVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16
    )
    config = transformers.Mistral3Config(
        text_config=_mistral4().config, vision_config=vision, image_token_index=3, tie_word_embeddings=False
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def _gpt_oss(**settings: Any) -> PreTrainedModel:
    ropes = {**_YARN, "truncate": False}
    own = {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3, "rope_parameters": ropes}
    # A limit low enough for gates to feel it.
    own |= {"sliding_window": WINDOW, "num_hidden_layers": 4, "swiglu_limit": 1.5}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**{**_SIZES, **own, **settings}))


def _minimax_m2(**settings: Any) -> PreTrainedModel:
    own: dict[str, Any] = {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3}
    own["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return transformers.MiniMaxM2ForCausalLM(transformers.MiniMaxM2Config(**{**_SIZES, **own, **settings}))


_GEMMA4: dict[str, Any] = {
    **_SIZES,
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


def _gemma4(**settings: Any) -> PreTrainedModel:
    return transformers.Gemma4ForCausalLM(_gemma4_config(**settings))


def _gemma4_large(**settings: Any) -> PreTrainedModel:
    """As 31B is: no values of their own in full layers, which have fewer KV heads."""
    own = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**{**_GEMMA4, **own, **settings}))


def _gemma4_moe(**settings: Any) -> PreTrainedModel:
    """As 26B-A4B is."""
    own = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 32}
    own |= {"num_hidden_layers": 3, "layer_types": _GEMMA4["layer_types"][:3]}
    return _gemma4_large(**{**own, **settings})


def _gemma4_vision() -> PreTrainedModel:
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


def _gemma4_unified(**settings: Any) -> PreTrainedModel:
    """As 12B is."""
    left_out = ("vocab_size_per_layer_input",)
    own = {name: value for name, value in _GEMMA4.items() if name not in left_out}
    own |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    return transformers.Gemma4UnifiedForCausalLM(transformers.Gemma4UnifiedTextConfig(**{**own, **settings}))


def _lfm2(**settings: Any) -> PreTrainedModel:
    own = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}
    # Two thirds of 150, rounded up to a multiple of 32.
    own |= {"intermediate_size": 150, "block_multiple_of": 32, "tie_word_embeddings": False}
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**{**_SIZES, **own, **settings}))


def _lfm2_moe(**settings: Any) -> PreTrainedModel:
    own = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1}
    own |= {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "conv_L_cache": 4}
    return transformers.Lfm2MoeForCausalLM(transformers.Lfm2MoeConfig(**{**_SIZES, **own, **settings}))


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


def _qwen3_next(**settings: Any) -> PreTrainedModel:
    own = {**_SIZES, **_DELTA_NET, **_SHARED_EXPERT, **settings}
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**own))


def _qwen3_next_mixed(**settings: Any) -> PreTrainedModel:
    return _qwen3_next(mlp_only_layers=[1], norm_topk_prob=False, linear_value_head_dim=16, **settings)


def _qwen3_5(**settings: Any) -> PreTrainedModel:
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**{**_SIZES, **_DELTA_NET, **settings}))


def _qwen3_5_moe(**settings: Any) -> PreTrainedModel:
    own = {**_SIZES, **_DELTA_NET, **_SHARED_EXPERT, **settings}
    own.pop("intermediate_size")
    return transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**own))


def _qwen3_5_vision() -> PreTrainedModel:
    """As Qwen3.5 is published: the nested config, the prefixed names, the tensors to leave out."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(
        text_config=_qwen3_5().config.to_dict(),
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


def _granite_hybrid(**settings: Any) -> PreTrainedModel:
    own = {**_SIZES, **_MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, **settings}
    return transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**own))


def _nemotron_h(**settings: Any) -> PreTrainedModel:
    kinds = ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"]
    own = {"layers_block_type": kinds, "head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2}
    own |= {"ssm_state_size": 32, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    # Steps short enough for some to be lengthened.
    own |= {"moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 1.5, "time_step_min": 0.3}
    return transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**{**_SIZES, **own, **settings}))


def _olmo2(**settings: Any) -> PreTrainedModel:
    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**{**_SIZES, **settings}))


def _olmo3(**settings: Any) -> PreTrainedModel:
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    ropes = {"sliding_attention": plain, "full_attention": _YARN}
    own = {"sliding_window": WINDOW, "num_hidden_layers": 4, "rope_parameters": ropes}
    return transformers.Olmo3ForCausalLM(transformers.Olmo3Config(**{**_SIZES, **own, **settings}))


def _granite(**settings: Any) -> PreTrainedModel:
    scales = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1}
    own = {**scales, "logits_scaling": 1.5, "rms_norm_eps": 1e-3}  # an epsilon that is felt
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**{**_SIZES, **own, **settings}))


def _seed_oss(**settings: Any) -> PreTrainedModel:
    return transformers.SeedOssForCausalLM(transformers.SeedOssConfig(**{**_SIZES, "head_dim": 32, **settings}))


def _ernie4_5(**settings: Any) -> PreTrainedModel:
    return transformers.Ernie4_5ForCausalLM(transformers.Ernie4_5Config(**{**_SIZES, "head_dim": 32, **settings}))


def _ernie4_5_moe(**settings: Any) -> PreTrainedModel:
    own = {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 2, "moe_intermediate_size": 32}
    own |= {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}
    return transformers.Ernie4_5_MoeForCausalLM(transformers.Ernie4_5_MoeConfig(**{**_SIZES, **own, **settings}))


def _granite_moe(**settings: Any) -> PreTrainedModel:
    scales = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1}
    own = {**scales, "logits_scaling": 1.5, "num_local_experts": 6, "num_experts_per_tok": 2}
    return transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**{**_SIZES, **own, **settings}))


def _granite_moe_shared(**settings: Any) -> PreTrainedModel:
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64, "logits_scaling": 2.0}
    config = transformers.GraniteMoeSharedConfig(**{**_SIZES, **own, **settings})
    return transformers.GraniteMoeSharedForCausalLM(config)


def _glm4(**settings: Any) -> PreTrainedModel:
    own = {"head_dim": 32, "attention_bias": True, "pad_token_id": 0}
    own["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return transformers.Glm4ForCausalLM(transformers.Glm4Config(**{**_SIZES, **own, **settings}))


def _olmoe(**settings: Any) -> PreTrainedModel:
    own = {"num_experts": 6, "num_experts_per_tok": 2}
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**{**_SIZES, **own, **settings}))


def _exaone4(**settings: Any) -> PreTrainedModel:
    own = {"head_dim": 32, "sliding_window": WINDOW, "sliding_window_pattern": 4, "num_hidden_layers": 5}
    own["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    return transformers.Exaone4ForCausalLM(transformers.Exaone4Config(**{**_SIZES, **own, **settings}))


_ALPHA_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}


def _hunyuan_dense(**settings: Any) -> PreTrainedModel:
    own = {"head_dim": 32, "rope_parameters": _ALPHA_ROPE}
    return transformers.HunYuanDenseV1ForCausalLM(transformers.HunYuanDenseV1Config(**{**_SIZES, **own, **settings}))


def _hunyuan_moe(**settings: Any) -> PreTrainedModel:
    own = {"head_dim": 32, "rope_parameters": _ALPHA_ROPE, "num_experts": 6, "moe_topk": 2}
    return transformers.HunYuanMoEV1ForCausalLM(transformers.HunYuanMoEV1Config(**{**_SIZES, **own, **settings}))


def _qwen_vl(name: str, vision: dict[str, Any], **settings: Any) -> PreTrainedModel:
    """Text inside a model that sees images."""
    section = {"mrope_section": [2, 3, 3], "rope_type": "default", "rope_theta": 1e4}
    text = {**_SIZES, "rope_parameters": section, **settings}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 8, "intermediate_size": 32, **vision}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def _qwen3_vl(name: str, **settings: Any) -> PreTrainedModel:
    vision = {"out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    return _qwen_vl(name, vision, head_dim=32, **settings)


def _smollm3(**settings: Any) -> PreTrainedModel:
    own = {"num_hidden_layers": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    return transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**{**_SIZES, **own, **settings}))


_LONG = {"original_max_position_embeddings": ORIGINAL_CONTEXT}
_BUILDERS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": _llama,
    "llama_tied": lambda: _llama(tie_word_embeddings=True, num_key_value_heads=4),
    "llama_llama3": lambda: _llama(rope_parameters=_LLAMA3_ROPE),
    "llama_linear": lambda: _llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    "llama_bias": lambda: _llama(attention_bias=True, num_key_value_heads=1),
    "mistral": _mistral,
    "qwen2": lambda: _qwen2(tie_word_embeddings=True),
    "qwen2_window": lambda: _qwen2(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": _qwen3,
    "qwen3_moe": lambda **settings: _qwen3_moe(norm_topk_prob=True, **settings),
    "qwen3_moe_unnormalised": lambda: _qwen3_moe(num_experts_per_tok=2),
    "qwen3_moe_mixed": lambda: _qwen3_moe(mlp_only_layers=[1]),
    "mixtral": _mixtral,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_vision": _gemma3_vision,
    "phi3": lambda: _phi3(sliding_window=WINDOW),
    "phi3_longrope": lambda: _phi3(rope_parameters=_longrope(16), **_LONG),
    "phi3_partial": lambda: _phi3(
        hidden_size=128, rope_parameters={**_longrope(16), "partial_rotary_factor": 0.5}, **_LONG
    ),
    "qwen2_moe": _qwen2_moe,
    "llama_yarn": lambda: _llama(rope_parameters=_YARN),
    "deepseek_v2": lambda **settings: _deepseek_v2(
        topk_method="group_limited_greedy", **_GROUPS, routed_scaling_factor=2.0, **settings
    ),
    "deepseek_v2_lite": lambda **settings: _deepseek_v2(q_lora_rank=None, **settings),
    "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _glm4_moe_lite,
    "mistral4": _mistral4,
    "mistral3_vision": _mistral3_vision,
    "glm4_moe": _glm4_moe,
    "ministral3": _ministral3,
    "gpt_oss": _gpt_oss,
    "minimax_m2": _minimax_m2,
    "gemma4": _gemma4,
    "gemma4_large": _gemma4_large,
    "gemma4_moe": _gemma4_moe,
    "gemma4_vision": _gemma4_vision,
    "gemma4_unified": _gemma4_unified,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_next_mixed": _qwen3_next_mixed,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_5_vision": _qwen3_5_vision,
    "granite_hybrid": _granite_hybrid,
    "granite_hybrid_dense": lambda **settings: _granite_hybrid(
        **{"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 1, **settings}
    ),
    "nemotron_h": _nemotron_h,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "granite": _granite,
    "seed_oss": _seed_oss,
    "ernie4_5": _ernie4_5,
    "ernie4_5_moe": _ernie4_5_moe,
    "granite_moe": _granite_moe,
    "granite_moe_shared": _granite_moe_shared,
    "glm4": _glm4,
    "olmoe": _olmoe,
    "exaone4": _exaone4,
    "hunyuan_dense": _hunyuan_dense,
    "hunyuan_moe": _hunyuan_moe,
    "qwen2_vl": lambda: _qwen_vl("Qwen2VL", {"embed_dim": 32, "hidden_size": 64}),
    "qwen2_5_vl": lambda: _qwen_vl("Qwen2_5_VL", {"out_hidden_size": 64}),
    "qwen3_vl": lambda: _qwen3_vl("Qwen3VL"),
    "qwen3_vl_moe": lambda: _qwen3_vl("Qwen3VLMoe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=96),
}
_BEYOND_HOST = (
    "qwen2_moe",
    "glm4_moe",
    "ministral3",
    "deepseek",
    "glm4_moe_lite",
    "mistral4",
    "mistral3_vision",
    "gpt_oss",
    "minimax_m2",
    "gemma4",
    "lfm2",
    "qwen3_next",
    "qwen3_5",
    "granite_hybrid",
    "nemotron_h",
    "olmo",
    "smollm3",
    "exaone4",
    "hunyuan",
)
"""Families that not every backend computes."""


def variants() -> list[str]:
    return list(_BUILDERS)


TEXT_HALVES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Those that are others once they are loaded."""


def uniform_variants() -> list[str]:
    """Those whose layers have the same sizes, and that every backend computes."""
    others = ("qwen3_moe_mixed", "ernie4_5_moe", *TEXT_HALVES)
    return [variant for variant in _BUILDERS if variant not in others and not variant.startswith(_BEYOND_HOST)]


def dense_variants() -> list[str]:
    """Those without a mixture of experts."""
    return [variant for variant in uniform_variants() if "moe" not in variant and variant != "mixtral"]


def cuda_variants() -> list[str]:
    """Those that the CUDA backend computes: all."""
    return variants()


def cpu_variants() -> list[str]:
    """Those that the CPU backend computes: all."""
    return variants()


def latent_variants() -> list[str]:
    return ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite", "mistral4", "mistral3_vision"]


def make_tiny(variant: str, folder: Path, **changes: Any) -> tuple[Path, PreTrainedModel]:
    """A random model, saved as safetensors in `folder` and returned as transformers runs it (float32, eager)."""
    torch.manual_seed(len(variant) * 1000 + sum(map(ord, variant)))
    builder = _BUILDERS[variant]
    model = builder(**changes) if changes else builder()
    model = model.eval()
    model.set_attn_implementation("eager")
    less_one = ("gemma2", "gemma3", "qwen3_next", "qwen3_5")
    _randomise(model, norm_centre=0.0 if variant.startswith(less_one) else 1.0)
    model.save_pretrained(folder)
    return folder, model


def _randomise(model: PreTrainedModel, norm_centre: float) -> None:
    """Every weight matters: a fresh model's norms are all ones, its biases zero and its logits nearly flat."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name:
                plain = "linear_attn.norm" in name  # a delta net's own is stored as it is
                parameter.copy_((1.0 if plain else norm_centre) + 0.2 * noise)
            elif name.endswith("A_log"):
                parameter.copy_(noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            elif "embed" in name:
                parameter.copy_(0.3 * noise)
            elif name.endswith("scale"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("sinks"):
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn_like(buffer))
            elif name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn_like(buffer))


def make_classic(folder: Path) -> None:
    """Rewrite a saved config.json in the manner of transformers 4, which most models on the Hub still have."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    ropes = config.pop("rope_parameters")
    config.pop("layer_types", None)
    config["torch_dtype"] = config.pop("dtype", "float32")
    if "full_attention" in ropes:
        config["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        ropes = ropes["full_attention"]
        config["sliding_window_pattern"] = 3
    config["rope_theta"] = ropes.pop("rope_theta")
    if "partial_rotary_factor" in ropes:
        config["partial_rotary_factor"] = ropes.pop("partial_rotary_factor")
    kind = ropes.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **ropes}
    path.write_text(json.dumps(config))


def transformers_logits(model: PreTrainedModel, token_ids: list[int]) -> Any:
    """float32 [num_tokens, vocab] as a numpy array."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float().numpy()


def exact_logits(model: PreTrainedModel, token_ids: list[int]) -> Any:
    """The same computed in float64: transformers' own rounding in float32 is up to 1.3e-4 in delta nets, by machine."""
    model.set_experts_implementation("eager")  # grouped products take no float64
    try:
        return transformers_logits(model.double(), token_ids)
    finally:
        model.float()
