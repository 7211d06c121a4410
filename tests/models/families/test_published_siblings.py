"""Models that differ from others by little, with their makers' settings: the first Gemma, Ministral of 2024, dots.llm1,
and embedders and encoders that were made of other families. How many parameters that makes is counted by transformers,
on no device."""

from __future__ import annotations

from typing import Any

import pytest
from tests.models.families.test_published_configs import parameters, spec_of
from tests.models.families.test_published_newer import counted_by_transformers

from twostroke.models.families import declared
from twostroke.models.pooled import as_pooled
from twostroke.models.spec import DenseMlp, MoeSpec, Routing

GEMMA_2B: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}
GEMMA_7B = {
    **GEMMA_2B,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": None,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
}
MINISTRAL_8B_2410: dict[str, Any] = {
    "architectures": ["MinistralForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 32768,
    "model_type": "ministral",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}
DOTS_LLM1: dict[str, Any] = {
    "architectures": ["Dots1ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 32768,
    "model_type": "dots1",
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "noaux_tc",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
E5_MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralModel"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
ALL_ROBERTA_LARGE: dict[str, Any] = {
    "architectures": ["RobertaModel"],
    "hidden_act": "gelu",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 514,
    "model_type": "roberta",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 50265,
}
GENERATORS = {
    "Gemma-2B": (GEMMA_2B, 2.506),
    "Gemma-7B": (GEMMA_7B, 8.538),
    "Ministral-8B-2410": (MINISTRAL_8B_2410, 8.020),
    "dots.llm1": (DOTS_LLM1, 142.8),
}
EMBEDDERS = {"e5-mistral-7b": (E5_MISTRAL_7B, 7.111), "all-roberta-large": (ALL_ROBERTA_LARGE, 0.3543)}


@pytest.mark.parametrize("name", GENERATORS)
def test_parameters(name: str) -> None:
    config, billions = GENERATORS[name]
    found = parameters(spec_of(config))
    assert found == counted_by_transformers(config)
    assert found / 1e9 == pytest.approx(billions, rel=0.001) and declared(config).not_run is None


@pytest.mark.parametrize("name", EMBEDDERS)
def test_parameters_of_embedders(name: str) -> None:
    config, billions = EMBEDDERS[name]
    found = parameters(as_pooled(spec_of(config)))
    assert found == counted_by_transformers(config)
    assert found / 1e9 == pytest.approx(billions, rel=0.001) and declared(config).not_run is None


def test_what_each_has_of_its_own() -> None:
    for config in (GEMMA_2B, GEMMA_7B, {**GEMMA_2B, "hidden_act": None, "hidden_activation": None}):
        gemma = spec_of(config)
        assert gemma.tied_embeddings and gemma.embedding_scale == gemma.hidden_size**0.5
        assert {layer.mlp for layer in gemma.layers} == {DenseMlp(config["intermediate_size"], "gelu_tanh")}
    dots = spec_of(DOTS_LLM1)
    routing = Routing("sigmoid", has_correction=True, share_scale=2.5)
    assert dots.moe == MoeSpec(128, 6, 1408, shared=DenseMlp(2816), routing=routing)
    assert [layer.moe is None for layer in dots.layers[:2]] == [True, False]
    assert dots.layers[0].grouped.qk_norm and dots.layers[0].grouped.rope.theta == 1e7
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"] * 9
    wide = {**MINISTRAL_8B_2410, "max_position_embeddings": 131072, "layer_types": kinds}
    assert [layer.window for layer in spec_of(wide).layers[:5]] == [None, 32768, 32768, 32768, None]
    places = spec_of(ALL_ROBERTA_LARGE).places
    assert places is not None and places.max_context == 512
