"""Models of latent attention, and gpt-oss, as their makers published them: routing, YaRN, quantised weights, windows
and sinks. The settings of DeepSeek, Kimi and gpt-oss are those of their config.json as far as they matter here. Those
of GLM-4.7-Flash and Mistral Small 4 are the defaults of transformers' classes, but for GLM's base of the rope, which is
from memory. How Mistral Small 4's weights are quantised is not known well enough to stand here. How many parameters
that makes is counted by transformers, on no device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.models.families.test_published_configs import parameters, spec_of
from tests.models.families.test_published_newer import counted_by_transformers

from twostroke.cost.config_shape import shape_from_config
from twostroke.models.families import declared
from twostroke.models.families.fields import Fields
from twostroke.models.quantised.methods import read_quantisation
from twostroke.models.quantised.scheme import Expected, Layout, MatrixScheme, Quantisation, Role, Strategy
from twostroke.models.rope_spec import YarnScaling, yarn_sharpness
from twostroke.models.spec import ClampedGate, DenseMlp, LatentAttention, ModelSpec, MoeSpec, QueryGrowth, Routing

SHAPES = Path(__file__).parents[3] / "bench" / "shapes"
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
DEEPSEEK_V2_LITE: dict[str, Any] = json.loads((SHAPES / "deepseek-v2-lite" / "config.json").read_text())
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": _FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": _YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2: dict[str, Any] = {
    **DEEPSEEK_V3,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**_YARN, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "seq_aux": True,
    "topk_group": 1,
    "vocab_size": 163840,
}
GLM_4_7_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
MISTRAL_SMALL_4: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": {**transformers.Mistral4Config().to_dict(), "architectures": ["Mistral4ForCausalLM"]},
    "vision_config": {"model_type": "pixtral", "hidden_size": 1664, "num_hidden_layers": 48},
}
GPT_OSS_20B: dict[str, Any] = json.loads((SHAPES / "gpt-oss-20b" / "config.json").read_text())
GPT_OSS_120B: dict[str, Any] = {
    **GPT_OSS_20B,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}
MODELS = {
    "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
    "DeepSeek-V3": DEEPSEEK_V3,
    "Kimi-K2": KIMI_K2,
    "GLM-4.7-Flash": GLM_4_7_FLASH,
    "Mistral-Small-4": MISTRAL_SMALL_4,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": GPT_OSS_120B,
}


def moe_of(spec: ModelSpec) -> MoeSpec:
    assert spec.moe is not None
    return spec.moe


def latent_of(spec: ModelSpec) -> LatentAttention:
    (found,) = {layer.attention for layer in spec.layers}
    assert isinstance(found, LatentAttention)
    return found


def quantisation_of(config: dict[str, Any]) -> Quantisation:
    found = read_quantisation(Fields("config.json", config))
    assert found is not None
    return found


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_that_transformers_counts(name: str) -> None:
    config = MODELS[name].get("text_config", MODELS[name])
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    if name == "Kimi-K2":  # whose own name transformers does not know
        plain["model_type"] = "deepseek_v3"
    assert parameters(spec_of(MODELS[name])) == counted_by_transformers(plain)
    assert declared(MODELS[name]).not_run is None


# What their makers say, in billions; without the layer that drafts.
@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("DeepSeek-V2-Lite", 15.7, 2.4),
        ("DeepSeek-V3", 671, 37),
        ("Kimi-K2", 1026, 32),
        ("GLM-4.7-Flash", 30, 3.6),  # 3 by its name
        ("Mistral-Small-4", 119, 6.5),
        ("gpt-oss-20b", 20.9, 3.6),
        ("gpt-oss-120b", 116.8, 5.1),
    ],
)
def test_sizes(name: str, billions: float, active: float) -> None:
    assert parameters(spec_of(MODELS[name])) / 1e9 == pytest.approx(billions, rel=0.01)
    plain = {key: value for key, value in MODELS[name].items() if key != "quantization_config"}
    shape = shape_from_config(plain, weight_bits=16, kv_bits=16)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.1)


def test_latents() -> None:
    """Of what a token leaves behind: 512 numbers and 64 rotated ones, half as many of the first at Mistral's."""
    for name, heads, query_rank in (("DeepSeek-V2-Lite", 16, None), ("DeepSeek-V3", 128, 1536), ("Kimi-K2", 64, 1536)):
        found = latent_of(spec_of(MODELS[name]))
        assert (found.num_heads, found.query_rank) == (heads, query_rank)
        assert (found.rank, found.plain_dim, found.rotated_dim, found.value_dim) == (512, 128, 64, 128)
        assert found.rope.pairs_neighbours and found.growth is None
    glm, mistral = latent_of(spec_of(GLM_4_7_FLASH)), latent_of(spec_of(MISTRAL_SMALL_4))
    assert (glm.num_heads, glm.query_rank, glm.rank, glm.plain_dim, glm.value_dim) == (20, 768, 512, 192, 256)
    assert (mistral.num_heads, mistral.query_rank, mistral.rank) == (32, 1024, 256)
    assert (mistral.plain_dim, mistral.rotated_dim, mistral.value_dim) == (64, 64, 128)
    assert mistral.growth == QueryGrowth(0.1, 8192)
    for config in (DEEPSEEK_V3, GLM_4_7_FLASH):
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        (group,) = shape_from_config(plain, weight_bits=16, kv_bits=16).kv_groups
        assert group.bytes_per_token == config["num_hidden_layers"] * (512 + 64) * 2


