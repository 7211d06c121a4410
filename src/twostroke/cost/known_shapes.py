"""Models that can be planned by name alone, with nothing on disk: the sizes in their published config.json files, and
what their weights are published in."""

from __future__ import annotations

import re
from typing import Any

from twostroke.cost.known_shape import QWEN3_5, KnownShape
from twostroke.cost.known_shape import sizes as _config
from twostroke.cost.newer_shapes import NEWER_ALIASES, NEWER_SHAPES


def find_known_shape(name: str) -> KnownShape | None:
    """Whatever its case, spaces and dashes; an organisation before it and "instruct" behind it say nothing of size."""
    return _BY_KEY.get(_key(name))


def _key(name: str) -> str:
    key = re.sub(r"[\s_-]+", "", name.lower().rpartition("/")[2])
    key = re.sub(r"(instruct|reasoning|chat|base|it)?(2507|2512|v0\.\d)?$", "", key)
    return key.removeprefix("meta")


_LLAMA3 = {"vocab": 128_256, "max_position_embeddings": 131_072}
_QWEN25 = {"max_position_embeddings": 32_768}
_QWEN3 = {"vocab": 151_936, "head_dim": 128, "max_position_embeddings": 40_960}
_QWEN3_MOE = {**_QWEN3, "num_experts": 128, "num_experts_per_tok": 8}
_GEMMA3 = {"vocab": 262_208, "sliding_window": 1024, "max_position_embeddings": 131_072, "tie_word_embeddings": True}
_SMOLLM2 = {"vocab": 49_152, "tie_word_embeddings": True, "max_position_embeddings": 8192}
_GPT_OSS = {
    "vocab": 201_088,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
}
_TIED = {"tie_word_embeddings": True}
_DEEPSEEK_V3 = {
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163_840,
}

_DEEPSEEK_V2_LITE = {
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163_840,
}
_KIMI_K2 = {**_DEEPSEEK_V3, "n_routed_experts": 384, "first_k_dense_replace": 1, "max_position_embeddings": 131_072}
_GLM_FLASH = {
    **_DEEPSEEK_V3,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 202_752,
}
_MISTRAL_SMALL_4 = {
    **_DEEPSEEK_V3,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "max_position_embeddings": 1_048_576,
}

