"""GGUF files whose matrices are of any kind, written by the `gguf` package, beside the same model in transformers with
the weights as that package dequantises them. Block bytes are random: what they mean is what dequantising them gives."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import gguf
import torch
import transformers
from tests.backends.cpu.random_weights import random_tensor
from tests.models.tiny_gguf import Stored, write_gguf
from transformers import PreTrainedModel

from twostroke.models.weights.tensor import WeightKind

WIDTH, VOCAB_SIZE = 256, 256
"""Rows are one block of the largest kinds."""


def tiny_model(*, experts: bool, layers: int = 1) -> PreTrainedModel:
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    if not experts:
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).eval()
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "norm_topk_prob": True}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **moe)).eval()


def write_of_kinds(model: PreTrainedModel, path: Path, kind_of: Callable[[str], WeightKind]) -> Path:
    """`kind_of` is asked with the GGUF name of each matrix; the model is given the weights that the file holds."""
    seeds = count()

    def store(name: str, values: torch.Tensor) -> Stored | None:
        if values.ndim < 2 or ".ffn_gate_inp." in name:
            return None
        kind = kind_of(name)
        made = random_tensor(kind, values[..., 0].numel(), values.shape[-1], seed=next(seeds))
        kept_as = gguf.GGMLQuantizationType[kind.name]
        values.copy_(torch.from_numpy(gguf.quants.dequantize(made.data, kept_as).reshape(values.shape)))
        return made.data.reshape(*values.shape[:-1], -1), kept_as

    with torch.no_grad():
        return write_gguf(model, path, store)
