"""Qwen2-VL, 2.5-VL and Qwen3-VL, their text halves: Qwen2 and Qwen3. Where no image is, the three positions that they
give a token are the same, and so is the rotation. What sees images is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from twostroke.models.families import decoder, qwen2, qwen3, qwen3_moe
from twostroke.models.families.declaration import Family, StoredTensor, TensorNames
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec

_THREE_POSITIONS = "mrope"
_EXPERT_STACKS = frozenset({"mlp.experts.gate_up_proj", "mlp.experts.down_proj"})
Reads = Callable[[Fields], ModelSpec]
ReadsFile = Callable[[Fields, Mapping[str, StoredTensor]], ModelSpec]


def text_half(config: Fields) -> Fields:
    """Until transformers 5 Qwen2-VL had its text's settings at the top."""
    text = config.section("text_config")
    if text is None:
        return config
    decoder.refuse_quantised(config)
    # Which of the two says whether the embedding is the head's matrix, too, has changed: the outer one counts.
    tied = config.flag("tie_word_embeddings", default=text.flag("tie_word_embeddings", default=False))
    return text.without("tie_word_embeddings").over({"tie_word_embeddings": tied})


def _reading(family: str, read: Reads) -> Reads:
    def from_config(config: Fields) -> ModelSpec:
        config = text_half(config).over({"norm_topk_prob": True})  # of those with experts
        for name in ("rope_scaling", "rope_parameters"):
            section = config.section(name)
            if section is not None and _THREE_POSITIONS in (section.get("type"), section.get("rope_type")):
                plain = {**section.values, "type": "default", "rope_type": "default"}
                config = replace(config, values={**config.values, name: plain})
        return replace(read(config), family=family)

    return from_config


def _reading_file(family: str, read: ReadsFile) -> ReadsFile:
    return lambda fields, tensors: replace(read(fields, tensors), family=family)


def _names(names: TensorNames) -> TensorNames:
    return replace(
        names,
        ignored_prefixes=(*names.ignored_prefixes, "visual.", "model.visual."),
        renamed_prefixes={"model.language_model.": "model."},
    )


def _family(
    name: str, architecture: str, gguf: tuple[str, ...], text: Family, names: TensorNames | None = None
) -> Family:
    return Family(
        name,
        (architecture,),
        gguf,
        _reading(name, text.spec_from_config),
        _reading_file(name, text.spec_from_gguf),
        _names(names or text.hf_names),
        text.gguf_names,
    )


QWEN2_VL = _family("qwen2_vl", "Qwen2VLForConditionalGeneration", ("qwen2vl",), qwen2.FAMILY)
QWEN2_5_VL = _family("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", (), qwen2.FAMILY)
QWEN3_VL = _family("qwen3_vl", "Qwen3VLForConditionalGeneration", ("qwen3vl",), qwen3.FAMILY)
QWEN3_VL_MOE = _family(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    ("qwen3vlmoe",),
    qwen3_moe.FAMILY,
    replace(qwen3_moe.FAMILY.hf_names, inputs_first=_EXPERT_STACKS),
)
