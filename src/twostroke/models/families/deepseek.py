"""DeepSeek V2 and V3, and what is built like V3: latent attention, leading layers without experts, and experts beside
one that every token meets. GLM-4.7-Flash and Kimi K2 differ from V3 in their sizes and defaults alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder, experts, latent
from twostroke.models.families.declaration import GGUF_NAMES, HF_NAMES, Family, StoredTensor
from twostroke.models.families.fields import Fields, shown
from twostroke.models.spec import ModelSpec, Routing

HANDLED = (*latent.HANDLED, *experts.COUNTS, "n_shared_experts", "first_k_dense_replace")


def _v2_from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"scoring_func": ("softmax",), "norm_topk_prob": (False,)})
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        config.refuse("topk_method", f"is {shown(method)}; the supported ones are greedy and group_limited_greedy")
    spec = decoder.spec_from_config(config, "deepseek_v2", handled=HANDLED)
    has_groups = method == "group_limited_greedy"
    return experts.with_routing(spec, config, groups=(1, 1) if has_groups else None, normalise_weights=False)


def _v3_like(config: Fields, family: str, groups: tuple[int, int], scale: float) -> ModelSpec:
    """`groups` and `scale` are what the family's own code takes where its config says nothing."""
    config.refuse_unless({"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)})
    spec = decoder.spec_from_config(config, family, handled=HANDLED)
    routing = Routing("sigmoid", has_correction=True, ranked_by=2, share_scale=scale)
    normalise = config.flag("norm_topk_prob", default=True)
    return experts.with_routing(spec, config, routing, groups=groups, normalise_weights=normalise)


def _v3_from_config(config: Fields) -> ModelSpec:
    return _v3_like(config, "deepseek_v3", groups=(8, 4), scale=2.5)


def _kimi_from_config(config: Fields) -> ModelSpec:
    return _v3_like(config, "kimi_k2", groups=(1, 1), scale=2.827)


def _glm_from_config(config: Fields) -> ModelSpec:
    config = config.over({"first_k_dense_replace": 1})
    return _v3_like(config, "glm4_moe_lite", groups=(1, 1), scale=1.8)


_HANDLED_IN_GGUF = ("expert_count", "attention.temperature_scale")


def latent_experts_from_gguf(
    fields: Fields, tensors: Mapping[str, StoredTensor], family: str, ranked_by: int | None = None
) -> ModelSpec:
    """Without layers that draft."""
    spec = decoder.spec_from_gguf(fields, tensors, family, handled=_HANDLED_IN_GGUF)
    spec = decoder.with_gguf_experts(decoder.without_drafting(spec, fields), fields, tensors, ranked_by=ranked_by)
    return decoder.with_latent(spec, growth=latent.growth_from_gguf(fields))


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    """All of them say "deepseek2": V3's are those that score by a sigmoid. Early files of GLM-4.7-Flash do not say so;
    what they have is the correction that goes with it."""
    if fields.get("expert_gating_func") is None and any(name.endswith(".exp_probs_b.bias") for name in tensors):
        fields = fields.over({f"{fields.prefix}expert_gating_func": experts.GGUF_SIGMOID})
    spec = latent_experts_from_gguf(fields, tensors, "deepseek_v2")
    is_v3 = spec.moe is not None and spec.moe.routing.scoring == "sigmoid"
    return replace(spec, family="deepseek_v3") if is_v3 else spec


HF_LATENT_NAMES = replace(
    HF_NAMES,
    layer={
        **latent.HF_LATENT_LAYER,
        "mlp.gate.weight": ("router",),
        "mlp.gate.e_score_correction_bias": ("router_correction",),
        **{f"mlp.shared_experts.{name}_proj.weight": (f"shared.{name}",) for name in ("gate", "up", "down")},
    },
    experts={f"mlp.experts.{{}}.{name}_proj.weight": (name,) for name in ("gate", "up", "down")},
    stacked_experts=experts.HF_STACKED_EXPERTS,
    ignores_further_layers=True,
)
GGUF_LATENT_NAMES = replace(
    experts.with_gguf_experts(replace(GGUF_NAMES, layer=latent.GGUF_LATENT_LAYER)),
    latent_stacks=latent.GGUF_LATENT_STACKS,
    ignores_further_layers=True,
)
V2 = Family(
    "deepseek_v2",
    ("DeepseekV2ForCausalLM",),
    (),
    _v2_from_config,
    hf_names=HF_LATENT_NAMES,
)
V3 = Family(
    "deepseek_v3",
    ("DeepseekV3ForCausalLM",),
    ("deepseek2",),
    _v3_from_config,
    _from_gguf,
    HF_LATENT_NAMES,
    GGUF_LATENT_NAMES,
)
# Kimi's files say DeepseekV3ForCausalLM.
KIMI = Family("kimi_k2", (), (), _kimi_from_config, hf_names=HF_LATENT_NAMES)
GLM = Family(
    "glm4_moe_lite",
    ("Glm4MoeLiteForCausalLM",),
    (),
    _glm_from_config,
    hf_names=HF_LATENT_NAMES,
)
