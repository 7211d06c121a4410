"""A trained head as a folder that others load, too: EAGLE's layout, with the layer ids in the manner of vLLM at the top
and in SGLang's within `eagle_config`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.models.heads.eagle3 import Eagle3Spec
from twostroke.models.weights.write_safetensors import bfloat16, write_safetensors
from twostroke.training.head import Head

HEAD_FILE = "model.safetensors"
_LAYER = "midlayer"
_NAMES = {
    "fc": "fc.weight",
    "final_norm": "norm.weight",
    "output": "lm_head.weight",
    "embedding_norm": f"{_LAYER}.input_layernorm.weight",
    "hidden_norm": f"{_LAYER}.hidden_norm.weight",
    "mlp_norm": f"{_LAYER}.post_attention_layernorm.weight",
    **{name: f"{_LAYER}.self_attn.{name}_proj.weight" for name in "qkvo"},
    **{name: f"{_LAYER}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}


def write_head(folder: Path, head: Head, model: str) -> None:
    """config.json and model.safetensors. Raises OSError."""
    spec, target_ids = head.spec, head.target_ids.cpu().numpy()
    arrays: dict[str, npt.NDArray[Any]] = {_NAMES[name]: bfloat16(array) for name, array in head.arrays().items()}
    marks = np.zeros(spec.vocab_size, dtype=np.bool_)
    marks[target_ids] = True
    arrays |= {"d2t": target_ids - np.arange(len(target_ids), dtype=np.int64), "t2d": marks}
    write_safetensors(folder / HEAD_FILE, arrays, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(spec, model), indent=2) + "\n", encoding="utf-8")


def _config(spec: Eagle3Spec, model: str) -> dict[str, Any]:
    attention, mlp = spec.layer.grouped, spec.layer.dense
    assert mlp is not None
    name = "eagle_aux_hidden_state_layer_ids"
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "target_model": model,
        "hidden_size": spec.hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": attention.rope.theta,
        "hidden_act": mlp.activation,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "norm_before_residual": spec.norm_before_residual,
        name: list(spec.taps),
        "eagle_config": {"use_aux_hidden_state": True, name: [tap - 1 for tap in spec.taps]},
    }
