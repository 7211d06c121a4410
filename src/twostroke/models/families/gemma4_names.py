"""What Gemma 4's files call its tensors."""

from __future__ import annotations

from dataclasses import replace

from twostroke.models.families import experts
from twostroke.models.families.declaration import GGUF_NAMES, HF_NAMES
from twostroke.models.families.gemma2 import HF_GEMMA_NAMES

_LAYER: tuple[tuple[str, str, str], ...] = (
    # canonical, in a folder, in a GGUF file
    ("input_gate", "per_layer_input_gate.weight", "inp_gate.weight"),
    ("input_projection", "per_layer_projection.weight", "proj.weight"),
    ("post_input_norm", "post_per_layer_input_norm.weight", "post_norm.weight"),
    ("layer_scale", "layer_scalar", "layer_output_scale.weight"),
    ("router", "router.proj.weight", "ffn_gate_inp.weight"),
    ("router_norm", "router.scale", "ffn_gate_inp.scale"),
    ("expert_scale", "router.per_expert_scale", "ffn_down_exps.scale"),
    ("experts_norm", "pre_feedforward_layernorm_2.weight", "pre_ffw_norm_2.weight"),
    ("post_experts_norm", "post_feedforward_layernorm_2.weight", "post_ffw_norm_2.weight"),
    ("post_shared_norm", "post_feedforward_layernorm_1.weight", "post_ffw_norm_1.weight"),
)
_WHOLE: tuple[tuple[str, str, str], ...] = (
    ("layer_embedding", "model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight"),
    ("layer_projection", "model.per_layer_model_projection.weight", "per_layer_model_proj.weight"),
    ("layer_projection_norm", "model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
)
_OTHER_SENSES = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder.")

HF_GEMMA4_NAMES = replace(
    HF_NAMES,
    whole={**HF_NAMES.whole, **{stored: (canonical,) for canonical, stored, _ in _WHOLE}},
    layer={**HF_GEMMA_NAMES.layer, **{stored: (canonical,) for canonical, stored, _ in _LAYER}},
    experts=experts.each_by_itself("experts") | experts.each_by_itself("moe.experts"),
    stacked_experts={"experts.gate_up_proj": ("gate", "up"), "experts.down_proj": ("down",)},
    mlp_is_shared=True,
    ignored_prefixes=tuple(f"{outer}{name}" for outer in ("", "model.") for name in _OTHER_SENSES),
    renamed_prefixes={"model.language_model.": "model."},
)
_GGUF = experts.with_gguf_experts(GGUF_NAMES)
GGUF_GEMMA4_NAMES = replace(
    _GGUF,
    whole={**GGUF_NAMES.whole, **{stored: (canonical,) for canonical, _, stored in _WHOLE}},
    layer={**GGUF_NAMES.layer, **{stored: (canonical,) for canonical, _, stored in _LAYER}},
    mlp_is_shared=True,
)