_LFM2: dict[str, Any] = {"vocab": 65_536, "max_position_embeddings": 128_000, "conv_L_cache": 3}
_LFM2_MOE: dict[str, Any] = {
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1792,
    "layer_types": ["full_attention" if index in (2, 6, 10, 14, 18, 21) else "conv" for index in range(24)],
}
_QWEN3_NEXT: dict[str, Any] = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262_144,
}
_QWEN3_5_MOE: dict[str, Any] = {
    **QWEN3_5,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_GLM_AIR: dict[str, Any] = {
    "vocab": 151_552,
    "head_dim": 128,
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 131_072,
}
_GLM: dict[str, Any] = {
    **_GLM_AIR,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "use_qk_norm": True,
}
_MINISTRAL_3: dict[str, Any] = {"head_dim": 128, "max_position_embeddings": 262_144}
_GRANITE_4_TINY: dict[str, Any] = {
    "layer_types": ["attention" if index in (5, 15, 25, 35) else "mamba" for index in range(40)],
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "shared_intermediate_size": 1024,
    "position_embedding_type": "nope",
    "max_position_embeddings": 131_072,
}
_NEMOTRON_3_NANO: dict[str, Any] = {
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "max_position_embeddings": 262_144,
}
_NEMOTRON_3_SUPER: dict[str, Any] = {
    **_NEMOTRON_3_NANO,
    "hybrid_override_pattern": "MEMEMEM*" + "EMEMEMEM*" * 2 + "EMEMEMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 128,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376,
    "moe_latent_size": 1024,
}

KNOWN_SHAPES: dict[str, KnownShape] = {
    "SmolLM2-135M": KnownShape(_config("llama", 576, 1536, 30, 9, 3, **_SMOLLM2)),
    "SmolLM2-360M": KnownShape(_config("llama", 960, 2560, 32, 15, 5, **_SMOLLM2)),
    "SmolLM2-1.7B": KnownShape(_config("llama", 2048, 8192, 24, 32, 32, **_SMOLLM2)),
    "Llama-3.2-1B": KnownShape(_config("llama", 2048, 8192, 16, 32, 8, **_LLAMA3, **_TIED)),
    "Llama-3.2-3B": KnownShape(_config("llama", 3072, 8192, 28, 24, 8, **_LLAMA3, **_TIED)),
    "Llama-3.1-8B": KnownShape(_config("llama", 4096, 14_336, 32, 32, 8, **_LLAMA3)),
    "Llama-3.1-70B": KnownShape(_config("llama", 8192, 28_672, 80, 64, 8, **_LLAMA3)),
    "Llama-3.3-70B": KnownShape(_config("llama", 8192, 28_672, 80, 64, 8, **_LLAMA3)),
    "Llama-3.1-405B": KnownShape(_config("llama", 16_384, 53_248, 126, 128, 8, **_LLAMA3)),
    "Qwen2.5-0.5B": KnownShape(_config("qwen2", 896, 4864, 24, 14, 2, 151_936, **_QWEN25, **_TIED)),
    "Qwen2.5-1.5B": KnownShape(_config("qwen2", 1536, 8960, 28, 12, 2, 151_936, **_QWEN25, **_TIED)),
    "Qwen2.5-3B": KnownShape(_config("qwen2", 2048, 11_008, 36, 16, 2, 151_936, **_QWEN25, **_TIED)),
    "Qwen2.5-7B": KnownShape(_config("qwen2", 3584, 18_944, 28, 28, 4, 152_064, **_QWEN25)),
    "Qwen2.5-14B": KnownShape(_config("qwen2", 5120, 13_824, 48, 40, 8, 152_064, **_QWEN25)),
    "Qwen2.5-32B": KnownShape(_config("qwen2", 5120, 27_648, 64, 40, 8, 152_064, **_QWEN25)),
    "Qwen2.5-72B": KnownShape(_config("qwen2", 8192, 29_568, 80, 64, 8, 152_064, **_QWEN25)),
    "Qwen3-0.6B": KnownShape(_config("qwen3", 1024, 3072, 28, 16, 8, **_QWEN3, **_TIED)),
    "Qwen3-1.7B": KnownShape(_config("qwen3", 2048, 6144, 28, 16, 8, **_QWEN3, **_TIED)),
    "Qwen3-4B": KnownShape(_config("qwen3", 2560, 9728, 36, 32, 8, **_QWEN3, **_TIED)),
    "Qwen3-8B": KnownShape(_config("qwen3", 4096, 12_288, 36, 32, 8, **_QWEN3)),
    "Qwen3-14B": KnownShape(_config("qwen3", 5120, 17_408, 40, 40, 8, **_QWEN3)),
    "Qwen3-32B": KnownShape(_config("qwen3", 5120, 25_600, 64, 64, 8, **_QWEN3)),
    "Qwen3-30B-A3B": KnownShape(_config("qwen3_moe", 2048, 6144, 48, 32, 4, **_QWEN3_MOE, moe_intermediate_size=768)),
    "Qwen3-235B-A22B": KnownShape(
        _config("qwen3_moe", 4096, 12_288, 94, 64, 4, **_QWEN3_MOE, moe_intermediate_size=1536)
    ),
    "Mistral-7B": KnownShape(_config("mistral", 4096, 14_336, 32, 32, 8, 32_768, max_position_embeddings=32_768)),
    "Mistral-Nemo-12B": KnownShape(
        _config("mistral", 5120, 14_336, 40, 32, 8, 131_072, head_dim=128, max_position_embeddings=131_072)
    ),
    "Mistral-Small-24B": KnownShape(
        _config("mistral", 5120, 32_768, 40, 32, 8, 131_072, head_dim=128, max_position_embeddings=32_768)
    ),
    "Mixtral-8x7B": KnownShape(
        _config("mixtral", 4096, 14_336, 32, 32, 8, 32_000, num_local_experts=8, num_experts_per_tok=2)
        | {"max_position_embeddings": 32_768}
    ),
    "Mixtral-8x22B": KnownShape(
        _config("mixtral", 6144, 16_384, 56, 48, 8, 32_768, num_local_experts=8, num_experts_per_tok=2)
        | {"max_position_embeddings": 65_536}
    ),
    "Gemma-3-4B": KnownShape(_config("gemma3_text", 2560, 10_240, 34, 8, 4, head_dim=256, **_GEMMA3)),
    "Gemma-3-12B": KnownShape(_config("gemma3_text", 3840, 15_360, 48, 16, 8, head_dim=256, **_GEMMA3)),
    "Gemma-3-27B": KnownShape(_config("gemma3_text", 5376, 21_504, 62, 32, 16, head_dim=128, **_GEMMA3)),
    "Phi-4": KnownShape(_config("phi3", 5120, 17_920, 40, 40, 10, 100_352, max_position_embeddings=16_384)),
    "DeepSeek-V3": KnownShape(_config("deepseek_v3", 7168, 18_432, 61, 128, 128, 129_280, **_DEEPSEEK_V3), "fp8"),
    "DeepSeek-V2-Lite": KnownShape(_config("deepseek_v2", 2048, 10_944, 27, 16, 16, 102_400, **_DEEPSEEK_V2_LITE)),
    "Kimi-K2": KnownShape(_config("kimi_k2", 7168, 18_432, 61, 64, 64, 163_840, **_KIMI_K2), "fp8"),
    "GLM-4.7-Flash": KnownShape(_config("glm4_moe_lite", 2048, 10_240, 47, 20, 20, 154_880, **_GLM_FLASH)),
    "Mistral-Small-4": KnownShape(_config("mistral4", 4096, 12_288, 36, 32, 32, 131_072, **_MISTRAL_SMALL_4), "fp8"),
    "gpt-oss-20b": KnownShape(_config("gpt_oss", 2880, 2880, 24, 64, 8, **_GPT_OSS, num_local_experts=32), "mxfp4"),
    "gpt-oss-120b": KnownShape(_config("gpt_oss", 2880, 2880, 36, 64, 8, **_GPT_OSS, num_local_experts=128), "mxfp4"),
    "LFM2-1.2B": KnownShape(
        _config("lfm2", 2048, 12_288, 16, 32, 8, **_LFM2, **_TIED, full_attn_idxs=[2, 5, 8, 10, 12, 14])
    ),
    "LFM2-8B-A1B": KnownShape(_config("lfm2_moe", 2048, 7168, 24, 32, 8, **_LFM2, **_TIED, **_LFM2_MOE)),
    "Qwen3-Next-80B-A3B": KnownShape(_config("qwen3_next", 2048, 5120, 48, 16, 2, 151_936, **_QWEN3_NEXT)),
    "Qwen3.5-9B": KnownShape(_config("qwen3_5_text", 4096, 12_288, 32, 16, 4, **QWEN3_5)),
    "Qwen3.5-27B": KnownShape(
        _config("qwen3_5_text", 5120, 17_408, 64, 24, 4, **QWEN3_5 | {"linear_num_value_heads": 48})
    ),
    "Qwen3.5-35B-A3B": KnownShape(_config("qwen3_5_moe_text", 2048, 512, 40, 16, 2, **_QWEN3_5_MOE)),
    "GLM-4.5-Air": KnownShape(_config("glm4_moe", 4096, 10_944, 46, 96, 8, **_GLM_AIR)),
    "GLM-4.5": KnownShape(_config("glm4_moe", 5120, 12_288, 92, 96, 8, **_GLM)),
    "GLM-4.6": KnownShape(_config("glm4_moe", 5120, 12_288, 92, 96, 8, **_GLM | {"max_position_embeddings": 202_752})),
    "Ministral-3-8B": KnownShape(_config("ministral3", 4096, 14_336, 34, 32, 8, 131_072, **_MINISTRAL_3)),
    "Granite-4.0-H-Tiny": KnownShape(
        _config("granitemoehybrid", 1536, 512, 40, 12, 4, 100_352, **_TIED, **_GRANITE_4_TINY)
    ),
    "Nemotron-3-Nano-30B-A3B": KnownShape(_config("nemotron_h", 2688, 1856, 52, 32, 2, 131_072, **_NEMOTRON_3_NANO)),
    "Nemotron-3-Super-120B-A12B": KnownShape(
        _config("nemotron_h", 4096, 2688, 88, 32, 2, 131_072, **_NEMOTRON_3_SUPER)
    ),
}

KNOWN_SHAPES |= NEWER_SHAPES

_ALIASES = {
    "llama-3-8b": "Llama-3.1-8B",
    "llama-3-70b": "Llama-3.1-70B",
    "deepseek-r1": "DeepSeek-V3",
    "deepseek-v3.1": "DeepSeek-V3",
    **NEWER_ALIASES,
}
_BY_KEY = {_key(name): shape for name, shape in KNOWN_SHAPES.items()}
_BY_KEY |= {_key(alias): KNOWN_SHAPES[name] for alias, name in _ALIASES.items()}
