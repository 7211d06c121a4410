"""Mixtures of experts as files describe them: config.json's settings, GGUF's keys, and the names of their tensors.
Every layer has experts or none has: a model that mixes the two is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families.declaration import TensorNames
from twostroke.models.families.fields import Fields, shown
from twostroke.models.spec import ModelSpec, MoeSpec
from twostroke.models.weights.tensor import WeightTensor

_MAX_EXPERTS = 4096
_MAX_EXPERTS_IN_ALL = 2**16
"""Over all layers: each expert is three tensors, and a hostile file must not make a list of billions."""
_MAX_INTERMEDIATE = 2**20

# Since transformers 5 these are a model's own tensors; what it saves, and the Hub holds, is mostly one file tensor
# for each expert.
HF_STACKED_EXPERTS = {"mlp.experts.gate_up_proj": ("gate", "up"), "mlp.experts.down_proj": ("down",)}


def moe_from_config(
    config: Fields, spec: ModelSpec, *, expert_intermediate_size: int, normalise_weights: bool
) -> MoeSpec:
    config.refuse_unless({"decoder_sparse_step": (1,)})
    dense_layers = config.get("mlp_only_layers")
    if dense_layers is not None and dense_layers != []:
        raise config.error("mlp_only_layers", "names layers without experts, and only models with none are supported")
    # Qwen says num_experts and Mixtral num_local_experts; transformers 5 writes the latter for both.
    old, new = config.get("num_experts"), config.get("num_local_experts")
    if old is not None and new is not None and old != new:
        raise config.error("num_experts", f"is {shown(old)}, and num_local_experts is {shown(new)}")
    name = "num_local_experts" if old is None else "num_experts"
    num_experts = config.integer(name, 1, _MAX_EXPERTS)
    _check_total(config, name, num_experts, spec)
    return MoeSpec(
        num_experts=num_experts,
        experts_per_token=config.integer("num_experts_per_tok", 1, num_experts),
        expert_intermediate_size=expert_intermediate_size,
        normalise_weights=normalise_weights,
    )


def expert_size_from(config: Fields, name: str) -> int:
    return config.integer(name, 1, _MAX_INTERMEDIATE)


def has_experts(fields: Fields) -> bool:
    """Whether a GGUF file counts experts; most that have none say nothing of them."""
    return fields.get("expert_count") not in (None, 0)


def moe_from_gguf(fields: Fields, tensors: Mapping[str, WeightTensor], spec: ModelSpec) -> MoeSpec:
    """llama.cpp scales the chosen shares to a sum of 1 in these architectures, unless a key says otherwise."""
    num_experts = fields.integer("expert_count", 1, _MAX_EXPERTS)
    _check_total(fields, "expert_count", num_experts, spec)
    if "blk.0.ffn_gate_inp.weight" not in tensors:
        raise fields.error("expert_count", f"is {num_experts}, and the file holds no router in its first layer")
    # 1 is a softmax, which is what these architectures have without a word, too.
    fields.refuse_unless(
        {"expert_shared_count": (0,), "expert_gating_func": (0, 1), "expert_weights_scale": (0, 0.0, 1, 1.0)}
    )
    return MoeSpec(
        num_experts=num_experts,
        experts_per_token=fields.integer("expert_used_count", 1, num_experts),
        expert_intermediate_size=fields.integer(
            "expert_feed_forward_length", 1, _MAX_INTERMEDIATE, spec.intermediate_size
        ),
        normalise_weights=fields.flag("expert_weights_norm", default=True),
    )


def with_gguf_experts(names: TensorNames) -> TensorNames:
    """Files hold a layer's experts in three stacks; those of early 2024 a tensor for each."""
    return replace(
        names,
        layer={**names.layer, "ffn_gate_inp.weight": ("router",)},
        experts={f"ffn_{name}.{{}}.weight": (name,) for name in ("gate", "up", "down")},
        stacked_experts={f"ffn_{name}_exps.weight": (name,) for name in ("gate", "up", "down")},
    )


def _check_total(fields: Fields, name: str, num_experts: int, spec: ModelSpec) -> None:
    if num_experts * spec.num_layers > _MAX_EXPERTS_IN_ALL:
        raise fields.error(name, f"is {num_experts}, too many for {spec.num_layers} layers")
