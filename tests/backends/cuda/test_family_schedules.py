"""Random schedules on the device: each request's greedy tokens are those of the request by itself, whatever company it
has. In float32; on a host every kernel is interpreted, and a family takes an hour."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.cuda.tables import fused_up_to
from tests.engine.family_schedules import MAX_CONTEXT, Schedule, check_met, hold
from tests.models.tiny_checkpoints import make_tiny, variants

from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.supported import unsupported_layers
from twostroke.core.formats import Formats
from twostroke.core.kv_layout import KVLayout
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

EXPERTS = {"num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2
FEW_EXPERTS = {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
SMALLER: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "mistral": {"num_hidden_layers": 1},
    "qwen3": {"num_hidden_layers": 1},
    "gemma2": {"num_hidden_layers": 2},
    "gemma3": {"num_hidden_layers": 2, "layer_types": SLIDING_AND_FULL[:2]},
    "qwen2_moe": FEW_EXPERTS,
    "qwen3_moe": FEW_EXPERTS,
    "mixtral": {"num_hidden_layers": 1},
    "gpt_oss": {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v2": EXPERTS,
    "deepseek_v2_lite": EXPERTS,
    "deepseek_v3": {**EXPERTS, "n_group": 2, "topk_group": 1},
    "mistral4": {**EXPERTS, "n_group": 2, "topk_group": 1},
    "glm4_moe": EXPERTS,
    "ministral3": {"num_hidden_layers": 1},
    "olmo2": {"num_hidden_layers": 1},
    "seed_oss": {"num_hidden_layers": 1},
    "ernie4_5": {"num_hidden_layers": 1},
    "ernie4_5_moe": {"num_hidden_layers": 2, "moe_num_experts": 4},
    "granite": {"num_hidden_layers": 1},
    "granite_moe": {"num_hidden_layers": 1, "num_local_experts": 4},
    "granite_moe_shared": {"num_hidden_layers": 1},
    "glm4": {"num_hidden_layers": 1},
    "olmoe": FEW_EXPERTS,
    "minimax_m2": {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_dense": {"num_hidden_layers": 1},
    "hunyuan_moe": {"num_hidden_layers": 1, "num_experts": 4},
    "gemma4": {"num_hidden_layers": 4, "layer_types": SLIDING_AND_FULL, "num_kv_shared_layers": 2},
    "gemma4_moe": {"num_experts": 4, "top_k_experts": 2},
    "nemotron_h": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h_latent": {"n_routed_experts": 4, "num_experts_per_tok": 2},
}
"""What is changed of a variant, so that interpreted kernels have less to do."""
MANY = 200


@dataclass(frozen=True)
class DeviceMaker:
    device: str
    block_sizes: tuple[int, ...] = (16,)
    most_more: int = 1

    def backend(self, checkpoint: Checkpoint, layout: KVLayout, schedule: Schedule) -> CudaBackend:
        return CudaBackend(
            checkpoint,
            layout,
            device=torch.device(self.device),
            formats=Formats("f32", "f32", "f32"),
            max_context=MAX_CONTEXT,
            max_tokens_per_step=schedule.step_tokens,
            max_running=schedule.max_running,
            choices=fused_up_to(0, self.device, torch.float32),
        )


def tiny(variant: str, folder: Path) -> Checkpoint:
    return load_checkpoint(make_tiny(variant, folder, **SMALLER.get(variant, {}))[0])


def test_a_schedule(tmp_path: Path, device: str) -> None:
    hold(tiny("llama", tmp_path), DeviceMaker(device), 1)


@pytest.mark.parametrize("variant", SMALLER)
def test_the_smaller_ones_are_sound(variant: str, tmp_path: Path) -> None:
    assert unsupported_layers(tiny(variant, tmp_path).spec) is None


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("variant", variants())
def test_many_schedules(variant: str, tmp_path: Path, device: str) -> None:
    checkpoint = tiny(variant, tmp_path)
    check_met(hold(checkpoint, DeviceMaker(device), MANY), checkpoint.spec)
