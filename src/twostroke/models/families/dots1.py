"""dots.llm1: Qwen3's attention, which norms each head of queries and keys, and DeepSeek V3's experts and routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder, experts
from twostroke.models.families.declaration import GGUF_NAMES, Family, StoredTensor
from twostroke.models.families.deepseek import HANDLED, HF_LATENT_NAMES
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec, Routing

_HANDLED = tuple(name for name in HANDLED if name != "kv_lora_rank")
_FIRST_WINDOW = 62
"""The first layer that slides, where a window is given and nothing says from which layer on."""


def _from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)})
    spec = decoder.spec_from_config(config, "dots1", handled=_HANDLED)
    routing = Routing("sigmoid", has_correction=True, ranked_by=2)
    normalise = config.flag("norm_topk_prob", default=False)
    spec = experts.with_routing(spec, config, routing, groups=(1, 1), normalise_weights=normalise)
    first = config.integer("max_window_layers", 0, decoder.MAX_LAYERS, _FIRST_WINDOW)
    slides = config.get("sliding_window") is not None
    sliding = [slides and index >= first for index in range(spec.num_layers)]
    return decoder.windowed(decoder.with_attention(spec, qk_norm=True), config, sliding)


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    """A sigmoid where nothing is said."""
    fields = fields.over({f"{fields.prefix}expert_gating_func": experts.GGUF_SIGMOID})
    spec = decoder.spec_from_gguf(fields, tensors, "dots1", handled=("expert_count",))
    return decoder.with_gguf_experts(decoder.with_attention(spec, qk_norm=True), fields, tensors)


FAMILY = Family(
    "dots1",
    ("Dots1ForCausalLM",),
    ("dots1",),
    _from_config,
    _from_gguf,
    replace(HF_LATENT_NAMES, ignores_further_layers=False),
    experts.with_gguf_experts(GGUF_NAMES),
)
