"""MTP blocks: layers behind a model's last that its own file holds and that guess the tokens to come. Which models have
some is read from what they declare; no family that this engine runs has any, which is said in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MTP = "mtp"
"""What it would be asked for by."""
_CONFIG_NAMES = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers")
_GGUF_SUFFIX = ".nextn_predict_layers"


def mtp_blocks(settings: Mapping[str, Any]) -> int:
    """How many a config.json, or a GGUF file's fields, declare; 0: none, or nothing that could be meant so."""
    inner = settings.get("text_config")
    named = [settings.get(name) for name in _CONFIG_NAMES]
    named += [inner.get(name) for name in _CONFIG_NAMES] if isinstance(inner, Mapping) else []
    named += [value for name, value in settings.items() if isinstance(name, str) and name.endswith(_GGUF_SUFFIX)]
    return next((value for value in named if type(value) is int and value > 0), 0)


def why_no_mtp(model: str, settings: Mapping[str, Any]) -> str:
    """Why `mtp` cannot draft for a model."""
    blocks = mtp_blocks(settings)
    if not blocks:
        return f"{model} has no MTP blocks: its settings declare none; an EAGLE-3 head (eagle3:FOLDER) is another way"
    return f"{model} declares {blocks} MTP block{'s' if blocks > 1 else ''}, and this engine computes none of them yet"
