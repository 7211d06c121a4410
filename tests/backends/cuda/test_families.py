"""Families with layers of their own kind, whole, against the reference and through the scheduler: prompts in chunks,
prefix hits, decodes beside them, steps padded to captured shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.backends.cuda.engines import Sizes, mixed_requests, play_both
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends import cuda
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

QUICK = Sizes(step_tokens=12, max_rows=4, max_context=32)
SMALL: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen2_moe": {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {"num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "ministral3": {"num_hidden_layers": 1},
    "deepseek_v2_lite": {"num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "mistral4": {"num_hidden_layers": 1, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "olmo2": {"num_hidden_layers": 1},
    "olmoe": {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_dense": {"num_hidden_layers": 1},
    "gemma4": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "gemma4_moe": {"num_experts": 4, "top_k_experts": 2},
    "nemotron_h": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h_latent": {
        "layers_block_type": ["linear_attention", "full_attention", "moe"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
    "ernie4_5_moe": {"num_hidden_layers": 2, "moe_num_experts": 4, "moe_k": 2},
}
"""Of the default tests: sizes that the interpreter is done with soon."""
LONGER = (
    *("gpt_oss", "qwen2_moe", "qwen3_moe_mixed", "glm4_moe", "ministral3"),
    *("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite", "mistral4"),
    *("lfm2_moe", "qwen3_next", "qwen3_next_mixed", "qwen3_5_moe", "granite_hybrid", "granite_hybrid_dense"),
    *("smollm3", "lfm2", "qwen3_5"),
    *("olmo2", "olmo3", "exaone4", "olmoe", "minimax_m2", "hunyuan_dense", "hunyuan_moe"),
    *("nemotron_h", "nemotron_h_latent", "ernie4_5_moe", "gemma4", "gemma4_large", "gemma4_moe", "gemma4_unified"),
)


def tiny(variant: str, folder: Path, **changes: Any) -> Checkpoint:
    return load_checkpoint(make_tiny(variant, folder, **changes)[0])


@pytest.mark.parametrize("variant", SMALL)
def test_greedy_tokens_are_the_references(variant: str, tmp_path: Path, device: str) -> None:
    checkpoint = tiny(variant, tmp_path, **SMALL[variant])
    assert cuda._unsupported_shape(checkpoint) is None
    ours, theirs = play_both(checkpoint, mixed_requests((3, 19, 1), (4, 3, 3, 2)), device, QUICK)
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("few_rows", [0, None])
@pytest.mark.parametrize("variant", LONGER)
def test_longer_answers_are_the_references(variant: str, few_rows: int | None, tmp_path: Path, device: str) -> None:
    """`few_rows`: products by cuBLAS, or as the tables say, which take the few tokens' own kernels."""
    requests = mixed_requests((5, 40, 1, 17), (9, 4, 7, 3, 6))
    ours, theirs = play_both(tiny(variant, tmp_path), requests, device, Sizes(), few_rows=few_rows)
    assert ours == theirs
