"""The model families, by what their files call them. A new family is one file here and one line in FAMILIES."""

from __future__ import annotations

from twostroke.core.errors import ModelError
from twostroke.models.families import gemma2, gemma3, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe
from twostroke.models.families.declaration import Family
from twostroke.models.families.fields import shown

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    phi3.FAMILY,
)

_BY_HF_ARCHITECTURE = {name: family for family in FAMILIES for name in family.hf_architectures}
_BY_GGUF_ARCHITECTURE = {name: family for family in FAMILIES for name in family.gguf_architectures}


def family_of_config(architecture: str) -> Family:
    return _find(architecture, _BY_HF_ARCHITECTURE)


def family_of_gguf(architecture: str) -> Family:
    return _find(architecture, _BY_GGUF_ARCHITECTURE)


def _find(architecture: str, known: dict[str, Family]) -> Family:
    if architecture not in known:
        raise ModelError(f"the architecture {shown(architecture)} is not supported; known are: {', '.join(known)}")
    return known[architecture]
