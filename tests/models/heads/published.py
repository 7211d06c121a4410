"""Heads as others publish them, with random weights: EAGLE-3's in both layouts, and Medusa's; and what an EAGLE-3 head
computes, with transformers' own attention, MLP, norms and rotary embedding in the published order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

VOCAB_SIZE = 256
DRAFT_VOCAB_SIZE = 96
HIDDEN_SIZE = 64
NUM_TAPS = 3
TAPS = [1, 2, 3]
LAYER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
MODULES = {"llama": (modeling_llama, "Llama"), "qwen3": (modeling_qwen3, "Qwen3")}


class PublishedHead(torch.nn.Module):
    """The layer, and all around it. Parameters have the published names, but for the layer's prefix."""

    def __init__(self, kind: str = "llama", *, embedding: bool = False, **flags: bool) -> None:
        super().__init__()
        module, prefix = MODULES[kind]
        self.kind, self.flags = kind, flags
        config = getattr(transformers, f"{prefix}Config")(**LAYER)
        config._attn_implementation = "eager"
        norm = getattr(module, f"{prefix}RMSNorm")
        size, eps = HIDDEN_SIZE, LAYER["rms_norm_eps"]
        layer = torch.nn.Module()
        layer.self_attn = getattr(module, f"{prefix}Attention")(config, 0)
        for name, heads in (("q", 4), ("k", 2), ("v", 2)):
            setattr(layer.self_attn, f"{name}_proj", torch.nn.Linear(2 * size, 16 * heads, bias=False))
        layer.mlp = getattr(module, f"{prefix}MLP")(config)
        layer.input_layernorm, layer.hidden_norm = norm(size, eps=eps), norm(size, eps=eps)
        layer.post_attention_layernorm = norm(size, eps=eps)
        self.midlayer = layer
        self.fc = torch.nn.Linear(NUM_TAPS * size, size, bias=False)
        self.norm = norm(size, eps=eps)
        self.lm_head = torch.nn.Linear(size, DRAFT_VOCAB_SIZE, bias=False)
        if flags.get("norm_before_fc"):
            self.input_norm = norm(NUM_TAPS * size, eps=eps)
        if flags.get("fc_norm"):
            self.fc_norm = torch.nn.ModuleList(norm(size, eps=eps) for _ in range(NUM_TAPS))
        if embedding:
            self.embed_tokens = torch.nn.Embedding(VOCAB_SIZE, size)
        self._rotary = [getattr(module, f"{prefix}RotaryEmbedding")(config)]
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                noise = torch.randn_like(parameter)
                parameter.copy_(1 + 0.2 * noise if "norm" in name else 1.5 * noise / parameter.shape[-1] ** 0.5)
        chosen = torch.randperm(VOCAB_SIZE)[:DRAFT_VOCAB_SIZE].sort().values
        self.target_ids = chosen

    def join(self, taps: torch.Tensor) -> torch.Tensor:
        if self.flags.get("norm_before_fc"):
            taps = self.input_norm(taps)
        if self.flags.get("fc_norm"):
            parts = taps.chunk(NUM_TAPS, dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps)

    @torch.no_grad()
    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A whole sequence at once, [n, hidden] each: the next hidden states, and the scores of the draft tokens."""
        layer, count = self.midlayer, len(embedded)
        normed = layer.hidden_norm(hidden)
        residual = normed if self.flags.get("norm_before_residual") else hidden
        inputs = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)[None]
        rotation = self._rotary[0](inputs, torch.arange(count)[None])
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        mixed, _ = layer.self_attn(hidden_states=inputs, position_embeddings=rotation, attention_mask=mask)
        hidden = residual + mixed[0]
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        normed = self.norm(hidden)
        return (normed if self.flags.get("norm_output") else hidden), self.lm_head(normed)

    def tensors(self, prefix: str = "midlayer.") -> dict[str, torch.Tensor]:
        named = {name.replace("midlayer.", prefix): value.detach().clone() for name, value in self.named_parameters()}
        marks = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        marks[self.target_ids] = True
        return named | {"d2t": self.target_ids - torch.arange(DRAFT_VOCAB_SIZE), "t2d": marks}

    def save(self, folder: Path, layout: str = "eagle", **changes: Any) -> Path:
        folder.mkdir(exist_ok=True)
        layer = {"model_type": self.kind, **LAYER}
        own = {"draft_vocab_size": DRAFT_VOCAB_SIZE, "eagle_aux_hidden_state_layer_ids": TAPS, **self.flags}
        if layout == "eagle":
            config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, **own}
        else:
            config = {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "speculators_version": "0.3.0",
                "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}},
                "transformer_layer_config": layer,
                **own,
            }
        config = {name: value for name, value in (config | changes).items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        save_file(self.tensors("midlayer." if layout == "eagle" else "layers.0."), folder / "model.safetensors")
        return folder


def medusa_tensors(num_heads: int, num_blocks: int, vllm_names: bool) -> dict[str, torch.Tensor]:
    found = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            name = f"blocks.{head}.layers.{block}" if vllm_names else f"{head}.{block}.linear"
            found[f"{name}.weight"] = torch.randn(HIDDEN_SIZE, HIDDEN_SIZE) / 8
            found[f"{name}.bias"] = torch.randn(HIDDEN_SIZE)
        name = f"lm_heads.{head}" if vllm_names else f"{head}.{num_blocks}"
        found[f"{name}.weight"] = torch.randn(VOCAB_SIZE, HIDDEN_SIZE) / 8
    return found
