"""Further families as their makers published them: what sets them apart from Llama. Hunyuan's and Cohere's settings
were put together by hand from descriptions of those models, and their sizes are computed from them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.models.families.test_published_configs import parameters, spec_of

from twostroke.models.families import declared
from twostroke.models.rope_spec import NO_ROPE, RopeSpec, YarnScaling

_PLAIN: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "use_cache": True}
GRANITE_3_3_2B = {
    **_PLAIN,
    "architectures": ["GraniteForCausalLM"],
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49159,
}
OLMO_3_7B = {
    **_PLAIN,
    "architectures": ["Olmo3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 100278,
}
SEED_OSS_36B = {
    **_PLAIN,
    "architectures": ["SeedOssForCausalLM"],
    "attention_bias": True,
    "attention_out_bias": False,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "max_position_embeddings": 524288,
    "mlp_bias": False,
    "model_type": "seed_oss",
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 155136,
}
ERNIE_4_5_0_3B = {
    "architectures": ["Ernie4_5ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 131072,
    "model_type": "ernie4_5",
    "num_attention_heads": 16,
    "num_hidden_layers": 18,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "vocab_size": 103424,
}
_HUNYUAN = {
    **_PLAIN,
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "type": "dynamic"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cla": False,
    "use_qk_norm": True,
    "vocab_size": 128167,
}
HUNYUAN_7B = {
    **_HUNYUAN,
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "intermediate_size": 14336,
    "model_type": "hunyuan_v1_dense",
}
HUNYUAN_A13B = {
    **_HUNYUAN,
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "intermediate_size": 3072,
    "model_type": "hunyuan_v1_moe",
    "moe_intermediate_size": [3072] * 32,
    "moe_layer_num_skipped": 0,
    "moe_topk": [8] * 32,
    "num_experts": 64,
    "num_shared_expert": [1] * 32,
    "use_mixed_mlp_moe": True,
}
COMMAND_R7B = {
    "architectures": ["Cohere2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.25,
    "max_position_embeddings": 132096,
    "model_type": "cohere2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "position_embedding_type": "rope_gptj",
    "rope_theta": 50000,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "use_parallel_block": True,
    "use_qk_norm": False,
    "vocab_size": 256000,
}


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (GRANITE_3_3_2B, 2.53),
        (OLMO_3_7B, 7.3),
        (SEED_OSS_36B, 36.15),
        (ERNIE_4_5_0_3B, 0.361),
        (HUNYUAN_7B, 7.505),
        (HUNYUAN_A13B, 80.39),
    ],
)
def test_sizes(config: dict[str, Any], billions: float) -> None:
    assert parameters(spec_of(config)) == pytest.approx(billions * 1e9, rel=0.01)


def test_granites_multipliers_become_what_every_backend_has() -> None:
    spec = spec_of(GRANITE_3_3_2B)
    assert spec.embedding_scale == pytest.approx(12 / 0.22) and spec.norm_eps == pytest.approx(1e-5 / 0.22**2)
    assert spec.final_norm_scale == 1 / 8 and {layer.grouped.scale for layer in spec.layers} == {0.015625}


def test_olmo_stretches_full_layers_alone() -> None:
    spec = spec_of(OLMO_3_7B)
    assert [layer.window for layer in spec.layers[:4]] == [4096, 4096, 4096, None]
    assert [layer.grouped.rope.theta for layer in spec.layers[:4]] == [5e5] * 4
    assert spec.layers[0].grouped.rope.scaling is None
    assert isinstance(spec.layers[3].grouped.rope.scaling, YarnScaling)
    assert not spec.layers[0].input_norms and spec.layers[0].sandwich_norms


def test_seed_has_biases_on_its_inputs_alone() -> None:
    attention = spec_of(SEED_OSS_36B).layers[0].grouped
    assert attention.qkv_bias and not attention.output_bias and attention.query_width == 2 * 5120


def test_hunyuans_base_is_stretched_once_and_its_lists_say_one_number() -> None:
    attention = spec_of(HUNYUAN_7B).layers[0].grouped
    assert attention.rope == RopeSpec(1e4 * 1000 ** (128 / 126), 128) and attention.norms_rotated
    moe = spec_of(HUNYUAN_A13B).moe
    assert moe is not None and moe.shared is not None and not moe.shared_gate and moe.normalise_weights
    assert (moe.num_experts, moe.experts_per_token, moe.shared.intermediate_size) == (64, 8, 3072)


def test_cohere_is_counted_with_its_windows() -> None:
    found = declared(COMMAND_R7B)
    assert found.not_run is not None and "side by side" in found.not_run
    assert parameters(found.spec) == pytest.approx(8.028e9, rel=0.001)
    layers = [layer.grouped for layer in found.spec.layers]
    assert [layer.window for layer in layers[:4]] == [4096, 4096, 4096, None]
    assert [layer.rope == NO_ROPE for layer in layers] == [layer.window is None for layer in layers]
    assert found.spec.final_norm_scale == 0.25
