"""Text halves of models that see, and further families, as their makers published them: what sets them apart, and how
many parameters they have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from tests.models.families.test_published_configs import parameters, spec_of
from tests.models.tiny_checkpoints import make_tiny
from tests.models.tiny_gguf import write_gguf

from twostroke.models.loading import load_checkpoint
from twostroke.models.rope_spec import NO_ROPE, Llama3Scaling

_PLAIN: dict[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0, "use_cache": True}
QWEN2_5_VL_7B = {
    **_PLAIN,
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_size": 1280},
    "vocab_size": 152064,
}
_QWEN3_VL_TEXT = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "rope_theta": 5000000,
    "vocab_size": 151936,
}
QWEN3_VL_8B = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        **_QWEN3_VL_TEXT,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "model_type": "qwen3_vl_text",
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27},
}
QWEN3_VL_30B_A3B = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "text_config": {
        **_QWEN3_VL_TEXT,
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    },
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27},
}
GLM_4_9B_0414 = {
    **_PLAIN,
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": True,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}
OLMOE_1B_7B = {
    **_PLAIN,
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "clip_qkv": None,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 50304,
}
EXAONE_4_32B = {
    **_PLAIN,
    "architectures": ["Exaone4ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "max_position_embeddings": 131072,
    "model_type": "exaone4",
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
    "vocab_size": 102400,
}
GRANITE_3_1_3B_A800M = {
    **_PLAIN,
    "architectures": ["GraniteMoeForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "hidden_size": 1536,
    "intermediate_size": 512,
    "logits_scaling": 6.0,
    "max_position_embeddings": 131072,
    "model_type": "granitemoe",
    "num_attention_heads": 24,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 40,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49155,
}
ERNIE_4_5_21B_A3B = {
    **_PLAIN,
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "model_type": "ernie4_5_moe",
    "moe_capacity": [64, 64, 64],
    "moe_gate": "topk",
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": 27,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "vocab_size": 103424,
}


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (QWEN2_5_VL_7B, 7.616),
        (QWEN3_VL_8B, 8.191),
        (QWEN3_VL_30B_A3B, 30.532),
        (GLM_4_9B_0414, 9.40),
        (OLMOE_1B_7B, 6.919),
        (EXAONE_4_32B, 32.0),
        (GRANITE_3_1_3B_A800M, 3.30),
        (ERNIE_4_5_21B_A3B, 21.8),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_parameters(config: dict[str, Any], billions: float) -> None:
    assert parameters(spec_of(config)) / 1e9 == pytest.approx(billions, rel=0.005)


def test_three_positions_are_one_where_no_image_is() -> None:
    assert spec_of(QWEN2_5_VL_7B).layers[0].grouped.rope.scaling is None
    assert spec_of(QWEN3_VL_8B).layers[0].grouped.rope.theta == 5e6


def test_exaones_global_layers_know_no_positions() -> None:
    layers = [layer.grouped for layer in spec_of(EXAONE_4_32B).layers]
    assert [layer.window for layer in layers[:4]] == [4096, 4096, 4096, None]
    assert [layer.rope == NO_ROPE for layer in layers] == [layer.window is None for layer in layers]
    assert isinstance(layers[0].rope.scaling, Llama3Scaling)


def test_ernies_first_layer_is_dense_and_glm_rotates_half() -> None:
    layers = spec_of(ERNIE_4_5_21B_A3B).layers
    assert [layer.moe is None for layer in layers[:3]] == [True, False, False]
    assert layers[1].moe is not None and layers[1].moe.routing.has_correction
    assert layers[1].moe.shared is not None and layers[1].moe.shared.intermediate_size == 3072
    assert spec_of(GLM_4_9B_0414).layers[0].grouped.rope.dim == 64


@pytest.mark.parametrize(
    ("variant", "architecture", "family"),
    [
        ("qwen2", gguf.MODEL_ARCH.QWEN2VL, "qwen2_vl"),
        ("qwen3", gguf.MODEL_ARCH.QWEN3VL, "qwen3_vl"),
        ("qwen3_moe", gguf.MODEL_ARCH.QWEN3VLMOE, "qwen3_vl_moe"),
    ],
)
def test_gguf_files_hold_text_halves_apart(
    variant: str, architecture: gguf.MODEL_ARCH, family: str, tmp_path: Path
) -> None:
    folder, model = make_tiny(variant, tmp_path / "folder")
    sections = {"rope.dimension_sections": [2, 3, 3, 0]}
    file = load_checkpoint(write_gguf(model, tmp_path / "text.gguf", architecture=architecture, **sections))
    expected = replace(load_checkpoint(folder).spec, family=family, norm_eps=file.spec.norm_eps)  # a float32 there
    assert file.spec == expected
    assert file.tensors.keys() == load_checkpoint(folder).tensors.keys()
