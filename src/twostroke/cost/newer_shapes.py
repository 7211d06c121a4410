"""Models of late 2025 and of 2026 that can be planned by name alone, and those of others that were added with them."""

from __future__ import annotations

from typing import Any

from twostroke.cost.known_shape import QWEN3_5, KnownShape, sizes

_TIED: dict[str, Any] = {"tie_word_embeddings": True}


def _sliding(layers: int, period: int) -> list[str]:
    """Gemma's: of each `period` layers the last sees all."""
    return ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)]


_GEMMA_4: dict[str, Any] = {
    **_TIED,
    "vocab": 262_144,
    "head_dim": 256,
    "global_head_dim": 512,
    "vocab_size_per_layer_input": 262_144,
    "max_position_embeddings": 131_072,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}
_GEMMA_4_SMALL: dict[str, Any] = {**_GEMMA_4, "hidden_size_per_layer_input": 256, "sliding_window": 512}
_GEMMA_4_LARGE: dict[str, Any] = {
    **_GEMMA_4,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262_144,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
}
_GEMMA_4_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}

_QWEN3_5_SMALL: dict[str, Any] = {**QWEN3_5, **_TIED, "linear_num_value_heads": 16}
_QWEN3_5_397B: dict[str, Any] = {
    **QWEN3_5,
    "linear_num_value_heads": 64,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
}
_QWEN3_CODER: dict[str, Any] = {"head_dim": 128, "num_experts_per_tok": 8, "max_position_embeddings": 262_144}

_MINISTRAL_3: dict[str, Any] = {"vocab": 131_072, "head_dim": 128, "max_position_embeddings": 262_144}
_MINIMAX_M2: dict[str, Any] = {
    "head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "rotary_dim": 64,
    "use_qk_norm": True,
    "max_position_embeddings": 196_608,
}
_DEEPSEEK_V2: dict[str, Any] = {
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "max_position_embeddings": 163_840,
}
_GLM_4_7: dict[str, Any] = {
    "head_dim": 128,
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "use_qk_norm": True,
    "max_position_embeddings": 202_752,
}
_DOTS_LLM1: dict[str, Any] = {
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 32_768,
}
_NEMOTRON_H: dict[str, Any] = {
    "vocab": 131_072,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "ssm_state_size": 128,
    "n_groups": 8,
}
_NEMOTRON_H_8B: dict[str, Any] = {
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "mamba_head_dim": 64,
    "max_position_embeddings": 8192,
}
_NEMOTRON_NANO_9B_V2: dict[str, Any] = {
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "mamba_head_dim": 80,
    "max_position_embeddings": 131_072,
}
_GRANITE_4_H: dict[str, Any] = {
    "layer_types": ["attention" if index in (5, 15, 25, 35) else "mamba" for index in range(40)],
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "position_embedding_type": "nope",
    "max_position_embeddings": 131_072,
}
_GRANITE_4_H_SMALL: dict[str, Any] = {
    **_GRANITE_4_H,
    "mamba_n_heads": 128,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "shared_intermediate_size": 1536,
}
_GRANITE_4_H_MICRO: dict[str, Any] = {
    **_GRANITE_4_H,
    "mamba_n_heads": 64,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 8192,
}
_LFM2_350M: dict[str, Any] = {
    "conv_L_cache": 3,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "max_position_embeddings": 128_000,
}

