"""ERNIE 4.5, dense: Llama whose rope pairs neighbours. Rows of q and k are put in order as they are loaded, so every
backend rotates them as it does others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder
from twostroke.models.families.declaration import GGUF_NAMES, HF_NAMES, Adjustment, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"use_bias": (False,)})
    config = config.over({"head_dim": 128, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5})
    return decoder.spec_from_config(config, "ernie4_5", tied=True)


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    return decoder.spec_from_gguf(fields, tensors, "ernie4_5")


_ROWS = dict.fromkeys(("q", "k"), Adjustment.HALVES_FROM_PAIRS)
FAMILY = Family(
    "ernie4_5",
    ("Ernie4_5ForCausalLM",),
    ("ernie4_5",),
    _from_config,
    _from_gguf,
    replace(HF_NAMES, adjust=_ROWS),
    replace(GGUF_NAMES, adjust=_ROWS),
)
