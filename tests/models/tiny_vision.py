"""Tiny models of transformers, random, that see images: what is inside them is another family's."""

from __future__ import annotations

from typing import Any

import transformers
from tests.models.tiny_sizes import SIZES, WINDOW
from transformers import PreTrainedModel

_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}
_GLM_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_GLM_VISION |= {"image_size": 32, "patch_size": 8}


def _around(stem: str, text: Any, vision: Any, **more: Any) -> PreTrainedModel:
    config = getattr(transformers, f"{stem}Config")(text_config=text, vision_config=vision, **more)
    return getattr(transformers, f"{stem}ForConditionalGeneration")(config)


def llava() -> PreTrainedModel:
    text, vision = transformers.LlamaConfig(**SIZES), transformers.CLIPVisionConfig(**_VISION)
    return _around("Llava", text, vision, image_token_index=3)


def llava_next() -> PreTrainedModel:
    text = transformers.MistralConfig(**SIZES, sliding_window=WINDOW)
    return _around("LlavaNext", text, transformers.CLIPVisionConfig(**_VISION), image_token_index=3)


def llava_onevision() -> PreTrainedModel:
    text, vision = transformers.Qwen2Config(**SIZES), transformers.SiglipVisionConfig(**_VISION)
    return _around("LlavaOnevision", text, vision, image_token_index=3, video_token_index=4)


def internvl() -> PreTrainedModel:
    text = transformers.Qwen3Config(**SIZES, head_dim=32)
    vision = {**_VISION, "image_size": [32, 32], "patch_size": [16, 16]}
    return _around("InternVL", text, transformers.InternVLVisionConfig(**vision), image_token_id=3)


def smolvlm() -> PreTrainedModel:
    text, vision = transformers.LlamaConfig(**SIZES), transformers.SmolVLMVisionConfig(**_VISION)
    return _around("SmolVLM", text, vision, image_token_id=3, scale_factor=1, pad_token_id=0)


def lfm2_vl() -> PreTrainedModel:
    vision = {name: value for name, value in _VISION.items() if name != "image_size"}
    text = transformers.Lfm2Config(**SIZES, full_attn_idxs=[1])
    vision_config = transformers.Siglip2VisionConfig(**vision, num_patches=4)
    return _around("Lfm2Vl", text, vision_config, image_token_id=3, projector_hidden_size=32)


def _glm_rope(sections: list[int]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, "partial_rotary_factor": 0.5}


def glm4v() -> PreTrainedModel:
    text = {**SIZES, "rope_parameters": _glm_rope([2, 1, 1]), "pad_token_id": 0}
    return _around("Glm4v", text, _GLM_VISION, image_token_id=3)


def glm4v_moe(**settings: Any) -> PreTrainedModel:
    own = {"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    own |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 32, "routed_scaling_factor": 1.5}
    own |= {"rope_parameters": _glm_rope([4, 2, 2]), "pad_token_id": 0}
    return _around("Glm4vMoe", {**SIZES, **own, **settings}, _GLM_VISION, image_token_id=3)