NEWER_SHAPES: dict[str, KnownShape] = {
    "Gemma-2B": KnownShape(
        sizes("gemma", 2048, 16_384, 18, 8, 1, 256_000, **_TIED, head_dim=256, max_position_embeddings=8192)
    ),
    "Gemma-7B": KnownShape(
        sizes("gemma", 3072, 24_576, 28, 16, 16, 256_000, **_TIED, head_dim=256, max_position_embeddings=8192)
    ),
    "Gemma-3-1B": KnownShape(
        sizes("gemma3_text", 1152, 6912, 26, 4, 1, 262_144, **_TIED, head_dim=256, sliding_window=512)
        | {"max_position_embeddings": 32_768}
    ),
    "Gemma-4-E2B": KnownShape(
        sizes("gemma4_text", 1536, 6144, 35, 8, 1, **_GEMMA_4_SMALL, num_kv_shared_layers=20)
        | {"layer_types": _sliding(35, 5), "use_double_wide_mlp": True}
    ),
    "Gemma-4-E4B": KnownShape(
        sizes("gemma4_text", 2560, 10_240, 42, 8, 2, **_GEMMA_4_SMALL, num_kv_shared_layers=18)
        | {"layer_types": _sliding(42, 6), "use_double_wide_mlp": False}
    ),
    "Gemma-4-12B": KnownShape(
        sizes("gemma4_unified_text", 3840, 15_360, 48, 16, 8, **_GEMMA_4_LARGE, num_global_key_value_heads=1)
        | {"layer_types": _sliding(48, 6)}
    ),
    "Gemma-4-26B-A4B": KnownShape(
        sizes("gemma4_text", 2816, 2112, 30, 16, 8, **_GEMMA_4_LARGE, num_global_key_value_heads=2, **_GEMMA_4_EXPERTS)
        | {"layer_types": _sliding(30, 6)}
    ),
    "Gemma-4-31B": KnownShape(
        sizes("gemma4_text", 5376, 21_504, 60, 32, 16, **_GEMMA_4_LARGE, num_global_key_value_heads=4)
        | {"layer_types": _sliding(60, 6)}
    ),
    "Qwen3-Coder-480B-A35B": KnownShape(
        sizes("qwen3_moe", 6144, 8192, 62, 96, 8, 151_936, **_QWEN3_CODER, num_experts=160, moe_intermediate_size=2560)
    ),
    "Qwen3-Coder-30B-A3B": KnownShape(
        sizes("qwen3_moe", 2048, 6144, 48, 32, 4, 151_936, **_QWEN3_CODER, num_experts=128, moe_intermediate_size=768)
    ),
    "Qwen3.5-0.8B": KnownShape(sizes("qwen3_5_text", 1024, 3584, 24, 8, 2, **_QWEN3_5_SMALL)),
    "Qwen3.5-122B-A10B": KnownShape(
        sizes(
            "qwen3_5_moe_text", 3072, 1024, 48, 32, 2, **_QWEN3_5_397B | {"num_experts": 256, "num_experts_per_tok": 8}
        )
    ),
    "Qwen3.5-397B-A17B": KnownShape(sizes("qwen3_5_moe_text", 4096, 1024, 60, 32, 2, **_QWEN3_5_397B)),
    "Phi-4-mini": KnownShape(
        sizes("phi3", 3072, 8192, 32, 24, 8, 200_064, **_TIED, max_position_embeddings=131_072)
        | {"partial_rotary_factor": 0.75}
    ),
    "Ministral-8B": KnownShape(
        sizes("ministral", 4096, 12_288, 36, 32, 8, 131_072, head_dim=128, max_position_embeddings=32_768)
    ),
    "Ministral-3-3B": KnownShape(sizes("ministral3", 3072, 9216, 26, 32, 8, **_MINISTRAL_3, **_TIED)),
    "Ministral-3-14B": KnownShape(sizes("ministral3", 5120, 16_384, 40, 32, 8, **_MINISTRAL_3)),
    "MiniMax-M2": KnownShape(sizes("minimax_m2", 3072, 1536, 62, 48, 8, 200_064, **_MINIMAX_M2), "fp8"),
    "DeepSeek-V2": KnownShape(sizes("deepseek_v2", 5120, 12_288, 60, 128, 128, 102_400, **_DEEPSEEK_V2)),
    "GLM-4-9B-0414": KnownShape(
        sizes("glm4", 4096, 13_696, 40, 32, 2, 151_552, head_dim=128, attention_bias=True)
        | {"partial_rotary_factor": 0.5, "max_position_embeddings": 32_768}
    ),
    "GLM-4.7": KnownShape(sizes("glm4_moe", 5120, 12_288, 92, 96, 8, 151_552, **_GLM_4_7)),
    "dots.llm1": KnownShape(sizes("dots1", 4096, 10_944, 62, 32, 32, 152_064, **_DOTS_LLM1)),
    "Nemotron-H-8B": KnownShape(sizes("nemotron_h", 4096, 21_504, 52, 32, 8, **_NEMOTRON_H, **_NEMOTRON_H_8B)),
    "Nemotron-Nano-9B-v2": KnownShape(
        sizes("nemotron_h", 4480, 15_680, 56, 40, 8, **_NEMOTRON_H, **_NEMOTRON_NANO_9B_V2)
    ),
    "Granite-4.0-H-Micro": KnownShape(
        sizes("granitemoehybrid", 2048, 8192, 40, 32, 8, 100_352, **_TIED, **_GRANITE_4_H_MICRO)
    ),
    "Granite-4.0-H-Small": KnownShape(
        sizes("granitemoehybrid", 4096, 768, 40, 32, 8, 100_352, **_TIED, **_GRANITE_4_H_SMALL)
    ),
    "LFM2-350M": KnownShape(sizes("lfm2", 1024, 6656, 16, 16, 8, 65_536, **_TIED, **_LFM2_350M)),
}
NEWER_ALIASES = {
    "qwen3-coder-next": "Qwen3-Next-80B-A3B",
    "qwen3.6-35b-a3b": "Qwen3.5-35B-A3B",
    "ministral-8b-instruct-2410": "Ministral-8B",
    "nvidia-nemotron-nano-9b-v2": "Nemotron-Nano-9B-v2",
    "nemotron-h-8b-base-8k": "Nemotron-H-8B",
    "dots.llm1.inst": "dots.llm1",
    "dots.llm1.base": "dots.llm1",
}
"""Others of the same sizes, and other names of the same."""
