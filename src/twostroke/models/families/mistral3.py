"""Mistral's models that also see images, from Small 3.1 to Small 4: the text half (a Mistral, a Ministral 3 or a
Mistral 4) is taken out of them; the vision half is left."""

from __future__ import annotations

from dataclasses import replace

from twostroke.models.families import decoder, ministral3, mistral, mistral4
from twostroke.models.families.declaration import Family
from twostroke.models.families.deepseek import HF_LATENT_NAMES
from twostroke.models.families.fields import Fields, shown
from twostroke.models.spec import ModelSpec

_TEXT_FAMILIES = {"mistral": mistral.FAMILY, "ministral3": ministral3.FAMILY, "mistral4": mistral4.FAMILY}


def _from_config(config: Fields) -> ModelSpec:
    text = config.section("text_config")
    if text is None:
        raise config.error("text_config", "is missing")
    decoder.refuse_quantised(config)
    kind = text.text("model_type", "mistral")
    if kind not in _TEXT_FAMILIES:
        raise text.error("model_type", f"is {shown(kind)}; the supported ones are {', '.join(_TEXT_FAMILIES)}")
    outer = config.get("tie_word_embeddings")
    if outer is not None:  # it is the whole model's, whatever its text half would do alone
        text = text.without("tie_word_embeddings").over({"tie_word_embeddings": outer})
    return _TEXT_FAMILIES[kind].spec_from_config(text)


# Mistral 4's names have all of Mistral's among them.
_HF_NAMES = replace(
    HF_LATENT_NAMES,
    ignored_prefixes=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    renamed_prefixes={
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
    },
    ignores_further_layers=False,
)
FAMILY = Family("mistral3", ("Mistral3ForConditionalGeneration",), (), _from_config, hf_names=_HF_NAMES)
