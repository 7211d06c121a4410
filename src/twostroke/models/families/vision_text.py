"""Text halves of further models that see images: LLaVA (Next and OneVision), InternVL, SmolVLM, LFM2-VL, GLM-4.1V and
GLM-4.5V. Each is a model of another family within a larger one; what sees images is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder, glm4, glm4_moe, lfm2, llama, mistral, qwen2, qwen3
from twostroke.models.families.declaration import Family, TensorNames
from twostroke.models.families.fields import Fields, shown
from twostroke.models.spec import ModelSpec

_LIKE_LLAMA = {one.name: one for one in (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)}
"""Whose tensors have the same names."""
_TIED = "tie_word_embeddings"


def _names(text: Family) -> TensorNames:
    """As files of the Hub have them, older and newer ones."""
    sees = ("vision_tower.", "multi_modal_projector.", "vision_model.", "connector.", "visual.", "image_newline")
    return replace(
        text.hf_names,
        ignored_prefixes=(*text.hf_names.ignored_prefixes, *sees, *(f"model.{part}" for part in sees)),
        renamed_prefixes={
            "language_model.model.": "model.",
            "language_model.lm_head.": "lm_head.",
            "model.language_model.": "model.",
            "model.text_model.": "model.",
        },
    )


def _family(name: str, stem: str, texts: Mapping[str, Family], *, tied: bool = False) -> Family:
    """`texts`: by what the text half calls itself; the first, where it does not. `tied`: what silence means of the
    embedding, which is the whole model's to say."""
    first = next(iter(texts))

    def from_config(config: Fields) -> ModelSpec:
        text = config.section("text_config")
        if text is None:
            text, said = config, config.get(_TIED)  # taken out already
        else:
            decoder.refuse_quantised(config)
            said = config.flag(_TIED, default=tied)
        kind = text.text("model_type", first).removesuffix("_text")
        if kind not in texts:
            raise text.error("model_type", f"is {shown(kind)}; the supported ones are {', '.join(texts)}")
        if said is not None:
            text = text.without(_TIED).over({_TIED: said})
        return texts[kind].spec_from_config(text)

    names = _names(texts[first])
    return Family(name, (f"{stem}ForConditionalGeneration",), (), from_config, hf_names=names)


def _glm4v_from_config(text: Fields) -> ModelSpec:
    """It has biases whatever its settings say."""
    text = text.without("attention_bias").over({"attention_bias": True})
    return replace(glm4.FAMILY.spec_from_config(text), family="glm4v")


LLAVA = _family("llava", "Llava", _LIKE_LLAMA)
LLAVA_NEXT = _family("llava_next", "LlavaNext", _LIKE_LLAMA)
LLAVA_ONEVISION = _family("llava_onevision", "LlavaOnevision", _LIKE_LLAMA)
INTERNVL = _family("internvl", "InternVL", {name: _LIKE_LLAMA[name] for name in ("qwen2", "qwen3", "llama")}, tied=True)
SMOLVLM = _family("smolvlm", "SmolVLM", {"llama": llama.FAMILY})
LFM2_VL = _family("lfm2_vl", "Lfm2Vl", {"lfm2": lfm2.FAMILY}, tied=True)
GLM_4V = _family("glm4v", "Glm4v", {"glm4v": replace(glm4.FAMILY, spec_from_config=_glm4v_from_config)})
GLM_4V_MOE = _family("glm4v_moe", "Glm4vMoe", {"glm4v_moe": glm4_moe.FAMILY})
