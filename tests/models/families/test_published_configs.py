"""The settings of well-known models, as their makers published them: what the Hub holds is not always what the current
transformers would write."""

from __future__ import annotations

from typing import Any

import pytest

from twostroke.models.families import family_of_config
from twostroke.models.families.fields import Fields
from twostroke.models.rope_spec import LinearScaling, Llama3Scaling, LongRopeScaling
from twostroke.models.spec import DenseMlp, ModelSpec, MoeSpec


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return family_of_config(config["architectures"][0]).spec_from_config(Fields("config.json", config))


def parameters(spec: ModelSpec) -> int:
    total = 0
    for shape in spec.tensor_shapes().values():
        total += shape[0] * (shape[1] if len(shape) > 1 else 1)
    return total


LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN2_5_0_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
GEMMA_2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
PHI_3_MINI_4K = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
PHI_3_MINI_128K = {
    **PHI_3_MINI_4K,
    "max_position_embeddings": 131072,
    "rope_scaling": {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "sliding_window": 262144,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


# What their makers say of them, in billions.
@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (LLAMA_3_2_1B, 1.236),
        (LLAMA_2_7B, 6.738),
        (QWEN2_5_0_5B, 0.494),
        (QWEN3_0_6B, 0.596),
        (MISTRAL_7B, 7.242),
        (GEMMA_2_2B, 2.614),
        (GEMMA_3_4B, 3.880),
        (PHI_3_MINI_4K, 3.821),
        (QWEN3_30B_A3B, 30.532),
        (MIXTRAL_8X7B, 46.703),
    ],
)
def test_the_spec_has_the_published_number_of_parameters(config: dict[str, Any], billions: float) -> None:
    assert parameters(spec_of(config)) / 1e9 == pytest.approx(billions, abs=0.001)


def test_ropes() -> None:
    assert spec_of(LLAMA_3_2_1B).layers[0].grouped.rope.scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert spec_of(LLAMA_2_7B).layers[0].grouped.rope.theta == 10000.0
    assert spec_of(QWEN3_0_6B).layers[0].grouped.rope.theta == 1e6
    long = spec_of(PHI_3_MINI_128K).layers[0].grouped.rope.scaling
    assert isinstance(long, LongRopeScaling)
    assert long.attention_factor == pytest.approx(1.1902, abs=1e-4)
    assert long.original_max_context == 4096
    gemma = spec_of(GEMMA_3_4B).layers
    assert (gemma[0].grouped.rope.theta, gemma[0].grouped.rope.scaling) == (10000.0, None)
    assert (gemma[5].grouped.rope.theta, gemma[5].grouped.rope.scaling) == (1e6, LinearScaling(8.0))


def test_windows() -> None:
    assert {layer.window for layer in spec_of(LLAMA_3_2_1B).layers} == {None}
    assert {layer.window for layer in spec_of(QWEN2_5_0_5B).layers} == {None}
    assert {layer.window for layer in spec_of(MISTRAL_7B).layers} == {4096}
    assert [layer.window for layer in spec_of(GEMMA_2_2B).layers[:3]] == [4096, None, 4096]
    assert [layer.window for layer in spec_of(GEMMA_3_4B).layers[3:7]] == [1024, 1024, None, 1024]
    assert {layer.window for layer in spec_of(PHI_3_MINI_4K).layers} == {2047}
    # A window wider than the context is none.
    assert {layer.window for layer in spec_of(PHI_3_MINI_128K).layers} == {None}


def test_what_gemma_adds() -> None:
    spec = spec_of(GEMMA_2_2B)
    assert {layer.grouped.softcap for layer in spec.layers} == {50.0} and spec.logits_softcap == 30.0
    assert {layer.mlp for layer in spec.layers} == {DenseMlp(9216, "gelu_tanh")}
    assert all(layer.sandwich_norms for layer in spec.layers)
    assert spec.embedding_scale == pytest.approx(48.0)
    assert spec.tied_embeddings
    for layer in spec_of(GEMMA_3_4B).layers:
        assert layer.grouped.softcap is None
        assert layer.grouped.qk_norm


def test_experts() -> None:
    assert {layer.mlp for layer in spec_of(QWEN3_30B_A3B).layers} == {spec_of(QWEN3_30B_A3B).moe}
    assert spec_of(QWEN3_30B_A3B).moe == MoeSpec(128, 8, 768, normalise_weights=True)
    assert spec_of({**QWEN3_30B_A3B, "norm_topk_prob": None}).moe == MoeSpec(128, 8, 768, normalise_weights=False)
    assert spec_of(MIXTRAL_8X7B).moe == MoeSpec(8, 2, 14336, normalise_weights=True)
    assert spec_of(QWEN3_0_6B).moe is None
