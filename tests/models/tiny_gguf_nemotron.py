"""Nemotron-H as llama.cpp's converter writes it: the names that the `gguf` package knows, and the keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import torch


def nemotron_architecture(config: Any) -> gguf.MODEL_ARCH:
    return gguf.MODEL_ARCH.NEMOTRON_H_MOE if _has_experts(config) else gguf.MODEL_ARCH.NEMOTRON_H


def _has_experts(config: Any) -> bool:
    return "E" in config.hybrid_override_pattern


def nemotron_parts(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    name = name.replace("model.", "backbone.", 1)
    stem, _, own = name.partition(".mixer.")
    if own in ("A_log", "D"):
        yield name, (-tensor.exp() if own == "A_log" else tensor)[:, None]
    elif own == "dt_bias":
        yield f"{stem}.mixer.dt.bias", tensor
    elif own == "conv1d.weight":
        yield name, tensor.squeeze(1)
    elif own == "norm.weight":
        yield name, tensor.view(config.n_groups, -1)
    elif own.startswith("experts."):
        part = own.removeprefix("experts.")
        yield f"{stem.replace('backbone.', 'model.', 1)}.mlp.experts.{part}.weight", tensor
    elif own == "gate.e_score_correction_bias":
        yield f"{stem}.mixer.gate.e_score_correction.bias", tensor
    else:
        yield name, tensor


def nemotron_keys(config: Any) -> dict[str, Any]:
    kinds = config.hybrid_override_pattern
    width = config.moe_intermediate_size if _has_experts(config) else config.intermediate_size
    keys = {
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.head_count_kv": [config.num_key_value_heads if kind == "*" else 0 for kind in kinds],
        "feed_forward_length": [width if kind in "-E" else 0 for kind in kinds],
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "rope.scaling.finetuned": False,
    }
    if not _has_experts(config):
        return keys | dict.fromkeys(("expert_count", "expert_used_count", "expert_feed_forward_length"))
    if config.moe_latent_size is not None:
        keys["moe_latent_size"] = config.moe_latent_size
    return keys | {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_group_count": config.n_group,
    }
