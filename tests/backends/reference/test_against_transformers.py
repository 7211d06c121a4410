"""The reference backend's logits against Hugging Face transformers', for a random checkpoint of every family, through
save and load, and whatever pieces the sequence is computed in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from tests.backends.driver import layout_for, logits_by_prefill, logits_on_a_prefix_hit
from tests.models.tiny_checkpoints import (
    MAX_CONTEXT,
    ORIGINAL_CONTEXT,
    SHARP_ROPE,
    VOCAB_SIZE,
    exact_logits,
    make_classic,
    make_tiny,
    variants,
)
from tests.models.tiny_gguf import write_gguf
from tests.models.tiny_gguf_keys import later_latent_keys

from twostroke.backends.interface import BackendSettings
from twostroke.backends.reference import FACTORY
from twostroke.core.errors import ModelError
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

TOLERANCE = 1e-4
NUM_TOKENS = 53
BLOCK_SIZE = 8
HIT_BLOCKS = 3
# Longer than any window here and than several blocks; pieces that end inside blocks and inside windows.
PIECES = {"whole": [53], "chunks": [5, 16, 1, 23, 8], "decodes": [1], "mixed": [20, 11]}
GGUF_VARIANTS = (
    "llama",
    "llama_tied",
    "llama_llama3",
    "llama_linear",
    "llama_bias",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3_longrope",
    "phi3_partial",
    "llama_yarn",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "glm4_moe_lite",
    "mistral4",
    "glm4_moe",
    "dots1",
    "ministral3",
    "qwen2_moe",
    "gpt_oss",
    "minimax_m2",
    "gemma4",
    "gemma4_large",
    "gemma4_moe",
    "gemma4_unified",
    "lfm2",
    "lfm2_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "granite_hybrid",
    "granite_hybrid_dense",
    "smollm3",
    "olmo2",
    "olmo3",
    "granite",
    "seed_oss",
    "ernie4_5",
    "ernie4_5_moe",
    "granite_moe",
    "granite_moe_shared",
    "olmoe",
    "exaone4",
    "glm4",
    "nemotron_h",
    "nemotron_h_latent",
    "hunyuan_dense",
    "hunyuan_moe",
)
_MISTRAL_ROPE = {**SHARP_ROPE, "mscale": 1.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
# Files have experts or MLPs, and say nothing of the shortest step.
_NEMOTRON_FILE = {
    "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention", "moe"],
    "time_step_min": 1e-9,
}
# What a GGUF file does not hold: query_pre_attn_scalar (it follows from the head size), a rotation's sharpening beside
# the scores', gpt-oss's limit, groups of Granite's heads.
GGUF_CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "deepseek_v2": {"rope_parameters": {**SHARP_ROPE, "mscale": 1.0}},
    "deepseek_v2_lite": {"rope_parameters": {**SHARP_ROPE, "mscale": 1.0}},
    "deepseek_v3": {"rope_parameters": {**SHARP_ROPE, "mscale": 1.0}},
    "ministral3": {"rope_parameters": _MISTRAL_ROPE},
    "mistral4": {"rope_parameters": {**_MISTRAL_ROPE, "llama_4_scaling_beta": 0.0}},
    "gpt_oss": {"swiglu_limit": 7.0},
    "granite_hybrid": {"mamba_n_groups": 1},
    "nemotron_h": _NEMOTRON_FILE,
    "nemotron_h_latent": _NEMOTRON_FILE,
}


def tokens(count: int = NUM_TOKENS) -> list[int]:
    return [int(token) for token in np.random.default_rng(7).integers(6, VOCAB_SIZE, count)]


def reference_logits(
    checkpoint: Checkpoint, token_ids: list[int], pieces: list[int], max_context: int = ORIGINAL_CONTEXT
) -> npt.NDArray[np.float32]:
    layout = layout_for(checkpoint.spec, len(token_ids), BLOCK_SIZE)
    backend = FACTORY.create(checkpoint, layout, BackendSettings(max_context=max_context, max_tokens_per_step=64))
    try:
        return logits_by_prefill(backend, token_ids, pieces)
    finally:
        backend.close()


def hit_logits(checkpoint: Checkpoint, token_ids: list[int]) -> npt.NDArray[np.float32]:
    layout = layout_for(checkpoint.spec, len(token_ids), BLOCK_SIZE, num_sequences=2)
    settings = BackendSettings(max_context=ORIGINAL_CONTEXT, max_tokens_per_step=64)
    backend = FACTORY.create(checkpoint, layout, settings)
    try:
        return logits_on_a_prefix_hit(backend, token_ids, HIT_BLOCKS)
    finally:
        backend.close()


def assert_close(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> None:
    assert ours.shape == theirs.shape
    assert theirs.std() > 0.5, "logits this flat would prove nothing"
    assert np.abs(ours - theirs).max() < TOLERANCE


@pytest.mark.parametrize("variant", variants())
def test_every_family_in_every_way(variant: str, tmp_path: Path) -> None:
    folder, model = make_tiny(variant, tmp_path)
    expected = exact_logits(model, tokens())
    checkpoint = load_checkpoint(folder)
    for pieces in PIECES.values():
        assert_close(reference_logits(checkpoint, tokens(), pieces), expected)
    assert_close(hit_logits(checkpoint, tokens()), expected[HIT_BLOCKS * BLOCK_SIZE :])


@pytest.mark.parametrize(
    "variant",
    [
        *("llama", "llama_llama3", "mistral", "qwen2_window", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3"),
        "phi3_partial",
    ],
)
def test_configs_of_the_older_manner(variant: str, tmp_path: Path) -> None:
    folder, model = make_tiny(variant, tmp_path)
    new = load_checkpoint(folder).spec
    make_classic(folder)
    checkpoint = load_checkpoint(folder)
    assert checkpoint.spec == new
    assert_close(reference_logits(checkpoint, tokens(), [NUM_TOKENS]), exact_logits(model, tokens()))


@pytest.mark.parametrize("variant", GGUF_VARIANTS)
def test_the_same_model_as_gguf(variant: str, tmp_path: Path) -> None:
    folder, model = make_tiny(variant, tmp_path / "folder", **GGUF_CHANGES.get(variant, {}))
    # Most files do not hold the pattern.
    overrides = {"attention.sliding_window_pattern": 3} if variant == "gemma3" else {}
    checkpoint = load_checkpoint(write_gguf(model, tmp_path / "tiny.gguf", **overrides))
    expected = exact_logits(model, tokens())
    assert_close(reference_logits(checkpoint, tokens(), [30, 10]), expected)
    assert checkpoint.spec.tensor_shapes() == load_checkpoint(folder).spec.tensor_shapes()


def test_nemotron_of_mlps_as_gguf(tmp_path: Path) -> None:
    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]
    _, model = make_tiny("nemotron_h", tmp_path / "folder", layers_block_type=kinds, time_step_min=1e-9)
    checkpoint = load_checkpoint(write_gguf(model, tmp_path / "tiny.gguf"))
    assert checkpoint.gguf_metadata is not None
    assert checkpoint.gguf_metadata["general.architecture"] == "nemotron_h" and checkpoint.spec.moe is None
    assert_close(reference_logits(checkpoint, tokens(), [30, 10]), exact_logits(model, tokens()))


def test_nemotron_files_count_layers_that_draft(tmp_path: Path) -> None:
    """Layer by layer, whatever they are."""
    _, model = make_tiny("nemotron_h", tmp_path / "folder", **_NEMOTRON_FILE)
    plain = load_checkpoint(write_gguf(model, tmp_path / "plain.gguf")).spec
    more = {"block_count": 6, "nextn_predict_layers": 1, "feed_forward_length": [0, 0, 32, 0, 32, 32]}
    more["attention.head_count_kv"] = [0, 2, 0, 0, 0, 2]
    extra = {"blk.5.nextn.enorm.weight": np.ones(plain.hidden_size, np.float32)}
    assert load_checkpoint(write_gguf(model, tmp_path / "more.gguf", extra=extra, **more)).spec == plain


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"feed_forward_length": [0] * 5}, "must hold the width of an MLP, or 0, for each of 5 layers"),
        ({"feed_forward_length": 96}, "must be a list of integers"),
        ({"feed_forward_length": [0, 96, 96, 0, 96]}, "gives layer 2 an MLP, and it attends"),
        ({"nextn_predict_layers": 5}, "nextn_predict_layers must be an integer from 0 to 4"),
        ({"ssm.group_count": 3}, "the 8 heads are not a multiple of it"),
    ],
)
def test_nemotron_files_that_contradict_themselves(overrides: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]
    _, model = make_tiny("nemotron_h", tmp_path / "folder", layers_block_type=kinds)
    with pytest.raises(ModelError, match=complaint):
        load_checkpoint(write_gguf(model, tmp_path / "tiny.gguf", **overrides))


@pytest.mark.parametrize("variant", ["deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite", "mistral4"])
def test_gguf_files_with_a_stack_of_heads_for_keys_and_one_for_values(variant: str, tmp_path: Path) -> None:
    _, model = make_tiny(variant, tmp_path / "folder", **GGUF_CHANGES.get(variant, {}))
    path = write_gguf(model, tmp_path / "tiny.gguf", **later_latent_keys(model.config))
    checkpoint = load_checkpoint(path)
    assert_close(reference_logits(checkpoint, tokens(), [30, 10]), exact_logits(model, tokens()))


def test_gguf_files_of_mistrals_own_weights(tmp_path: Path) -> None:
    """They say "deepseek2", have the two halves of an expert apart, and say how queries grow."""
    _, model = make_tiny("mistral4", tmp_path / "folder", rope_parameters=_MISTRAL_ROPE, n_group=1, topk_group=1)
    keys = {**later_latent_keys(model.config), "attention.temperature_scale": 0.3, "attention.temperature_length": 16}
    path = write_gguf(model, tmp_path / "tiny.gguf", None, gguf.MODEL_ARCH.DEEPSEEK2, **keys)
    expected = exact_logits(model, tokens())
    assert_close(reference_logits(load_checkpoint(path), tokens(), [30, 10]), expected)
    del keys["attention.temperature_scale"]
    silent = load_checkpoint(write_gguf(model, tmp_path / "silent.gguf", None, gguf.MODEL_ARCH.DEEPSEEK2, **keys))
    assert np.abs(reference_logits(silent, tokens(), [30, 10]) - expected).max() > 0.01


def test_gguf_files_of_mistral_small_3(tmp_path: Path) -> None:
    """They say "mistral3" as Ministral's do, and nothing of YaRN."""
    _, model = make_tiny("mistral", tmp_path / "folder", sliding_window=None)
    path = write_gguf(model, tmp_path / "tiny.gguf", None, gguf.MODEL_ARCH.MISTRAL3)
    assert_close(reference_logits(load_checkpoint(path), tokens(), [30, 10]), exact_logits(model, tokens()))


