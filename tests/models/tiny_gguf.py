"""Writes a tiny transformers model as an F32 GGUF file, with the names, keys and row order that llama.cpp's converter
gives them. Uses the `gguf` package, so that the file is not of our own making."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tests.models.tiny_gguf_keys import GEMMA4, model_keys
from tests.models.tiny_gguf_nemotron import nemotron_architecture, nemotron_parts
from transformers import PreTrainedModel

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "glm4_moe_lite": gguf.MODEL_ARCH.DEEPSEEK2,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "dots1": gguf.MODEL_ARCH.DOTS1,
    "mistral4": gguf.MODEL_ARCH.MISTRAL4,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "gemma4_unified_text": gguf.MODEL_ARCH.GEMMA4,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "hunyuan_v1_moe": gguf.MODEL_ARCH.HUNYUAN_MOE,
}


_GEMMA4_BARE = (".router.", ".experts.", "layer_scalar")
_GEMMA4_SCALES = {".router.scale.weight": "ffn_gate_inp.scale", ".per_expert_scale.weight": "ffn_down_exps.scale"}
_IN_PAIRS = ("llama", "mistral", "ministral3", "mixtral", "smollm3", "granite")
"""Whose q and k rows the converter puts in another order. Mistral 4 has latents instead."""
_UNMAPPED = {"classifier.weight": "cls.output.weight"}
"""Names that the converter gives without its map."""
Stored = tuple[np.ndarray[Any, np.dtype[np.uint8]], gguf.GGMLQuantizationType]


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    store: Callable[[str, torch.Tensor], Stored | None] | None = None,
    architecture: gguf.MODEL_ARCH | None = None,
    extra: dict[str, np.ndarray[Any, np.dtype[np.float32]]] | None = None,
    drafting: dict[str, torch.Tensor] | None = None,
    **overrides: Any,
) -> Path:
    """`architecture`: another than the model's own, that has the same tensors. `extra`: tensors beside the model's, by
    their names in the file. `drafting`: a layer more, which drafts, named as in a folder. `overrides` replace or add
    keys, without the architecture's prefix; a tokenizer's are taken as they are. `store`, asked with each tensor's name
    in the file and its values, may give bytes of another kind."""
    config = deepcopy(model.config)
    config.allow_global_per_layer_attribute_access = True  # what sliding layers have
    is_nemotron = config.model_type == "nemotron_h"
    architecture = architecture or (nemotron_architecture(config) if is_nemotron else _ARCHITECTURES[config.model_type])
    name = gguf.MODEL_ARCH_NAMES[architecture]
    writer = gguf.GGUFWriter(path, name)
    more_layers = {"block_count": config.num_hidden_layers + 1, "nextn_predict_layers": 1} if drafting else {}
    for key, value in {**model_keys(config), **more_layers, **overrides}.items():
        if value is not None:
            add_key(writer, key if key.startswith("tokenizer.") else f"{name}.{key}", value)
    num_layers = config.num_hidden_layers + bool(drafting)
    # The package knows names of layers that draft for some models, and llama.cpp has them in others' files, too.
    names, more = (gguf.get_tensor_name_map(own, num_layers) for own in (architecture, gguf.MODEL_ARCH.GLM4_MOE))
    has_stacks = "attention.key_length_mla" in overrides
    fuses = architecture is gguf.MODEL_ARCH.MISTRAL4
    for stored_name, tensor in _gguf_parts({**model.state_dict(), **(drafting or {})}, config, has_stacks, fuses):
        if stored_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        new_name = _UNMAPPED.get(stored_name) or _gemma4_scale(stored_name)
        new_name = new_name or names.get_name(stored_name, try_suffixes=(".weight", ".bias"))
        new_name = new_name or more.get_name(stored_name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, stored_name
        new_name += ".weight" if new_name.endswith("attn_sinks") else ""
        quantised = store(new_name, tensor) if store is not None else None
        if quantised is None:
            writer.add_tensor(new_name, _stored(config, stored_name, tensor))
        else:
            writer.add_tensor(new_name, quantised[0], raw_dtype=quantised[1])
    for extra_name, values in {**_rope_tensors(config), **(extra or {})}.items():
        writer.add_tensor(extra_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gemma4_scale(name: str) -> str | None:
    for ending, new_name in _GEMMA4_SCALES.items():
        if name.endswith(ending):
            return f"blk.{name.split('.layers.')[1].split('.')[0]}.{new_name}"
    return None


def _gguf_parts(
    state: dict[str, torch.Tensor], config: Any, has_stacks: bool, fuses: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stacks of experts have names of their own, and gate and up are apart unless the file `fuses` them. `has_stacks`:
    what expands latents lies in a stack of heads for keys and one for values."""
    for name, tensor in state.items():
        # As the `gguf` package knows them.
        stem = name.rpartition(".")[0].removeprefix("model." if config.model_type == "lfm2_moe" else "") + "."
        if config.model_type in GEMMA4 and any(part in name for part in _GEMMA4_BARE):
            yield name if name.endswith(".weight") else f"{name}.weight", tensor
        elif ".linear_attn." in name:
            yield from _delta_net_parts(name, tensor, config)
        elif config.model_type.startswith("granitemoe"):
            yield from _granite_parts(name, tensor, config)
        elif config.model_type == "nemotron_h":
            yield from nemotron_parts(name, tensor, config)
        elif config.model_type == "gpt_oss" and ".experts." in name:
            yield from _gpt_oss_parts(name, tensor)
        elif name.endswith("moe_statics.e_score_correction_bias"):
            yield name.replace(".gate.moe_", ".moe_").replace("_bias", ".bias"), tensor.squeeze(0)
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("_bias", ".bias"), tensor
        elif name.endswith("feed_forward.expert_bias"):
            yield f"{name}.bias", tensor
        elif name.endswith("conv.weight"):
            yield name, tensor.squeeze(1)
        elif name.endswith("kv_b_proj.weight") and has_stacks:
            by_head = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = by_head.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), values
        elif name.endswith(".experts.gate_up_proj") and fuses:
            yield f"{name}.weight", tensor
        elif name.endswith(".experts.gate_up_proj"):
            for part, half in zip(_expert_parts(config)[:2], tensor.chunk(2, dim=1), strict=True):
                yield stem + f"{part}.weight", half
        elif name.endswith(".experts.down_proj"):
            yield stem + f"{_expert_parts(config)[2]}.weight", tensor
        else:
            yield name, tensor


