"""Tiny models with an MTP block, in the forms that people publish: quantised folders, and GGUF files with the names
that llama.cpp gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.models.quantised.folders import FORMATS, quantise_folder
from tests.models.tiny_gguf import Stored, write_gguf
from tests.models.tiny_gguf_keys import later_latent_keys
from tests.speculation.test_mtp import Made

IN_BLOCK = {"mtp_block.": "", "post_norm.": "shared_head.norm."}
"""What transformers calls a block's parts, and what published files do."""


IN_FLOATS = ("linear_attn", "q_proj")
"""Of Qwen's: their makers leave what goes into states as it was."""
LEAVING_HYBRIDS = {
    "compressed-tensors": {"ignore": ["lm_head", "re:.*linear_attn.*", "re:.*q_proj"]},
    "awq": {"modules_to_not_convert": list(IN_FLOATS)},
}


def is_of_block(name: str, made: Made) -> bool:
    return name.startswith(("mtp.", f"model.layers.{made.model.config.num_hidden_layers}."))


def quantised(made: Made, target: Path, form: str, kept: Callable[[str], bool]) -> tuple[Path, Path]:
    """The folder in this format, beside the one of the floats that are meant: (quantised, meant). `kept`: by its name,
    what of the block stays in floats, and is listed nowhere. Of Qwen's, `IN_FLOATS` stays too, and is listed."""
    found, meant = quantise_folder(made.folder, target, FORMATS[form])
    plain = load_file(made.folder / "model.safetensors")
    hybrid = IN_FLOATS if hasattr(made.model.config, "linear_num_key_heads") else ()
    stays = [name for name in plain if any(part in name for part in hybrid) or (is_of_block(name, made) and kept(name))]
    for folder in (found, meant):
        tensors = load_file(folder / "model.safetensors")
        modules = tuple(name.removesuffix("weight") for name in stays if name.endswith(".weight"))
        tensors = {name: own for name, own in tensors.items() if not name.startswith(modules)}
        tensors |= {name: own for name, own in plain.items() if name.startswith(modules) or name in stays}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((found / "config.json").read_text())
    if hybrid:
        config["quantization_config"] |= LEAVING_HYBRIDS[config["quantization_config"]["quant_method"]]
        (found / "config.json").write_text(json.dumps(config))
    return found, meant


def in_gguf(made: Made, path: Path, store: Callable[[str, torch.Tensor], Stored | None] | None = None) -> Path:
    config = made.model.config
    block = {}
    for name, tensor in made.block.state_dict().items():
        for part, other in IN_BLOCK.items():
            name = other + name.removeprefix(part) if name.startswith(part) else name
        block[f"model.layers.{config.num_hidden_layers}.{name}"] = tensor
    keys = later_latent_keys(config) if config.model_type == "deepseek_v3" else {}
    return write_gguf(made.model, path, store, drafting=block, **keys)