def test_routing() -> None:
    assert moe_of(spec_of(DEEPSEEK_V2_LITE)) == MoeSpec(64, 6, 1408, normalise_weights=False, shared=DenseMlp(2 * 1408))
    grouped = Routing("sigmoid", True, num_groups=8, groups_per_token=4, ranked_by=2, share_scale=2.5)
    assert moe_of(spec_of(DEEPSEEK_V3)) == MoeSpec(256, 8, 2048, shared=DenseMlp(2048), routing=grouped)
    ungrouped = Routing("sigmoid", has_correction=True, share_scale=2.827)
    assert moe_of(spec_of(KIMI_K2)) == MoeSpec(384, 8, 2048, shared=DenseMlp(2048), routing=ungrouped)
    flash = Routing("sigmoid", has_correction=True, share_scale=1.8)
    assert moe_of(spec_of(GLM_4_7_FLASH)) == MoeSpec(64, 4, 1536, shared=DenseMlp(1536), routing=flash)
    assert moe_of(spec_of(MISTRAL_SMALL_4)) == MoeSpec(128, 4, 2048, shared=DenseMlp(2048))
    for name, num_dense, width in (
        ("DeepSeek-V2-Lite", 1, 10944),
        ("DeepSeek-V3", 3, 18432),
        ("Kimi-K2", 1, 18432),
        ("GLM-4.7-Flash", 1, 10240),
        ("Mistral-Small-4", 0, 0),
    ):
        mlps = [layer.mlp for layer in spec_of(MODELS[name]).layers]
        assert mlps[:num_dense] == [DenseMlp(width)] * num_dense and isinstance(mlps[num_dense], MoeSpec)


@pytest.mark.parametrize(
    ("name", "factor", "turns", "sharpness"),
    [
        ("DeepSeek-V2-Lite", 40.0, (32.0, 1.0), 0.707),
        ("DeepSeek-V3", 40.0, (32.0, 1.0), 1.0),
        ("Kimi-K2", 32.0, (1.0, 1.0), 1.0),
        ("Mistral-Small-4", 128.0, (32.0, 1.0), 1.0),
    ],
)
def test_yarn_sharpens_scores_and_not_the_rotation(
    name: str, factor: float, turns: tuple[float, float], sharpness: float
) -> None:
    found = latent_of(spec_of(MODELS[name]))
    original = 8192 if name == "Mistral-Small-4" else 4096
    assert found.rope.scaling == YarnScaling(factor, original, 1.0, *turns)
    assert found.scale == pytest.approx(found.key_dim**-0.5 * yarn_sharpness(factor, sharpness) ** 2)
    assert spec_of(MODELS[name]).max_context == factor * original
    assert found.rope.theta == (5e4 if name == "Kimi-K2" else 1e4)


def test_flash_rotates_plainly() -> None:
    found = latent_of(spec_of(GLM_4_7_FLASH))
    assert (found.rope.theta, found.rope.scaling) == (1e6, None) and found.scale == 256**-0.5


def test_weights_in_blocks_of_float8() -> None:
    for config in (DEEPSEEK_V3, KIMI_K2):
        found = quantisation_of(config)
        (scheme,) = found.schemes
        assert (scheme.layout, scheme.bits, scheme.strategy) == (Layout.FLOATS_OF_8, 8, Strategy.BLOCK)
        assert scheme.block == (128, 128) and scheme.activations is not None and scheme.activations.is_dynamic
        for role, expected in (
            (Role.LINEAR, Expected.YES),
            (Role.EXPERTS, Expected.YES),
            (Role.ROUTER, Expected.AS_STORED),
            (Role.HEAD, Expected.AS_STORED),
            (Role.EMBEDDING, Expected.NO),
        ):
            assert found.scheme_of(("model.layers.3.any",), role)[1] is expected


def test_gpt_oss() -> None:
    for config, num_experts in ((GPT_OSS_20B, 32), (GPT_OSS_120B, 128)):
        spec = spec_of(config)
        assert [layer.window for layer in spec.layers] == [128, None] * (spec.num_layers // 2)
        for layer in spec.layers:
            attention = layer.grouped
            assert attention.has_sinks and attention.qkv_bias and attention.output_bias
            assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (64, 8, 64)
            # The rotation is sharpened here, and the blend's ends are not rounded.
            assert attention.rope.scaling == YarnScaling(32.0, 4096, yarn_sharpness(32.0), 32.0, 1.0, truncates=False)
            assert attention.rope.theta == 150_000 and not attention.rope.pairs_neighbours
        clamped = MoeSpec(num_experts, 4, 2880, has_bias=True, router_bias=True, clamp=ClampedGate(7.0, 1.702))
        assert moe_of(spec) == clamped
        assert sorted((group.window or 0, len(group.layers)) for group in spec.kv_groups()) == [
            (0, spec.num_layers // 2),
            (128, spec.num_layers // 2),
        ]


def test_experts_in_mxfp4_and_nothing_else() -> None:
    found = quantisation_of(GPT_OSS_20B)
    assert found.schemes == (MatrixScheme(Layout.MXFP4_BLOCKS, 4, Strategy.GROUP, 32),)
    assert found.schemes[0].format == found.format == "mxfp4"
    for module, role, expected in (
        ("model.layers.3.mlp.experts.gate_up_proj", Role.EXPERTS, Expected.YES),
        ("model.layers.3.mlp.router", Role.ROUTER, Expected.NO),
        ("model.layers.3.self_attn.q_proj", Role.LINEAR, Expected.NO),
        ("model.embed_tokens", Role.EMBEDDING, Expected.NO),
        ("lm_head", Role.HEAD, Expected.NO),
    ):
        assert found.scheme_of((module,), role)[1] is expected