@pytest.mark.parametrize("variant", ["glm4_moe", "glm4_moe_lite", "deepseek_v3"])
def test_gguf_files_count_layers_that_draft(variant: str, tmp_path: Path) -> None:
    _, model = make_tiny(variant, tmp_path / "folder", **GGUF_CHANGES.get(variant, {}))
    plain = load_checkpoint(write_gguf(model, tmp_path / "plain.gguf")).spec
    more = {"block_count": plain.num_layers + 1, "nextn_predict_layers": 1}
    extra = {f"blk.{plain.num_layers}.nextn.enorm.weight": np.ones(plain.hidden_size, np.float32)}
    assert load_checkpoint(write_gguf(model, tmp_path / "more.gguf", extra=extra, **more)).spec == plain
    with pytest.raises(ModelError, match="nextn_predict_layers must be an integer from 0 to 3"):
        load_checkpoint(write_gguf(model, tmp_path / "none.gguf", **{**more, "nextn_predict_layers": 4}))


@pytest.mark.parametrize("variant", ["phi3_longrope", "phi3_partial"])
@pytest.mark.parametrize("as_gguf", [False, True])
def test_longrope_beyond_the_original_context(variant: str, as_gguf: bool, tmp_path: Path) -> None:
    """The engine's context decides for the long factors; transformers goes by the sequence, so it must be long too."""
    folder, model = make_tiny(variant, tmp_path / "folder")
    long = tokens(ORIGINAL_CONTEXT + 20)
    checkpoint = load_checkpoint(write_gguf(model, tmp_path / "tiny.gguf") if as_gguf else folder)
    ours = reference_logits(checkpoint, long, [50, 30], max_context=MAX_CONTEXT)
    assert_close(ours, exact_logits(model, long))
    within = [reference_logits(checkpoint, tokens(), [NUM_TOKENS], limit) for limit in (ORIGINAL_CONTEXT, MAX_CONTEXT)]
    assert np.abs(within[0] - within[1]).max() > 0.01
