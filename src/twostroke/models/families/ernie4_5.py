"""ERNIE 4.5: Llama whose rope pairs neighbours. Rows of q and k are put in order as they are loaded, so every backend
rotates them as it does others. The larger ones have experts from some layer on, chosen by softmax and a correction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder, experts
from twostroke.models.families.declaration import GGUF_NAMES, HF_LAYER, HF_NAMES, Adjustment, Family, StoredTensor
from twostroke.models.families.deepseek import HF_LATENT_NAMES
from twostroke.models.families.fields import Fields, shown
from twostroke.models.spec import ModelSpec, Routing

_DEFAULTS = {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5}
_MOE_NAMES = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
_MOE_DEFAULTS = {"moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2, "moe_intermediate_size": 1536}
_HANDLED = (*experts.HANDLED, "n_shared_experts", "first_k_dense_replace")


def _from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"use_bias": (False,)})
    return decoder.spec_from_config(config.over({"head_dim": 128, **_DEFAULTS}), "ernie4_5", tied=True)


def _moe_from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"use_bias": (False,), "moe_layer_interval": (1,)})
    config = config.over({**_DEFAULTS, **_MOE_DEFAULTS})
    if not isinstance(config.get("moe_num_experts"), int):  # the ones that see have as many again for images
        raise config.error(
            "moe_num_experts", f"is {shown(config.get('moe_num_experts'))}, and one number is understood"
        )
    num_layers = config.integer("num_hidden_layers", 1, decoder.MAX_LAYERS)
    config.refuse_unless({"moe_layer_end_index": (-1, num_layers - 1)})
    first = config.integer("moe_layer_start_index", 0, num_layers, 1)
    own = {"n_shared_experts": config.get("moe_num_shared_experts"), "first_k_dense_replace": first}
    config = replace(config.over(own), names=_MOE_NAMES)
    spec = decoder.spec_from_config(config, "ernie4_5_moe", handled=_HANDLED, tied=True)
    return experts.with_experts(experts.required(spec, config), routing=Routing(has_correction=True))


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    return decoder.spec_from_gguf(fields, tensors, "ernie4_5")


def _moe_from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    spec = decoder.spec_from_gguf(fields, tensors, "ernie4_5_moe", handled=("expert_count",))
    spec = decoder.with_gguf_experts(spec, fields, tensors)
    return experts.with_experts(spec, routing=Routing(has_correction=True))


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
_MOE_HF_NAMES = replace(
    HF_LATENT_NAMES,
    layer={
        **HF_LAYER,
        **{name: targets for name, targets in HF_LATENT_NAMES.layer.items() if name.startswith("mlp.")},
        "mlp.moe_statics.e_score_correction_bias": ("router_correction",),
    },
    flattened=frozenset({"mlp.moe_statics.e_score_correction_bias"}),
    ignored_prefixes=("model.mtp_",),
    adjust=_ROWS,
)
MOE_FAMILY = Family(
    "ernie4_5_moe",
    ("Ernie4_5_MoeForCausalLM",),
    ("ernie4_5-moe",),
    _moe_from_config,
    _moe_from_gguf,
    _MOE_HF_NAMES,
    replace(experts.with_gguf_experts(GGUF_NAMES), adjust=_ROWS),
)
