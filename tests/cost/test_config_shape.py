"""Counts against what makers publish, against transformers' own modules, and against checkpoints that are loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.models.families import test_hybrids, test_published_gemma4, test_published_more, test_published_newer
from tests.models.families import test_published_siblings as siblings
from tests.models.tiny_checkpoints import make_tiny, variants

from twostroke.core.errors import BadRequestError, ModelError
from twostroke.cost.config_shape import dimensions_from_config, shape_from_config
from twostroke.cost.dimensions import Dimensions, Part
from twostroke.cost.floor import StepWork, step_bytes_read
from twostroke.cost.known_shapes import KNOWN_SHAPES, find_known_shape
from twostroke.cost.model_shape import KVGroupShape
from twostroke.engine.shape import shape_of
from twostroke.models.loading import load_checkpoint
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import DenseMlp, GroupedAttention, LatentAttention, LayerSpec, ModelSpec, ShortConvolution

PUBLISHED = {
    "Gemma-2B": siblings.GEMMA_2B,
    "Gemma-7B": siblings.GEMMA_7B,
    "Gemma-4-E2B": test_published_gemma4.E2B,
    "Gemma-4-E4B": test_published_gemma4.E4B,
    "Gemma-4-12B": test_published_gemma4.UNIFIED_12B,
    "Gemma-4-26B-A4B": test_published_gemma4.MOE_26B,
    "Gemma-4-31B": test_published_gemma4.LARGE_31B,
    "MiniMax-M2": test_published_gemma4.MINIMAX_M2,
    "GLM-4-9B-0414": test_published_more.GLM_4_9B_0414,
    "GLM-4.7": test_published_newer.GLM_4_6,
    "Ministral-8B": siblings.MINISTRAL_8B_2410,
    "Nemotron-H-8B": test_hybrids.NEMOTRON_H_8B,
    "dots.llm1": siblings.DOTS_LLM1,
}


def known(name: str) -> dict[str, Any]:
    shape = find_known_shape(name)
    assert shape is not None
    return dict(shape.config)


# In billions, as their model cards and papers have it.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("SmolLM2-135M", 0.1345),
        ("SmolLM2-1.7B", 1.711),
        ("Llama-3.2-1B", 1.236),
        ("Llama-3.2-3B", 3.213),
        ("Llama-3.1-8B", 8.030),
        ("Llama-3.1-70B", 70.554),
        ("Llama-3.1-405B", 405.853),
        ("Qwen2.5-0.5B", 0.494),
        ("Qwen2.5-7B", 7.616),
        ("Qwen2.5-14B", 14.770),
        ("Qwen2.5-32B", 32.764),
        ("Qwen2.5-72B", 72.706),
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-8B", 8.191),
        ("Qwen3-14B", 14.768),
        ("Qwen3-32B", 32.762),
        ("Qwen3-30B-A3B", 30.532),
        ("Qwen3-235B-A22B", 235.094),
        ("Mistral-7B", 7.248),
        ("Mistral-Nemo-12B", 12.248),
        ("Mistral-Small-24B", 23.572),
        ("Mixtral-8x7B", 46.703),
        ("Mixtral-8x22B", 140.630),
        ("Gemma-3-4B", 3.880),
        ("Gemma-3-27B", 27.009),
        ("Phi-4", 14.660),
        ("DeepSeek-V3", 671.026),
        ("DeepSeek-V2-Lite", 15.706),
        ("Kimi-K2", 1026.41),
        ("gpt-oss-20b", 20.91),
        ("gpt-oss-120b", 116.83),
        ("Nemotron-3-Super-120B-A12B", 120.6),
        ("Gemma-2B", 2.506),
        ("Gemma-7B", 8.538),
        ("Gemma-3-1B", 0.9999),
        ("Qwen3-Coder-480B-A35B", 480.15),
        ("Qwen3-Coder-30B-A3B", 30.532),
        ("Phi-4-mini", 3.836),
        ("Ministral-8B", 8.020),
        ("DeepSeek-V2", 235.74),
        ("DeepSeek-V3.1", 671.026),
        ("dots.llm1", 142.77),
        ("Nemotron-H-8B", 8.101),
        ("Nemotron-Nano-9B-v2", 8.888),
        ("Granite-4.0-H-Micro", 3.191),
        ("Granite-4.0-H-Small", 32.207),
        ("LFM2-350M", 0.3545),
    ],
)
def test_published_parameter_counts(name: str, billions: float) -> None:
    shape = shape_from_config(known(name), weight_bits=16, kv_bits=16)
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=1e-3)


# Cards count what sees images, too, or round: here is the text half alone.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3.5-122B-A10B", 122),
        ("Qwen3.5-397B-A17B", 397),
        ("Qwen3.6-35B-A3B", 35),
        ("Qwen3-Coder-Next", 80),
        ("GLM-4.7", 355),
        ("Ministral-3-3B", 3.4),
        ("Ministral-3-14B", 13.5),
    ],
)
def test_about_as_many_parameters_as_the_name_says(name: str, billions: float) -> None:
    shape = shape_from_config(known(name), weight_bits=16, kv_bits=16)
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=0.015)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_name_has_the_sizes_of_its_published_settings(name: str) -> None:
    """Where these stand in full in `tests/models/families`."""
    mine, theirs = dimensions_from_config(known(name)).spec, dimensions_from_config(PUBLISHED[name]).spec
    assert mine.tensor_shapes() == theirs.tensor_shapes() and mine.kv_groups() == theirs.kv_groups()
    for own, other in zip(mine.layers, theirs.layers, strict=True):
        assert own.window == other.window and (own.moe is None) == (other.moe is None)
        if own.moe is not None and other.moe is not None:
            assert own.moe.experts_per_token == other.moe.experts_per_token


@pytest.mark.parametrize(
    "name",
    [
        *("google/gemma-4-31B-it", "mistralai/Ministral-3-14B-Instruct-2512", "nvidia/NVIDIA-Nemotron-Nano-9B-v2"),
        *("Qwen/Qwen3-Coder-480B-A35B-Instruct", "deepseek-ai/DeepSeek-V3.1", "rednote-hilab/dots.llm1.inst"),
        *("mistralai/Ministral-8B-Instruct-2410", "ibm-granite/granite-4.0-h-small", "Ministral-3-3B-Reasoning-2512"),
    ],
)
def test_names_on_the_hub_are_known(name: str) -> None:
    assert find_known_shape(name) is not None


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # The makers' own way of counting: the head among them, the embedding table not.
        ("DeepSeek-V3", 36.6),
        ("gpt-oss-120b", 5.13),
        ("gpt-oss-20b", 3.61),
        ("Nemotron-3-Super-120B-A12B", 12.2),  # 12.7 with the table
        ("Mixtral-8x7B", 12.75),  # 12.9 with the table
    ],
)
def test_published_active_parameters(name: str, billions: float) -> None:
    shape = shape_from_config(known(name), weight_bits=16, kv_bits=16)
    assert shape.active_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def _transformers_parameters(config: dict[str, Any]) -> int:
    """Counted by building the model without memory, two layers of it."""
    built = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        if config["model_type"] == "mistral4":  # which AutoModelForCausalLM does not list
            model = transformers.Mistral4ForCausalLM(built)
        else:
            model = transformers.AutoModelForCausalLM.from_config(built)
    # DeepSeek's router correction is a buffer there, a tensor of the checkpoint all the same.
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith(("correction_bias", "expert_bias"))]
    return sum(prod(tensor.shape) for tensor in [*model.parameters(), *buffers])


@pytest.mark.parametrize("name", [name for name in KNOWN_SHAPES if "Gemma" not in name])
def test_layers_count_as_in_transformers(name: str) -> None:
    config = known(name) | {"num_hidden_layers": 2}
    if config.get("first_k_dense_replace"):
        config["first_k_dense_replace"] = 1
    for of_each in ("layer_types", "hybrid_override_pattern"):
        if of_each in config:
            config[of_each] = config[of_each][:2]
    if config["model_type"] == "lfm2_moe":
        config["num_dense_layers"] = 1
    config["model_type"] = config["model_type"].replace("kimi_k2", "deepseek_v3")  # as transformers knows it
    counted = dimensions_from_config(config).num_parameters
    assert counted == _transformers_parameters(config)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 99}
        | {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32},
        {"model_type": "phi", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 99}
        | {"num_attention_heads": 4},
        {"model_type": "deepseek_v2", "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96}
        | {"vocab_size": 99, "num_attention_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "v_head_dim": 16}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "n_routed_experts": 8, "n_shared_experts": 2}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_key_value_heads": 4},
        {"model_type": "qwen2_moe", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
        | {"vocab_size": 99, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 6}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
        {"model_type": "smollm3", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
        | {"vocab_size": 99, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ],
    ids=lambda config: config["model_type"],
)
def test_other_families_count_as_in_transformers(config: dict[str, Any]) -> None:
    assert dimensions_from_config(config).num_parameters == _transformers_parameters(config)


@pytest.mark.parametrize("variant", variants())
def test_it_is_the_shape_of_the_checkpoint_that_the_engine_loads(variant: str, tmp_path: Path) -> None:
    folder, _ = make_tiny(variant, tmp_path)
    checkpoint = load_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    spec = checkpoint.spec
    kv = [len(group.layers) * group.values * 2 for group in spec.kv_groups()]
    # float32 weights, which make_tiny saves; K and V in 16 bits.
    assert shape_from_config(config, weight_bits=32, kv_bits=16) == shape_of(checkpoint, kv)


def test_latent_attention_keeps_one_vector_a_layer() -> None:
    shape = shape_from_config(known("DeepSeek-V3"), weight_bits=8, kv_bits=16)
    # 512 of latent and 64 rotated, two bytes each, in 61 layers: 70 kB a token, where 128 heads would take 4 MB.
    (group,) = shape.kv_groups
    assert (group.num_layers, group.window, group.bytes_per_token) == (61, None, 61 * 576 * 2)
    assert group.content == "latent"
    # A decode at context 1000 in the latent space: 128 heads x (576 scores + 512 values) a pair.
    assert shape.attention_multiply_adds(999, 1) == 61 * 128 * (576 + 512) * 1000
    # A prompt expands: 192 for scores, 128 for values; nothing lies before it.
    assert shape.attention_multiply_adds(0, 1000) == 61 * 128 * (192 + 128) * (1000 * 1001 // 2)
    # A chunk of 1000 after 1000: expanding the kept 1000 positions (512 x 128 x 256 each) is still the cheaper way.
    pairs = 2000 * 2001 // 2 - 1000 * 1001 // 2
    expanded = 61 * (128 * 320 * pairs + 1000 * 512 * 128 * 256)
    assert expanded < 61 * 128 * 1088 * pairs
    assert shape.attention_multiply_adds(1000, 1000) == expanded


def test_windows_and_experts_of_gpt_oss() -> None:
    shape = shape_from_config(known("gpt-oss-120b"), weight_bits=16, expert_bits=4.25, kv_bits=16)
    pairs = 18 * 2 * 64 * 64
    groups = [KVGroupShape(18, window, 18 * 2048, pair_multiply_adds=pairs) for window in (None, 128)]
    assert shape.kv_groups == tuple(groups)
    assert shape.experts is not None
    # 36 layers x 128 experts x 3 matrices of 2880 x 2880 in 4.25 bits, and biases of 3 x 2880 in 16.
    assert shape.experts.weight_bytes == 36 * 128 * (3 * 2880 * 2880 * 17 // 32 + 3 * 2880 * 2)
    assert shape.weight_bytes / 1e9 == pytest.approx(65.2, abs=0.1)  # OpenAI: the checkpoint is 60.8 GiB


def test_layers_of_several_kinds_are_each_counted_as_they_are() -> None:
    """Made up: of three layers one keeps a state, one a latent, and one keys and values behind a window."""
    mlp, rope = DenseMlp(32), RopeSpec(1e4, 8)
    grouped = LayerSpec(GroupedAttention(4, 2, 8, rope, window=16), mlp)
    latent = LayerSpec(LatentAttention(4, rank=12, plain_dim=8, rotated_dim=4, value_dim=8, rope=rope), mlp)
    recurrent = LayerSpec(ShortConvolution(channels=320, taps=3), mlp)
    spec = ModelSpec("made_up", 10, 16, 100, (recurrent, latent, grouped), 1e-5)
    assert [(one.content, one.window, one.values, one.layers) for one in spec.kv_groups()] == [
        ("latent", None, 12 + 4, (1,)),
        ("keys and values", 16, 2 * 2 * 8, (2,)),
        ("state", None, 640, (0,)),
    ]
    assert spec.common_layer is None
    dimensions = Dimensions(spec)
    assert dimensions.num_parameters == sum(prod(shape) for shape in spec.tensor_shapes().values())
    shape = dimensions.shape(weight_bits=16, kv_bits=16)
    assert shape.kv_bytes_per_token == 2 * (16 + 32), "a state takes no more for a token more"
    # At any context the state is read once; the latent whole, the window as far as it reaches.
    assert [shape.kv_bytes_read(context) for context in (1, 10, 50)] == [
        2 * (640 + context * 16 + min(context, 16) * 32) for context in (1, 10, 50)
    ]
    # A step writes the state back, too; a chunk reads and writes it once, however long it is.
    decode, chunk = (step_bytes_read(shape, work) for work in (StepWork(contexts=(50,)), StepWork(chunks=((50, 9),))))
    assert decode == shape.weight_bytes_read(1) + shape.kv_bytes_read(50) + 2 * 640
    assert chunk == shape.weight_bytes_read(9) + 2 * (2 * 640 + 50 * 16 + 15 * 32)
    first = step_bytes_read(shape, StepWork(chunks=((0, 9),)))
    assert first == shape.weight_bytes_read(9) + 2 * 640, "a sequence begins from zeros, which are not read"
    # Decode in the latent space: 4 heads x (2 x 12 + 4); of the state each number is changed and read once.
    assert shape.attention_multiply_adds(49, 1) == 50 * 4 * 28 + 16 * 2 * 4 * 8 + 2 * 640


def test_parts_add_up() -> None:
    dimensions = dimensions_from_config(known("Llama-3.1-70B"))
    layer = 8192 * (64 + 8 + 8) * 128 + 64 * 128 * 8192 + 3 * 8192 * 28_672
    assert dimensions.parameters_of(Part.LAYER) == 80 * layer
    assert dimensions.parameters_of(Part.HEAD) == 128_256 * 8192
    assert dimensions.num_parameters == 80 * layer + 2 * 128_256 * 8192 + 161 * 8192


def test_the_head_keeps_eight_bits_at_least() -> None:
    dimensions = dimensions_from_config(known("Llama-3.1-8B"))
    four = dimensions.shape(weight_bits=4, kv_bits=16)
    layers, head, vectors = 6_979_321_856, 128_256 * 4096, 65 * 4096
    assert four.weight_bytes_per_step == layers // 2 + head + 2 * vectors
    assert four.embedding_bytes == head
    sixteen = dimensions.shape(weight_bits=4, head_bits=16, kv_bits=16)
    assert sixteen.weight_bytes_per_step == layers // 2 + 2 * head + 2 * vectors


def test_an_unknown_family_is_counted_as_llama_and_says_so() -> None:
    llama = known("Llama-3.1-8B")
    other = dimensions_from_config(llama | {"model_type": "brand_new"})
    assert other.is_assumed and other.spec.family == "brand_new"
    assert other.not_run == "this engine knows no 'brand_new' models: it is counted as a Llama-like decoder"
    assert replace(other.spec, family="llama") == dimensions_from_config(llama).spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "wide"}, "hidden_size must be an integer"),
        ({"hidden_size": 2**40}, "hidden_size must be an integer"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be"),
        ({"num_key_value_heads": 7}, "not a multiple"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types holds 'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "list of 32 strings"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        ({"mamba_d_state": 16}, "layers that keep a state"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"model_type": 7}, "model_type must be a string"),
        ({"num_local_experts": 8}, "num_experts_per_tok is missing"),
    ],
)
def test_bad_configs_are_one_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        dimensions_from_config(known("Llama-3.1-8B") | change)


def test_bad_bits_are_one_sentence() -> None:
    with pytest.raises(BadRequestError, match="kv_bits must be from 1 to 64"):
        shape_from_config(known("Llama-3.1-8B"), weight_bits=16, kv_bits=0)


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-70B-Instruct", "llama 3.1 70b", "LLAMA_3.1_70B", "Meta-Llama-3.1-70B"]
)
def test_a_known_model_by_any_of_its_spellings(name: str) -> None:
    assert find_known_shape(name) is KNOWN_SHAPES["Llama-3.1-70B"]


def test_an_unknown_name_is_none() -> None:
    assert find_known_shape("llama-9-1T") is None