def _expert_parts(config: Any) -> tuple[str, ...]:
    """As the `gguf` package knows gate, up and down of stacked experts."""
    return ("w1", "w3", "w2") if config.model_type == "lfm2_moe" else ("gate_proj", "up_proj", "down_proj")


def _delta_net_parts(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Of Qwen3-Next, q, k and v are taken out of each head of keys; of Qwen3.5, heads of values are put in another
    order: the first of each head of keys, then the second of each."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim, each = config.linear_key_head_dim, config.linear_value_head_dim, heads // keys
    stem, _, own = name.rpartition(".linear_attn.")
    stem += ".linear_attn."
    if own == "in_proj_qkvz.weight":
        parts = tensor.view(keys, -1, tensor.shape[1]).split(
            [key_dim, key_dim, each * value_dim, each * value_dim], dim=1
        )
        q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
        yield f"{stem}in_proj_qkv.weight", torch.cat([q, k, v])
        yield f"{stem}in_proj_z.weight", z
        return

    def ordered(values: torch.Tensor, width: int) -> torch.Tensor:
        if config.model_type == "qwen3_next":
            return values
        return values.view(keys, each, width, *values.shape[1:]).transpose(0, 1).reshape(values.shape)

    width = 2 * keys * key_dim
    if own == "A_log":
        yield name, ordered(-tensor.exp(), 1)
    elif own == "dt_bias":
        yield f"{stem}dt_proj.bias", ordered(tensor, 1)
    elif own == "conv1d.weight":
        tensor = tensor.squeeze(1)
        yield name, torch.cat([tensor[:width], ordered(tensor[width:], value_dim)])
    elif own == "in_proj_qkv.weight":
        yield name, torch.cat([tensor[:width], ordered(tensor[width:], value_dim)])
    elif own in ("in_proj_b.weight", "in_proj_a.weight"):
        yield name, ordered(tensor, 1)
    elif own == "in_proj_z.weight":
        yield name, ordered(tensor, value_dim)
    elif own == "out_proj.weight":
        yield name, ordered(tensor.T, value_dim).T
    else:
        yield name, tensor


def _granite_parts(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    stem, _, own = name.partition(".mamba.")
    if own in ("A_log", "D"):
        yield name, (-tensor.exp() if own == "A_log" else tensor)[:, None]
    elif own == "dt_bias":
        yield f"{stem}.mamba.dt_proj.bias", tensor
    elif own == "conv1d.weight":
        yield name, tensor.squeeze(1)
    elif own == "norm.weight":
        yield name, tensor.view(config.mamba_n_groups, -1)
    elif ".shared_mlp." in name and not config.num_local_experts:
        stem = name.partition(".shared_mlp.")[0]
        if name.endswith("output_linear.weight"):
            yield f"{stem}.mlp.down_proj.weight", tensor
        else:
            gate, up = tensor.chunk(2)
            yield f"{stem}.mlp.gate_proj.weight", gate
            yield f"{stem}.mlp.up_proj.weight", up
    elif ".shared_mlp." in name and name.endswith("input_linear.weight"):
        gate, up = tensor.chunk(2)
        stem = name.partition(".shared_mlp.")[0]
        yield f"{stem}.mlp.shared_expert.gate_proj.weight", gate
        yield f"{stem}.mlp.shared_expert.up_proj.weight", up
    elif name.endswith("experts.gate_up_proj"):
        stem = name.partition(".block_sparse_moe.")[0]
        for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
            yield f"{stem}.mlp.experts.{part}_proj.weight", half
    elif name.endswith("experts.down_proj"):
        yield f"{name.partition('.block_sparse_moe.')[0]}.mlp.experts.down_proj.weight", tensor
    elif name.endswith("router.weight"):
        yield name.replace("router.weight", "router.layer.weight"), tensor
    else:
        yield name, tensor


def _gpt_oss_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Stored with inputs first, gates and ups in turn."""
    kind = "bias" if name.endswith("_bias") else "weight"
    rows_first = tensor if kind == "bias" else tensor.transpose(1, 2)
    stem = name.removesuffix("_bias")
    if stem.endswith("down_proj"):
        yield f"{stem}.{kind}", rows_first
    else:
        for place, part in enumerate(("gate", "up")):
            yield f"{stem.replace('gate_up', part)}.{kind}", rows_first[:, place::2]


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _stored(config: Any, name: str, tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    is_less_one = config.model_type.startswith(("gemma2", "gemma3", "qwen3_next", "qwen3_5"))
    is_less_one = is_less_one or config.model_type == "gemma"
    if is_less_one and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    if config.model_type in ("llama", "mistral", "ministral3", "mixtral", "smollm3") or config.model_type.startswith(
        "granite"
    ):
        if ".q_proj." in name:
            tensor = _pairs_from_halves(tensor, config.num_attention_heads)
        if ".k_proj." in name:
            tensor = _pairs_from_halves(tensor, config.num_key_value_heads)
    return tensor.float().contiguous().numpy()


def _pairs_from_halves(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Each head's two halves, interleaved row by row."""
    first, second = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:]).unbind(1)
    return torch.stack([first, second], dim=2).reshape(tensor.shape)


def _rope_tensors(config: Any) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    ropes = getattr(config, "rope_parameters", None) or {}
    if config.model_type in GEMMA4:
        pairs = config.per_layer_config[config.num_hidden_layers - 1].head_dim // 2
        rotated = int(pairs * ropes["full_attention"]["partial_rotary_factor"])
        return {"rope_freqs.weight": np.array([1.0] * rotated + [1e30] * (pairs - rotated), dtype=np.float32)}
    if ropes.get("rope_type") == "longrope":
        return {
            "rope_factors_long.weight": np.array(ropes["long_factor"], dtype=np.float32),
            "rope_factors_short.weight": np.array(ropes["short_factor"], dtype=np.float32),
        }
    if ropes.get("rope_type") == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        dim = 2 * len(scaled)
        plain = ropes["rope_theta"] ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
        return {"rope_freqs.weight": (plain / scaled.double().numpy()).astype(np.float32)}
    return {}
