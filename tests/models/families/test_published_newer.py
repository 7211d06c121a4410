"""Models of late 2025 and of 2026, and embedders, with their makers' settings: those that transformers' classes have by
default (Qwen3.5-9B and 35B-A3B, GLM-4.5-Air, Ministral 3 8B), or that model cards and training scripts name. How many
parameters that makes is counted by transformers, on no device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.models.families.test_published_configs import parameters, spec_of

from twostroke.models.families import declared
from twostroke.models.pooled import as_pooled
from twostroke.models.rope_spec import YarnScaling
from twostroke.models.spec import DenseMlp, GatedDeltaNet, MoeSpec, QueryGrowth

_PLAIN: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "use_cache": True}
_QWEN3_5 = {
    **_PLAIN,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
QWEN3_5_9B = {
    **_QWEN3_5,
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "linear_num_value_heads": 32,
    "model_type": "qwen3_5_text",
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
QWEN3_5_27B = {
    **QWEN3_5_9B,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "linear_num_value_heads": 48,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
}
QWEN3_5_35B_A3B = {
    **_QWEN3_5,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "hidden_size": 2048,
    "linear_num_value_heads": 32,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}
GLM_4_5_AIR = {
    **_PLAIN,
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
GLM_4_6 = {
    **GLM_4_5_AIR,
    "first_k_dense_replace": 3,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_hidden_layers": 92,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
MINISTRAL_3_8B = {
    "architectures": ["Ministral3ForCausalLM"],
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 262144,
    "model_type": "ministral3",
    "num_attention_heads": 32,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
        "type": "yarn",
    },
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}
QWEN3_EMBEDDING_0_6B = {
    **_PLAIN,
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151669,
}
EMBEDDING_GEMMA_300M = {
    "architectures": ["Gemma3TextModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 768,
    "intermediate_size": 1152,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4,
    "max_position_embeddings": 2048,
    "model_type": "gemma3_text",
    "num_attention_heads": 3,
    "num_hidden_layers": 24,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "use_bidirectional_attention": True,
    "vocab_size": 262144,
}
BGE_SMALL_EN = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "hidden_act": "gelu",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
BGE_M3 = {
    **BGE_SMALL_EN,
    "architectures": ["XLMRobertaModel"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 8194,
    "model_type": "xlm-roberta",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 250002,
}
GENERATORS = {
    "Qwen3.5-9B": QWEN3_5_9B,
    "Qwen3.5-27B": QWEN3_5_27B,
    "Qwen3.5-35B-A3B": QWEN3_5_35B_A3B,
    "GLM-4.5-Air": GLM_4_5_AIR,
    "GLM-4.6": GLM_4_6,
    "Ministral-3-8B": MINISTRAL_3_8B,
    "Qwen3-Embedding-0.6B": QWEN3_EMBEDDING_0_6B,
}
ENCODERS = {"embeddinggemma-300m": EMBEDDING_GEMMA_300M, "bge-small-en-v1.5": BGE_SMALL_EN, "bge-m3": BGE_M3}


def counted_by_transformers(config: dict[str, Any]) -> int:
    """BERT's pooler is nobody's here: states are pooled as the folder says. A router's correction is a buffer there."""
    built = transformers.AutoConfig.for_model(**config)
    architecture = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = architecture(built)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    is_weight = {name: name in dict(model.named_parameters()) or name.endswith("correction_bias") for name in tensors}
    return sum(found.numel() for name, found in tensors.items() if is_weight[name] and not name.startswith("pooler."))


@pytest.mark.parametrize("name", GENERATORS)
def test_parameters(name: str) -> None:
    config = GENERATORS[name]
    assert parameters(spec_of(config)) == counted_by_transformers(config)
    assert declared(config).not_run is None


@pytest.mark.parametrize("name", ENCODERS)
def test_parameters_of_encoders(name: str) -> None:
    config = ENCODERS[name]
    spec = as_pooled(spec_of(config))
    assert parameters(spec) == counted_by_transformers(config) and not spec.is_causal


# What their makers say, in billions. The layer that drafts is counted there, and is not here.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3.5-9B", 9),
        ("Qwen3.5-27B", 27),
        ("Qwen3.5-35B-A3B", 35),
        ("GLM-4.5-Air", 106),
        ("GLM-4.6", 355),
        ("Ministral-3-8B", 8.4),
        ("Qwen3-Embedding-0.6B", 0.6),
    ],
)
def test_it_is_about_what_the_name_says(name: str, billions: float) -> None:
    assert parameters(spec_of(GENERATORS[name])) / 1e9 == pytest.approx(billions, rel=0.015)


def test_what_each_has_of_its_own() -> None:
    dense, sparse = spec_of(QWEN3_5_27B), spec_of(QWEN3_5_35B_A3B)
    assert dense.layers[0].attention == GatedDeltaNet(16, 48, 128, 128, 4)
    assert dense.layers[3].grouped.output_gate and dense.layers[3].grouped.rope.dim == 64
    assert sparse.moe == MoeSpec(256, 8, 512, shared=DenseMlp(512), shared_gate=True)
    air, larger = spec_of(GLM_4_5_AIR), spec_of(GLM_4_6)
    assert [layer.moe is None for layer in air.layers[:2]] == [True, False] and not air.layers[0].grouped.qk_norm
    assert [layer.moe is None for layer in larger.layers[:4]] == [True, True, True, False]
    assert larger.layers[0].grouped.qk_norm and larger.layers[0].grouped.rope.dim == 64
    assert larger.moe is not None and larger.moe.routing.has_correction and larger.moe.routing.share_scale == 2.5
    ministral = spec_of(MINISTRAL_3_8B).layers[0].grouped
    assert ministral.growth == QueryGrowth(0.1, 16384) and isinstance(ministral.rope.scaling, YarnScaling)


def test_what_embedders_see() -> None:
    gemma = [layer.grouped for layer in spec_of(EMBEDDING_GEMMA_300M).layers]
    assert [one.window for one in gemma[:6]] == [257] * 5 + [None], "512 in all: as many ahead as back, and itself"
    places = spec_of(BGE_M3).places
    assert places is not None and places.max_context == 8192 and spec_of(BGE_SMALL_EN).max_context == 512
