"""Gemma 4 and MiniMax M2 as their makers published them. Sizes of models are those of their cards."""

from __future__ import annotations

from typing import Any

import pytest
from tests.models.families.test_published_configs import parameters, spec_of

from twostroke.cost.config_shape import dimensions_from_config, shape_from_config
from twostroke.models.rope_spec import ProportionalScaling
from twostroke.models.spec import DenseMlp, LayerInput, Routing

_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": False,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": None,
    "use_cache": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}


def _gemma4(period: int, **own: Any) -> dict[str, Any]:
    layers = range(own["num_hidden_layers"])
    kinds = ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in layers]
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "image_token_id": 258880,
        "text_config": {**_TEXT, "layer_types": kinds, **own},
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 768, "num_hidden_layers": 16},
    }


E2B = _gemma4(
    5,
    hidden_size=1536,
    hidden_size_per_layer_input=256,
    intermediate_size=6144,
    num_attention_heads=8,
    num_hidden_layers=35,
    num_key_value_heads=1,
    num_kv_shared_layers=20,
    sliding_window=512,
    use_double_wide_mlp=True,
)
E4B = _gemma4(
    6,
    hidden_size=2560,
    hidden_size_per_layer_input=256,
    intermediate_size=10240,
    num_attention_heads=8,
    num_hidden_layers=42,
    num_key_value_heads=2,
    num_kv_shared_layers=18,
    sliding_window=512,
    use_double_wide_mlp=False,
)
_LARGE: dict[str, Any] = {
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}
LARGE_31B = _gemma4(
    6,
    **_LARGE,
    hidden_size=5376,
    intermediate_size=21504,
    num_attention_heads=32,
    num_global_key_value_heads=4,
    num_hidden_layers=60,
    num_key_value_heads=16,
)
MOE_26B = _gemma4(
    6,
    **_LARGE,
    enable_moe_block=True,
    hidden_size=2816,
    intermediate_size=2112,
    moe_intermediate_size=704,
    num_attention_heads=16,
    num_experts=128,
    num_global_key_value_heads=2,
    num_hidden_layers=30,
    num_key_value_heads=8,
    top_k_experts=8,
)
UNIFIED_12B = _gemma4(
    6,
    **_LARGE,
    hidden_size=3840,
    intermediate_size=15360,
    model_type="gemma4_unified_text",
    num_attention_heads=16,
    num_global_key_value_heads=1,
    num_hidden_layers=48,
    num_key_value_heads=8,
) | {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified"}
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "transformers_version": "4.46.1",
    "use_cache": True,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


@pytest.mark.parametrize(
    ("config", "billions"),
    [(E2B, 4.65), (E4B, 7.5), (LARGE_31B, 30.7), (MOE_26B, 25.2), (UNIFIED_12B, 11.9), (MINIMAX_M2, 228.7)],
)
def test_sizes_of_the_whole_text_model(config: dict[str, Any], billions: float) -> None:
    spec = spec_of(config)
    assert parameters(spec) == pytest.approx(billions * 1e9, rel=0.01)
    assert dimensions_from_config(config).num_parameters == parameters(spec)
    assert dimensions_from_config(config).spec == spec


def test_heads_of_two_sizes() -> None:
    spec = spec_of(LARGE_31B)
    local, whole = spec.layers[0].grouped, spec.layers[5].grouped
    assert (local.head_dim, local.num_kv_heads, local.window, local.keys_are_values) == (256, 16, 1024, False)
    assert (whole.head_dim, whole.num_kv_heads, whole.window, whole.keys_are_values) == (512, 4, None, True)
    assert (local.rope.theta, local.rope.scaling) == (10000.0, None)
    assert (whole.rope.theta, whole.rope.scaling) == (1e6, ProportionalScaling(64))
    assert {layer.grouped.scale for layer in spec.layers} == {1.0} and spec.logits_softcap == 30.0


def test_upper_layers_keep_no_kv() -> None:
    spec = spec_of(E2B)
    assert [spec.kv_source(layer) for layer in (12, 13, 14, 15, 19, 34)] == [12, 13, 14, 13, 14, 14]
    full, sliding = spec.kv_groups()
    assert full.layers == (4, 9, 14) and full.window is None
    assert sliding.layers == (0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13) and sliding.window == 512
    assert "layers.15.k" not in spec.tensor_shapes() and "layers.15.q" in spec.tensor_shapes()
    assert (spec.layers[14].mlp, spec.layers[15].mlp) == (DenseMlp(6144, "gelu_tanh"), DenseMlp(12288, "gelu_tanh"))
    assert spec.layer_input == LayerInput(256)


def test_shared_kv_is_kept_once_and_read_by_every_layer() -> None:
    shape = shape_from_config(E2B, weight_bits=16, kv_bits=16)
    full, sliding = shape.kv_groups
    assert (full.num_layers, full.num_readers, sliding.num_layers, sliding.num_readers) == (3, 7, 12, 28)
    assert full.bytes_per_token == 3 * 2 * 512 * 2 and sliding.bytes_per_token == 12 * 2 * 256 * 2
    assert shape.kv_bytes_read(4096) == 4096 * 7 * 2 * 512 * 2 + 512 * 28 * 2 * 256 * 2
    assert full.pair_multiply_adds == 7 * 2 * 8 * 512
    # The table of all layers' inputs is looked up, never read whole: it lies beside what a step reads.
    assert shape.embedding_bytes == 2 * 262144 * 35 * 256
    assert shape.weight_bytes_per_step < 0.55 * shape.weight_bytes


def test_experts_beside_an_mlp() -> None:
    moe = spec_of(MOE_26B).moe
    assert moe is not None and moe.has_own_norms and moe.shared == DenseMlp(2112, "gelu_tanh")
    assert (moe.num_experts, moe.experts_per_token, moe.expert_intermediate_size) == (128, 8, 704)
    assert dimensions_from_config(MOE_26B).shape(weight_bits=16, kv_bits=16).active_parameters == pytest.approx(
        3.8e9, rel=0.02
    )


def test_minimax() -> None:
    spec = spec_of(MINIMAX_M2)
    assert {layer.grouped.norm_widths for layer in spec.layers} == {(48 * 128, 8 * 128)}
    assert {layer.grouped.rope.dim for layer in spec.layers} == {64} and spec.layers[0].grouped.rope.theta == 5e6
    assert spec.moe is not None and spec.moe.routing == Routing("sigmoid", has_correction=True)
    assert spec.moe.shared is None and spec.moe.normalise_weights
    active = dimensions_from_config(MINIMAX_M2).shape(weight_bits=8, kv_bits=16).active_parameters
    assert active == pytest.approx(10e9, rel=0.05)
