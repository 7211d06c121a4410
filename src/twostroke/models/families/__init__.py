"""The model families, by what their files call them. A file here that declares a `Family` is one: the engine, the
planner and the simulator read it. Declarations alone, in the standard library: no weight is looked at."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from twostroke.core.errors import ModelError
from twostroke.models.families import llama
from twostroke.models.families.declaration import Family
from twostroke.models.families.direction import with_direction
from twostroke.models.families.fields import Fields, shown
from twostroke.models.families.rope import MAX_CONTEXT
from twostroke.models.spec import ModelSpec


def _declarations() -> tuple[Family, ...]:
    modules = [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return tuple(value for module in modules for value in vars(module).values() if isinstance(value, Family))


FAMILIES = _declarations()

_BY_NAME = {family.name: family for family in FAMILIES}
_BY_HF_ARCHITECTURE = {name: family for family in FAMILIES for name in family.hf_architectures}
_BY_GGUF_ARCHITECTURE = {name: family for family in FAMILIES for name in family.gguf_architectures}
_SAY_NOTHING_OF_SIZE: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": MAX_CONTEXT,
}
"""What a list of sizes may leave out, where they are only to be counted."""


def family_of_config(architecture: str) -> Family:
    return _find(architecture, _BY_HF_ARCHITECTURE)


def family_of_gguf(architecture: str) -> Family:
    return _find(architecture, _BY_GGUF_ARCHITECTURE)


def spec_of(family: Family, config: Fields) -> ModelSpec:
    """What a config.json declares: what the family reads, and what all families have in common."""
    return with_direction(family.spec_from_config(config), config)


def _find(architecture: str, known: dict[str, Family]) -> Family:
    family = known.get(architecture)
    if family is None:
        runnable = ", ".join(name for name, one in known.items() if one.not_run is None)
        raise ModelError(f"the architecture {shown(architecture)} is not supported; known are: {runnable}")
    if family.not_run is not None:
        raise ModelError(f"{_not_run(family)}; `twostroke plan` counts it by its config.json")
    return family


def _not_run(family: Family) -> str:
    return f"this engine does not run {family.name} models: {family.not_run}"


@dataclass(frozen=True, slots=True)
class Declared:
    """What a config.json says of a model that is to be counted, whether it can be run or not."""

    spec: ModelSpec
    not_run: str | None
    """Why this engine does not run it anywhere, in a sentence; which backend does, `models/features.py` says."""
    is_assumed: bool
    """Whether no family has its name, and it was read as a Llama."""


def declared(config: Mapping[str, Any]) -> Declared:
    """The same reading as before a run, of the text half; but what no backend computes is said, and not refused."""
    if not isinstance(config, Mapping):
        raise ModelError("config.json must hold an object")
    text = text_half(config)
    name = Fields("config.json", text).text("model_type", _name_of(text)).removesuffix("_text")
    family = _BY_NAME.get(name)
    refusals: list[str] = []
    fields = Fields("config.json", text, refusals=refusals).over(_SAY_NOTHING_OF_SIZE)
    if family is None:
        return _assumed(name, fields)
    spec = spec_of(family, fields)
    architecture = _architecture(config)
    if family.not_run is not None:
        return Declared(spec, _not_run(family), is_assumed=False)
    if architecture is not None and architecture not in _BY_HF_ARCHITECTURE:
        refusals.insert(0, f"the architecture {shown(architecture)} is not supported")
    if refusals:
        return Declared(spec, f"this engine does not run it: {refusals[0]}", is_assumed=False)
    return Declared(spec, None, is_assumed=False)


def _assumed(name: str, fields: Fields) -> Declared:
    """Of a family that nobody declares."""
    unknown = f"this engine knows no {shown(name)} models"
    try:
        spec = replace(llama.FAMILY.spec_from_config(fields), family=name)
    except ModelError as error:
        raise ModelError(f"{unknown}, and cannot count this one as a Llama-like decoder: {error}") from None
    return Declared(spec, f"{unknown}: it is counted as a Llama-like decoder", is_assumed=True)


def text_half(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model that does more than text."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    outer = ("tie_word_embeddings", "quantization_config", "compression_config")
    return dict(text) | {key: config[key] for key in outer if config.get(key) is not None}


def _architecture(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _name_of(config: Mapping[str, Any]) -> str:
    """For configs that do not name their type. Unknown: from "NewMoeForCausalLM" to "new_moe"."""
    architecture = _architecture(config) or ""
    if architecture in _BY_HF_ARCHITECTURE:
        return _BY_HF_ARCHITECTURE[architecture].name
    stem = architecture.split("For")[0]
    return "".join(f"_{char.lower()}" if char.isupper() and index else char.lower() for index, char in enumerate(stem))
