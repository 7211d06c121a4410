"""Models that keep states in some layers: the settings of well-known ones as their makers published them, and what
their files may not say."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.models.families.test_published_configs import parameters, spec_of
from tests.models.families.test_refusals import JSON_VALUES, read, read_gguf
from tests.models.tiny_checkpoints import make_tiny
from tests.models.tiny_gguf import write_gguf
from tests.properties import examples

from twostroke.core.errors import ModelError
from twostroke.models.rope_spec import NO_ROPE
from twostroke.models.spec import DenseMlp, GatedDeltaNet, GroupedAttention, Mamba2, ModelSpec, ShortConvolution
from twostroke.models.weights.gguf import GGUFFile, open_gguf

LFM2_1_2B = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "vocab_size": 65536,
}
LFM2_8B_A1B = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": ["full_attention" if index in (2, 6, 10, 14, 18, 21) else "conv" for index in range(24)],
    "max_position_embeddings": 128000,
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
    "vocab_size": 65536,
}
QWEN3_NEXT_80B_A3B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
GRANITE_4_H_TINY = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 512,
    "layer_types": ["attention" if index in (5, 15, 25, 35) else "mamba" for index in range(40)],
    "logits_scaling": 6,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}
NEMOTRON_3_NANO = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}
NEMOTRON_3_SUPER = {
    **NEMOTRON_3_NANO,
    "hidden_size": 4096,
    "hybrid_override_pattern": (
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    ),
    "intermediate_size": 2688,
    "mamba_num_heads": 128,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "mtp_hybrid_override_pattern": "*E",
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "num_hidden_layers": 88,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 5.0,
}
NEMOTRON_H_8B = {
    **NEMOTRON_3_NANO,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "intermediate_size": 21504,
    "mamba_num_heads": 128,
    "num_key_value_heads": 8,
}


# What their makers say of them, in billions; without layers that draft. Nemotron 3 Super's say 120.6, cut off.
@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (LFM2_1_2B, 1.170),
        (LFM2_8B_A1B, 8.340),
        (QWEN3_NEXT_80B_A3B, 79.674),
        (GRANITE_4_H_TINY, 6.939),
        (NEMOTRON_3_NANO, 31.578),
        (NEMOTRON_3_SUPER, 120.669),
        (NEMOTRON_H_8B, 8.101),
    ],
)
def test_the_spec_has_the_published_number_of_parameters(config: dict[str, Any], billions: float) -> None:
    assert parameters(spec_of(config)) / 1e9 == pytest.approx(billions, abs=0.001)


def kinds(spec: ModelSpec) -> Counter[str]:
    return Counter(type(layer.attention).__name__ for layer in spec.layers)


def test_layers() -> None:
    assert kinds(spec_of(LFM2_1_2B)) == {"ShortConvolution": 10, "GroupedAttention": 6}
    assert kinds(spec_of(QWEN3_NEXT_80B_A3B)) == {"GatedDeltaNet": 36, "GroupedAttention": 12}
    assert kinds(spec_of(GRANITE_4_H_TINY)) == {"Mamba2": 36, "GroupedAttention": 4}
    assert kinds(spec_of(NEMOTRON_3_NANO)) == {"Mamba2": 23, "GroupedAttention": 6, "NoneType": 23}
    assert kinds(spec_of(NEMOTRON_3_SUPER)) == {"Mamba2": 40, "GroupedAttention": 8, "NoneType": 40}
    assert kinds(spec_of(NEMOTRON_H_8B)) == {"Mamba2": 24, "GroupedAttention": 4, "NoneType": 24}


def test_what_each_has_of_its_own() -> None:
    lfm2 = spec_of(LFM2_1_2B)
    assert lfm2.layers[0].attention == ShortConvolution(2048, 3) and lfm2.layers[0].mlp == DenseMlp(8192)
    assert lfm2.tied_embeddings and lfm2.layers[2].grouped.qk_norm and lfm2.layers[2].grouped.rope.theta == 1e6
    qwen = spec_of(QWEN3_NEXT_80B_A3B)
    assert qwen.layers[0].attention == GatedDeltaNet(16, 32, 128, 128, 4)
    assert qwen.layers[3].grouped.output_gate and qwen.layers[3].grouped.rope.dim == 64
    assert qwen.moe is not None and qwen.moe.shared == DenseMlp(512) and qwen.moe.shared_gate
    granite = spec_of(GRANITE_4_H_TINY)
    assert granite.layers[0].attention == Mamba2(48, 64, 128, 1, 4, norm_eps=1e-5)
    assert granite.layers[5].grouped.rope == NO_ROPE and granite.layers[5].grouped.scale == 1 / 128
    # What blocks find is multiplied by 0.22: the residual stream is that much smaller instead.
    assert (granite.embedding_scale, granite.norm_eps, granite.final_norm_scale) == (12 / 0.22, 1e-5 / 0.22**2, 1 / 6)
    nemotron = spec_of(NEMOTRON_3_NANO)
    assert nemotron.layers[0].attention == Mamba2(64, 64, 128, 8, 4, norm_groups=8, shortest_step=0.001)
    assert nemotron.moe is not None and not nemotron.moe.is_gated
    assert nemotron.moe.shared == DenseMlp(3712, is_gated=False, squared_relu=True)
    assert nemotron.moe.latent_size is None
    shapes = spec_of(NEMOTRON_3_SUPER).tensor_shapes()
    assert shapes["layers.1.latent_down"] == (1024, 4096) and shapes["layers.1.latent_up"] == (4096, 1024)
    assert shapes["layers.1.experts.511.up"] == (2688, 1024) and shapes["layers.1.experts.511.down"] == (1024, 2688)
    assert shapes["layers.1.router"] == (512, 4096) and shapes["layers.1.shared.up"] == (5376, 4096)


def test_numbers_that_a_sequence_keeps() -> None:
    """Of Qwen3-Next, a layer: 3 x 8192 for the convolution, 32 matrices of 128 x 128. In float32 that is 79 MB."""
    *_, states = spec_of(QWEN3_NEXT_80B_A3B).kv_groups()
    assert states.content == "state" and states.values == 3 * 8192 + 32 * 128 * 128
    assert 4 * states.values * len(states.layers) == 79_036_416
    *_, states = spec_of(NEMOTRON_3_NANO).kv_groups()
    assert states.values == 3 * (4096 + 2 * 8 * 128) + 64 * 64 * 128


VARIANTS = ("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "granite_hybrid", "nemotron_h")
AS_GGUF = ("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "granite_hybrid")
Configs = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Configs:
    made = {}
    for variant in VARIANTS:
        folder, _ = make_tiny(variant, tmp_path_factory.mktemp(variant))
        made[variant] = json.loads((folder / "config.json").read_text())
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GGUFFile]:
    made = {}
    for variant in AS_GGUF:
        folder: Path = tmp_path_factory.mktemp(variant)
        _, model = make_tiny(variant, folder, **({"mamba_n_groups": 1} if variant == "granite_hybrid" else {}))
        made[variant] = open_gguf(write_gguf(model, folder / "tiny.gguf"))
    return made


@pytest.mark.parametrize(
    ("variant", "name", "value"),
    [
        ("lfm2", "conv_L_cache", 0),
        ("lfm2", "conv_bias", True),
        ("lfm2", "norm_eps", -1.0),
        ("lfm2", "layer_types", ["conv", "mamba", "conv", "conv"]),
        ("lfm2", "intermediate_size", "wide"),
        ("lfm2_moe", "num_dense_layers", 5),
        ("lfm2_moe", "use_expert_bias", 1),
        ("qwen3_next", "linear_num_key_heads", 3),
        ("qwen3_next", "linear_key_head_dim", 0),
        ("qwen3_next", "linear_conv_kernel_dim", 1000),
        ("qwen3_next", "attention_bias", True),
        ("qwen3_next", "layer_types", ["linear_attention"]),
        ("qwen3_next", "shared_expert_intermediate_size", -1),
        ("qwen3_5", "attn_output_gate", False),
        ("qwen3_5_moe", "num_experts", 0),
        ("granite_hybrid", "mamba_n_groups", 3),
        ("granite_hybrid", "mamba_d_head", 7),
        ("granite_hybrid", "mamba_proj_bias", True),
        ("granite_hybrid", "position_embedding_type", "alibi"),
        ("granite_hybrid", "logits_scaling", 0),
        ("granite_hybrid", "time_step_limit", [0.5]),
        ("granite_hybrid", "time_step_limit", [1.0, 10**400]),
        ("granite_hybrid", "layer_types", ["attention", "window", "mamba"]),
        ("nemotron_h", "layers_block_type", ["mlp", "conv"]),
        ("nemotron_h", "layers_block_type", []),
        ("nemotron_h", "n_groups", 3),
        ("nemotron_h", "mlp_hidden_act", "silu"),
        ("nemotron_h", "moe_latent_size", -32),
        ("nemotron_h", "n_routed_experts", 0),
        ("nemotron_h", "sliding_window", 16),
    ],
)
def test_what_a_family_does_not_have_is_refused(configs: Configs, variant: str, name: str, value: object) -> None:
    read(configs[variant])  # it is this setting, and no other
    with pytest.raises(ModelError, match=r"^config\.json: "):
        read({**configs[variant], name: value})


@pytest.mark.parametrize(
    ("variant", "name", "value"),
    [
        ("lfm2", "shortconv.l_cache", 0),
        ("lfm2", "attention.head_count_kv", [0, 2]),
        ("lfm2", "attention.head_count_kv", [0, 2, 0, 4]),
        ("lfm2_moe", "expert_used_count", 0),
        ("qwen3_next", "ssm.time_step_rank", 0),
        ("qwen3_5", "full_attention_interval", 0),
        ("granite_hybrid", "ssm.group_count", 2),
        ("granite_hybrid", "ssm.time_step_rank", 7),
        ("granite_hybrid", "logit_scale", -1.0),
    ],
)
def test_spoilt_gguf_keys_are_named(files: dict[str, GGUFFile], variant: str, name: str, value: object) -> None:
    read_gguf(files[variant], {})
    with pytest.raises(ModelError, match=rf"^tiny\.gguf: \w+\.{name} "):
        read_gguf(files[variant], {name: value})


def check_sound(spec: ModelSpec) -> None:
    for attention in {layer.attention for layer in spec.layers}:
        if isinstance(attention, GroupedAttention):
            assert attention.rope.dim <= attention.head_dim
    assert all(size >= 1 for shape in spec.tensor_shapes().values() for size in shape)


FUZZ = examples(150, allowed=(HealthCheck.function_scoped_fixture,))


@FUZZ
@given(data=st.data())
def test_any_config_is_a_sound_spec_or_a_model_error(configs: Configs, data: st.DataObject) -> None:
    config = dict(configs[data.draw(st.sampled_from(VARIANTS))])
    for name in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        if name != "architectures":
            config[name] = data.draw(JSON_VALUES)
    try:
        spec = read(config)
    except ModelError as error:
        assert len(str(error)) < 300
    else:
        check_sound(spec)


@FUZZ
@given(data=st.data())
def test_any_gguf_metadata_is_a_sound_spec_or_a_model_error(files: dict[str, GGUFFile], data: st.DataObject) -> None:
    file = files[data.draw(st.sampled_from(AS_GGUF))]
    keys = sorted(key.partition(".")[2] for key in file.metadata if not key.startswith("general."))
    names = data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3))
    try:
        spec = read_gguf(file, {name: data.draw(JSON_VALUES) for name in names})
    except ModelError as error:
        assert len(str(error)) < 300
    else:
        check_sound(spec)
