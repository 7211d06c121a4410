"""GLM-4.5 and 4.6: half of each head rotated, biases on q, k and v, and DeepSeek V3's experts and routing."""

from __future__ import annotations

from twostroke.models.families import decoder, experts
from twostroke.models.families.declaration import Family
from twostroke.models.families.deepseek import HANDLED, HF_LATENT_NAMES
from twostroke.models.families.fields import Fields
from twostroke.models.families.phi3 import rotary_dim
from twostroke.models.spec import ModelSpec, Routing


def _from_config(config: Fields) -> ModelSpec:
    config = config.over({"first_k_dense_replace": 1, "head_dim": 128})
    handled = tuple(name for name in HANDLED if name != "kv_lora_rank")
    spec = decoder.spec_from_config(config, "glm4_moe", rotary_dim=rotary_dim(config, 0.5), handled=handled)
    has_norms = config.flag("use_qk_norm", default=False)
    spec = decoder.with_attention(spec, qk_norm=has_norms, output_bias=False)
    routing = Routing("sigmoid", has_correction=True, ranked_by=2)
    normalise = config.flag("norm_topk_prob", default=True)
    return experts.with_routing(spec, config, routing, groups=(1, 1), normalise_weights=normalise)


FAMILY = Family(
    "glm4_moe",
    ("Glm4MoeForCausalLM",),
    (),
    _from_config,
    hf_names=HF_LATENT_NAMES,
)
