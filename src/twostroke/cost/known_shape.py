"""The entry that a model known by name has, and the settings that all have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

QWEN3_5: dict[str, Any] = {
    "vocab": 248_320,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 262_144,
}


@dataclass(frozen=True, slots=True)
class KnownShape:
    config: Mapping[str, Any]
    weights: str = "bf16"
    """What its makers publish the weights in: a name of WEIGHT_FORMATS."""


def sizes(
    kind: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **more,
    }
