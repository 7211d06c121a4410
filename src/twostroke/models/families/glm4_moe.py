"""GLM-4.5 and 4.6: half of each head rotated, biases on q, k and v, and DeepSeek V3's experts and routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder, experts
from twostroke.models.families.declaration import GGUF_NAMES, Family, StoredTensor
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


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    """A sigmoid where nothing is said. What is normed where is told by the tensors that are there."""
    fields = fields.over({f"{fields.prefix}expert_gating_func": experts.GGUF_SIGMOID})
    spec = decoder.spec_from_gguf(fields, tensors, "glm4_moe", handled=("expert_count", "rope.dimension_count"))
    spec = decoder.with_attention(spec, qk_norm="blk.0.attn_q_norm.weight" in tensors)
    return decoder.with_gguf_experts(decoder.without_drafting(spec, fields), fields, tensors)


_GGUF_EXPERTS = experts.with_gguf_experts(GGUF_NAMES)
_GGUF_NAMES = replace(
    _GGUF_EXPERTS,
    # Named as in the folder: what comes behind attention is the MLP's norm.
    layer={**_GGUF_EXPERTS.layer, "post_attention_norm.weight": ("mlp_norm",)},
    ignores_further_layers=True,
)
FAMILY = Family(
    "glm4_moe",
    ("Glm4MoeForCausalLM",),
    ("glm4moe",),
    _from_config,
    _from_gguf,
    HF_LATENT_NAMES,
    _GGUF_NAMES,
)
