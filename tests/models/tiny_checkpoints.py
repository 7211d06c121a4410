"""Tiny random checkpoints of every family, made and saved by transformers: what loaders and backends are held against.
Sizes are multiples of 32 and heads multiples of 16, which every backend can run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.models import tiny_families as families
from tests.models import tiny_hybrids as hybrids
from tests.models import tiny_vision as vision
from tests.models.tiny_families import SHARP_ROPE as SHARP_ROPE
from tests.models.tiny_sizes import MAX_CONTEXT as MAX_CONTEXT
from tests.models.tiny_sizes import ORIGINAL_CONTEXT as ORIGINAL_CONTEXT
from tests.models.tiny_sizes import VOCAB_SIZE as VOCAB_SIZE
from tests.models.tiny_sizes import WINDOW
from transformers import PreTrainedModel

_LONG = {"original_max_position_embeddings": ORIGINAL_CONTEXT}
_BUILDERS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": families.llama,
    "llama_tied": lambda: families.llama(tie_word_embeddings=True, num_key_value_heads=4),
    "llama_llama3": lambda: families.llama(rope_parameters=families.LLAMA3_ROPE),
    "llama_linear": lambda: families.llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    "llama_bias": lambda: families.llama(attention_bias=True, num_key_value_heads=1),
    "mistral": families.mistral,
    "ministral": families.ministral,
    "qwen2": lambda: families.qwen2(tie_word_embeddings=True),
    "qwen2_window": lambda: families.qwen2(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": families.qwen3,
    "qwen3_moe": lambda **settings: families.qwen3_moe(norm_topk_prob=True, **settings),
    "qwen3_moe_unnormalised": lambda: families.qwen3_moe(num_experts_per_tok=2),
    "qwen3_moe_mixed": lambda: families.qwen3_moe(mlp_only_layers=[1]),
    "mixtral": families.mixtral,
    "gemma": families.gemma,
    "gemma2": families.gemma2,
    "gemma3": families.gemma3,
    "gemma3_vision": families.gemma3_vision,
    "phi3": lambda: families.phi3(sliding_window=WINDOW),
    "phi3_longrope": lambda: families.phi3(rope_parameters=families.longrope(16), **_LONG),
    "phi3_partial": lambda: families.phi3(
        hidden_size=128, rope_parameters={**families.longrope(16), "partial_rotary_factor": 0.5}, **_LONG
    ),
    "qwen2_moe": families.qwen2_moe,
    "llama_yarn": lambda: families.llama(rope_parameters=families.YARN),
    "deepseek_v2": lambda **settings: families.deepseek_v2(
        topk_method="group_limited_greedy", **families.GROUPS, routed_scaling_factor=2.0, **settings
    ),
    "deepseek_v2_lite": lambda **settings: families.deepseek_v2(q_lora_rank=None, **settings),
    "deepseek_v3": families.deepseek_v3,
    "glm4_moe_lite": families.glm4_moe_lite,
    "mistral4": families.mistral4,
    "mistral3_vision": families.mistral3_vision,
    "glm4_moe": families.glm4_moe,
    "dots1": families.dots1,
    "ministral3": families.ministral3,
    "gpt_oss": families.gpt_oss,
    "minimax_m2": families.minimax_m2,
    "gemma4": families.gemma4,
    "gemma4_large": families.gemma4_large,
    "gemma4_moe": families.gemma4_moe,
    "gemma4_vision": families.gemma4_vision,
    "gemma4_unified": families.gemma4_unified,
    "lfm2": hybrids.lfm2,
    "lfm2_moe": hybrids.lfm2_moe,
    "qwen3_next": hybrids.qwen3_next,
    "qwen3_next_mixed": hybrids.qwen3_next_mixed,
    "qwen3_5": hybrids.qwen3_5,
    "qwen3_5_moe": hybrids.qwen3_5_moe,
    "qwen3_5_vision": hybrids.qwen3_5_vision,
    "granite_hybrid": hybrids.granite_hybrid,
    "granite_hybrid_dense": lambda **settings: hybrids.granite_hybrid(
        **{"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 1, **settings}
    ),
    "nemotron_h": hybrids.nemotron_h,
    "nemotron_h_latent": lambda **settings: hybrids.nemotron_h(
        **{"moe_latent_size": 32, "moe_intermediate_size": 96, **settings}
    ),
    "smollm3": hybrids.smollm3,
    "olmo2": hybrids.olmo2,
    "olmo3": hybrids.olmo3,
    "granite": hybrids.granite,
    "seed_oss": hybrids.seed_oss,
    "ernie4_5": hybrids.ernie4_5,
    "ernie4_5_moe": hybrids.ernie4_5_moe,
    "granite_moe": hybrids.granite_moe,
    "granite_moe_shared": hybrids.granite_moe_shared,
    "glm4": hybrids.glm4,
    "olmoe": hybrids.olmoe,
    "exaone4": hybrids.exaone4,
    "hunyuan_dense": hybrids.hunyuan_dense,
    "hunyuan_moe": hybrids.hunyuan_moe,
    "qwen2_vl": lambda: hybrids.qwen_vl("Qwen2VL", {"embed_dim": 32, "hidden_size": 64}),
    "qwen2_5_vl": lambda: hybrids.qwen_vl("Qwen2_5_VL", {"out_hidden_size": 64}),
    "qwen3_vl": lambda: hybrids.qwen3_vl("Qwen3VL"),
    "qwen3_vl_moe": lambda: hybrids.qwen3_vl(
        "Qwen3VLMoe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=96
    ),
    "llava": vision.llava,
    "llava_next": vision.llava_next,
    "llava_onevision": vision.llava_onevision,
    "internvl": vision.internvl,
    "smolvlm": vision.smolvlm,
    "lfm2_vl": vision.lfm2_vl,
    "glm4v": vision.glm4v,
    "glm4v_moe": vision.glm4v_moe,
}
_BEYOND_HOST = (
    "qwen2_moe",
    "glm4_moe",
    "dots1",
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


TEXT_HALVES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "llava_next", "llava_onevision", "internvl"),
    *("smolvlm", "lfm2_vl", "glm4v", "glm4v_moe"),
)
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
    less_one = variant == "gemma" or variant.startswith(("gemma2", "gemma3", "qwen3_next", "qwen3_5"))
    _randomise(model, norm_centre=0.0 if less_one else 1.0)
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
